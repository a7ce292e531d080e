"""Process with the part of an engine that receives a sharded push: `receiving_engine [FAILURE BUCKET]`.

The engine has one rank and prints its port. GET returns the tensors of each push with their checksums, and the groups
that the engine joined. POST /begin begins a push. FAILURE is `dies` or `refuses`: the engine exits or refuses the
push at its BUCKET-th bucket.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
import torch.distributed as dist

from rlsys.engine.cpu.platform import declare_torchvision_ops
from rlsys.engine.hooks.bucket_hooks import BucketReceiver
from rlsys.engine.hooks.bucket_order import Buckets
from rlsys.engine.weight_calls import FORMAT

GROUPS: dict[str, Any] = {}
RECEIVED: list[list[tuple[str, str]]] = []
JOINED: list[str] = []
FAILURE: list[str] = []


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()[:16]


def join(body: dict[str, Any]) -> None:
    from sglang.srt.utils import init_custom_process_group

    JOINED.append(body["group_name"])
    GROUPS[body["group_name"]] = init_custom_process_group(
        backend=body["backend"], init_method=f"tcp://{body['master_address']}:{body['master_port']}",
        world_size=body["world_size"], rank=body["rank_offset"], group_name=body["group_name"],
    )  # fmt: skip


def receive(body: dict[str, Any]) -> None:
    assert body["load_format"] == FORMAT
    buckets, group = Buckets.decode(body["names"][0]), GROUPS[body["group_name"]]
    receiver = BucketReceiver(buckets, group, 0, 1, None, "cpu")
    while receiver.remaining:
        tensors = receiver.take()
        if FAILURE:
            FAILURE[1] = str(int(FAILURE[1]) - 1)
        failing = FAILURE[0] if FAILURE and FAILURE[1] == "0" else None
        if failing == "dies":
            os._exit(1)
        if failing == "refuses":
            receiver.drain()
            raise ValueError("size mismatch")
        RECEIVED[-1].extend((name, sha(tensor)) for name, tensor in tensors)


def leave(body: dict[str, Any]) -> None:
    dist.destroy_process_group(GROUPS.pop(body["group_name"]))


def begin(_: dict[str, Any]) -> None:
    RECEIVED.append([])


CALLS = {
    "/begin": begin,
    "/init_weights_update_group": join,
    "/update_weights_from_distributed": receive,
    "/destroy_weights_update_group": leave,
}


class Engine(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            CALLS[self.path](body)
            code, answer = 200, {"success": True, "message": ""}
        except (ValueError, RuntimeError) as e:
            code, answer = 400, {"success": False, "message": str(e)}
        payload = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        """Return the received tensors and the joined groups."""
        payload = json.dumps({"got": RECEIVED, "joined": JOINED}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


def main(failure: list[str]) -> None:
    declare_torchvision_ops()
    FAILURE.extend(failure)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    server = HTTPServer(("127.0.0.1", 0), Engine)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
