"""Two trainer ranks push to one engine of two ranks through shared memory; rank 0 is also the engine's HTTP server.

Under torchrun: `memory_push.py FOLDER`. The tensors of a rank are filled with its number, which identifies the owner
of the memory that the engine opens. The engine closes the connection of its second request.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlsys.config import Config
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.weights.gathered_push import GatheredPush
from rlsys.weights.push_plan import PushPlan

RECEIVED: list[list[float]] = []


class Engine(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if RECEIVED:
            self.connection.close()  # without an answer
            return
        for handle in body["serialized_named_tensors"]:
            tensors: Any = MultiprocessingSerializer.deserialize(base64.b64decode(handle))
            RECEIVED.append(tensors["flattened_tensor"].view(torch.float32).tolist())
        answer = json.dumps({"success": True}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, port = dist.get_rank(), [0]
    if rank == 0:
        server = HTTPServer(("127.0.0.1", 0), Engine)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = [server.server_port]
    dist.broadcast_object_list(port)
    weights = {"bucket_mb": 16 / 2**20}
    config = Config.model_validate(
        {"model": {"path": "some/model"}, "run": {"dir": folder}, "weights": weights}
    )
    sync = GatheredPush(config, rank, PushPlan({0: (0, 1)}, group=False))
    ticket = WeightUpdate(1, [EngineAddress(f"http://127.0.0.1:{port[0]}", 2, index=0)], [])
    tensors = [(f"t{i}", torch.full((3,), float(rank))) for i in range(4)]  # a bucket each
    bytes_sent = sync.push(iter(tensors), ticket)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"sent": bytes_sent, "seen": RECEIVED}))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
