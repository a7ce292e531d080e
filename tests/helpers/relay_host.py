"""A real relay without an engine: a process that takes weights by the real wire format, and says what it has loaded.

`python tests/helpers/relay_host.py [FOLDER]` prints its port. GET / answers how many pushes were loaded and a digest
of every tensor of the last one. POST /begin_weight_update opens the fence, as in an engine. With FOLDER it waits
after every piece that it has taken until FOLDER/go is there.
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
    """The process as a test sees it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"

    def said(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            state: dict[str, Any] = json.loads(answer.read())
        return state

    def begin(self, epoch: int) -> None:
        """As `begin_push` does."""
        request = urllib.request.Request(
            f"{self.url}/begin_weight_update", b"{}", {"rlsys-push": str(epoch)}, method="POST"
        )
        urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def hosts(count: int, waiting: Sequence[Path | None] = ()) -> Iterator[list[Host]]:
    """So many, ended at the end. `waiting`: of the first ones, the folder that holds them up."""
    with ExitStack() as stack:
        processes = []
        for i in range(count):
            folder = waiting[i] if i < len(waiting) else None
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
    """SHA-256 of the bytes of every tensor of the safetensors files."""
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

    async def say(_: Request) -> Response:
        return JSONResponse({**state, "damaged": relay.damaged})

    app = Starlette()
    app.add_route("/update_weights_from_disk", load, methods=["POST"])
    app.add_route("/begin_weight_update", begin, methods=["POST"])
    app.add_route("/", say)
    app.add_middleware(Fence)
    relay = install(app, lambda endpoint: endpoint)
    if folder is not None:
        take = relay.take

        def held_up(*what: Any) -> int:
            status = take(*what)
            (folder / "taken").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)
            return status

        relay.take = held_up  # type: ignore[method-assign,assignment]
    with socket.create_server(("127.0.0.1", 0)) as s:
        print(s.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([s])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
