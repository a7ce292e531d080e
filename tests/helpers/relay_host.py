"""Real relay without an engine: a process that receives weights in the real wire format and reports what it loaded.

`python tests/helpers/relay_host.py [FOLDER]` prints its port. GET / returns the number of loaded pushes and a digest
of every tensor of the last one. POST /begin_weight_update opens the fence, as in an engine. With FOLDER, the process
waits for FOLDER/go after every piece that it receives.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.python_path import python_path

ROOT = Path(__file__).resolve().parents[2]


class Host:
    """Client of a relay process."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"

    def state(self) -> dict[str, Any]:
        """Return the number of loads, the digests of tensors and the number of damaged pieces."""
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            state: dict[str, Any] = json.loads(answer.read())
        return state

    def begin(self, epoch: int) -> None:
        """Begin a weight update, as `begin_push` does."""
        request = urllib.request.Request(
            f"{self.url}/begin_weight_update", b"{}", {"rlsys-push": str(epoch)}, method="POST"
        )
        urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def hosts(count: int, pause_folders: Sequence[Path | None] = ()) -> Iterator[list[Host]]:
    """Run `count` relay processes. `pause_folders`: FOLDER of each of the first processes, or None."""
    with ExitStack() as stack:
        processes = []
        for i in range(count):
            folder = pause_folders[i] if i < len(pause_folders) else None
            command = [sys.executable, __file__, *([] if folder is None else [str(folder)])]
            environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        host_list = []
        for process in processes:
            assert process.stdout is not None
            host_list.append(Host(process, int(process.stdout.readline())))
        yield host_list


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 digest of every tensor in the safetensors files."""
    tensor_digests = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, tensor_info in json.loads(data[8:start]).items():
            first, end = tensor_info["data_offsets"]
            tensor_digests[name] = hashlib.sha256(data[start + first : start + end]).hexdigest()[:16]
    return tensor_digests


def main(folder: Path | None) -> None:
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    from rlsys.engine.fence import Fence
    from rlsys.weights_relay.install import install

    state: dict[str, Any] = {"loads": 0, "tensors": {}, "damaged": 0}

    async def load(request: Request) -> Response:
        state["tensors"] = digests(Path((await request.json())["model_path"]))
        state["loads"] += 1
        return JSONResponse({"success": True})

    async def begin(_: Request) -> Response:
        return JSONResponse({"success": True})

    async def get_state(_: Request) -> Response:
        return JSONResponse({**state, "damaged": relay.damaged})

    app = Starlette()
    app.add_route("/update_weights_from_disk", load, methods=["POST"])
    app.add_route("/begin_weight_update", begin, methods=["POST"])
    app.add_route("/", get_state)
    app.add_middleware(Fence)
    relay = install(app, lambda endpoint: endpoint)
    if folder is not None:
        receive_piece = relay.receive_piece

        def receive_and_wait(*args: Any) -> int:
            status = receive_piece(*args)
            (folder / "taken").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
            return status

        relay.receive_piece = receive_and_wait  # type: ignore[method-assign,assignment]
    with socket.create_server(("127.0.0.1", 0)) as s:
        print(s.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([s])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
