"""The stock SGLang server, behind a fence and started sooner: `python -m rlsys.engine.server` with
sglang.launch_server's arguments.

An engine of a folder without tokenizer.json gets the conversion that all other processes use (tokenizer_files.py).

Before it starts, sockets.py sees to it that nobody reaches the engine but through its HTTP server. The fence
(fence.py) refuses weights of a push that another one has followed. The relay (rlsys/relay) takes weights in
pieces and passes them on to another host.

Nearly all of a small engine's start is Python importing 7,000 modules, one after the other on one core. Two things
make that a fifth shorter, and change nothing that serves:

- The garbage collector rests meanwhile. It would look through all that was imported again and again.
- megatron-core is hidden. Where it is installed SGLang imports it, for a debugging tool (debug_utils/dumper.py) that
  knows the ranks of a trainer; it can do without.

To delete, these two, when SGLang's own start does without either; seen in 0.5.23.
"""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType

from rlsys.engine import sockets, warm_up
from rlsys.engine.fence import Fence
from rlsys.model_folder import vocabulary_files
from rlsys.obs.role import run_role
from rlsys.relay.install import install
from rlsys.tokenizer_files import tokenizer_folder


def import_most() -> None:
    """Load SGLang's plug-ins, whose hooks import what they hook into: nearly all. The server does so first, too."""
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules["megatron"] = None  # importing it raises ModuleNotFoundError
    gc.disable()
    importlib.import_module("sglang.srt.plugins").load_plugins()
    sockets.check_plugins()
    sockets.check_hooks()
    gc.freeze()  # nothing of it will be garbage
    gc.enable()


def fence() -> None:
    """Put the fence in front of SGLang's HTTP application, which its launcher serves."""
    importlib.import_module("sglang.srt.entrypoints.http_server").app.add_middleware(Fence)


def relay() -> None:
    """Make the server a relay, too. The trainer's calls to it take the admin key, if there is one."""
    auth = importlib.import_module("sglang.srt.utils.auth")
    app = importlib.import_module("sglang.srt.entrypoints.http_server").app
    install(app, auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL))


def tokenizer_arguments(argv: list[str]) -> list[str]:
    """SGLang's arguments for the tokenizer of `--model-path`. Raises UserError."""
    if "--model-path" not in argv or "--tokenizer-path" in argv:
        return []
    path = Path(argv[argv.index("--model-path") + 1])
    if not vocabulary_files(path):
        return []  # SGLang says what it misses
    folder = tokenizer_folder(path, "--trust-remote-code" in argv)
    return [] if folder == path else ["--tokenizer-path", str(folder)]


def prepare() -> None:
    sys.argv += tokenizer_arguments(sys.argv)
    sockets.keep_private(sys.argv[1:])
    import_most()
    warm_up.register()
    warm_up.start_times.end_of("imports")
    fence()
    relay()
    sockets.bind_alone()


if __name__ == "__main__":
    run_role(prepare)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
