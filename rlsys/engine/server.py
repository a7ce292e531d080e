"""SGLang's server with a fence, a relay and a faster start: `python -m rlsys.engine.server ARGUMENTS`.

The arguments are those of sglang.launch_server. The server differs from SGLang's own in these parts:

- sockets.py restricts access to the engine to its HTTP server.
- The fence (fence.py) refuses weights of an outdated push.
- The relay (rlsys/weights_relay) receives weights in pieces and forwards them to another host.
- For a model folder without tokenizer.json, the engine uses the same conversion as all other processes
  (tokenizer_files.py).

A small engine spends most of its start importing 7,000 modules, one after another on one core. Two measures reduce
this time by a fifth, without an effect on serving:

- The garbage collector is disabled during the imports. It would scan all imported objects repeatedly.
- megatron-core is hidden. If it is installed, SGLang imports it for an optional debugging tool
  (debug_utils/dumper.py) that reads a trainer's ranks.

Delete both when SGLang's own start needs neither; checked with 0.5.23.
"""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType

from rlsys.core.model_folder import vocabulary_files
from rlsys.core.tokenizer_files import tokenizer_folder
from rlsys.engine import warm_up
from rlsys.engine.fence import Fence
from rlsys.engine.hooks import sockets
from rlsys.obs.role import run_role
from rlsys.weights_relay.install import install


def preload_modules() -> None:
    """Load SGLang's plug-ins, whose hooks import most of SGLang, and check that their hooks are applied."""
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    modules["megatron"] = None  # importing it raises ModuleNotFoundError
    gc.disable()
    importlib.import_module("sglang.srt.plugins").load_plugins()
    sockets.check_plugins()
    sockets.check_hooks()
    gc.freeze()  # imported objects never become garbage
    gc.enable()


def add_fence() -> None:
    """Add the fence to SGLang's HTTP application, which its launcher serves."""
    importlib.import_module("sglang.srt.entrypoints.http_server").app.add_middleware(Fence)


def add_relay() -> None:
    """Add the relay to SGLang's HTTP application. The trainer's calls to it require the admin key, if one is set."""
    auth = importlib.import_module("sglang.srt.utils.auth")
    app = importlib.import_module("sglang.srt.entrypoints.http_server").app
    install(app, auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL))


def tokenizer_arguments(argv: list[str]) -> list[str]:
    """Return SGLang's arguments for the tokenizer of `--model-path`.

    Raises:
        UserError: The conversion of the tokenizer fails.
    """
    if "--model-path" not in argv or "--tokenizer-path" in argv:
        return []
    path = Path(argv[argv.index("--model-path") + 1])
    if not vocabulary_files(path):
        return []  # SGLang reports the missing files
    folder = tokenizer_folder(path, "--trust-remote-code" in argv)
    return [] if folder == path else ["--tokenizer-path", str(folder)]


def prepare() -> None:
    """Prepare this process before SGLang's launcher runs in it.

    Raises:
        UserError: The tokenizer, `--host` or the plug-ins are unusable.
        RunError: A hook was not applied.
    """
    sys.argv += tokenizer_arguments(sys.argv)
    sockets.restrict_access(sys.argv[1:])
    preload_modules()
    warm_up.register()
    warm_up.start_times.end_phase("imports")
    add_fence()
    add_relay()
    sockets.bind_exclusively()


if __name__ == "__main__":
    run_role(prepare)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
