"""Folders of Unix sockets, and what is sent to who listens there."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pydantic import ValidationError

from launch.ranks import main as start_ranks
from rlsys.config.rollout import EngineConfig
from rlsys.core import sockets
from rlsys.core.errors import RunError, UserError
from rlsys.core.interfaces import choose_interface, interface_of
from rlsys.core.owner import Owner, claim
from rlsys.core.sockets import UnixConnection, UnknownListener, exchange, make_folder, remove_folder
from rlsys.engine.hooks.sockets import check_hooks
from rlsys.engine.server import preload_modules
from rlsys.rollout.client import ConnectionBroken, Request, RolloutClient
from tests.helpers.strangers import rogue_server

ROOT = Path(__file__).resolve().parents[3]
STRANGER = 54777
LISTEN = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
os.setresuid({uid}, {uid}, {uid})
s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); s.listen(); print("listens", flush=True)
s.settimeout(20)
for _ in range(2):
    c, _ = s.accept(); c.settimeout(20); print(c.recv(65536), flush=True)
"""


def test_a_folder_has_a_short_path_and_private_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("d" * 120)))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = make_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(str(folder / "torch-shm-dir-XXXXXX" / "manager.sock")) < 107
    (folder / "left").touch()
    remove_folder(folder)
    assert not folder.exists()
    remove_folder(tmp_path)
    assert tmp_path.exists(), "only what make_folder made is removed"


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which folders of sockets are created."""
    monkeypatch.setattr(sockets, "_PARENTS", (str(tmp_path),))
    return tmp_path


def test_folders_in_use_are_kept_without_effective_file_locks(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre with localflock; before: each start removed the sockets of all running roles."""
    in_use = make_folder()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert make_folder().is_dir() and in_use.is_dir()


def test_a_folder_that_cannot_be_locked_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="No locks available"):
        make_folder()
    assert not list(parent.iterdir())


def test_leftover_drafts_older_than_an_hour_are_removed(parent: Path) -> None:
    for name, age in ((".rlsys-old", 7200), (".rlsys-new", 60)):
        (parent / name).mkdir()
        timestamp = time.time() - age
        os.utime(parent / name, (timestamp, timestamp))
    make_folder()
    assert not (parent / ".rlsys-old").exists() and (parent / ".rlsys-new").exists()


@pytest.mark.gate
def test_security_a17_folders_of_killed_processes_are_removed_at_the_next_start() -> None:
    code = "from rlsys.core.sockets import make_folder\nprint(make_folder(), flush=True)\ninput()"
    with ExitStack() as stack:
        makers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(2)
        ]
        killed, living = (
            Path(maker.stdout.readline().strip()) for maker in makers if maker.stdout is not None
        )
        (killed / "left").touch()
        deep = "mkdir -p $(printf 'd/%.0s' $(seq 1500)) && cd $_ && mkdir -p $(printf 'd/%.0s' $(seq 1500))"
        subprocess.run(["bash", "-c", deep], cwd=killed, check=True)  # as a program of a response may
        makers[0].kill()
        makers[0].wait()
        new_folder = make_folder()
        assert (killed.exists(), living.exists(), new_folder.exists()) == (False, True, True)
        remove_folder(new_folder)
        makers[1].communicate("")
        remove_folder(living)


def test_a_machine_without_a_usable_socket_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_PARENTS", ("/nowhere",))
    monkeypatch.setattr("tempfile.tempdir", "/" + "d" * 120)
    with pytest.raises(UserError, match=r"no folder for Unix sockets \(/nowhere: No such file .*max. 50"):
        make_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nothing_is_sent_to_a_listener_of_another_user(tmp_path: Path) -> None:
    """The path is left over, and another user has made it again."""
    folder = Path(sockets.make_folder())
    folder.chmod(0o777)
    path = folder / "rollout"
    try:
        code = LISTEN.format(uid=STRANGER)
        with subprocess.Popen(
            [sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True
        ) as listener:
            assert listener.stdout is not None and listener.stdout.readline() == "listens\n"
            with pytest.raises(UnknownListener, match=f"user {STRANGER} listens there"):
                exchange(UnixConnection(path, 5), "GET", "/status", headers={"X-Rlsys-Key": "secret"})
            with pytest.raises(ConnectionBroken, match="UnknownListener"):
                RolloutClient(path, "secret")._http(Request("GET", "/status"))
            assert listener.stdout.read() == "b''\n" * 2
    finally:
        remove_folder(folder)


def test_requests_are_sent_to_a_listener_of_the_same_user(tmp_path: Path) -> None:
    folder = make_folder()
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "rollout"))
            listening.listen()
            with rogue_server(listening) as received:
                assert exchange(UnixConnection(folder / "rollout", 5), "GET", "/status") == (200, b"{}")
        assert received[0].startswith(b"GET /status HTTP/1.1\r\n")
    finally:
        remove_folder(folder)


def test_the_next_launch_removes_the_sockets_of_a_killed_launch(tmp_path: Path) -> None:
    stale_folder = make_folder()
    claim(tmp_path, stale_folder)
    new_folder = make_folder()
    try:
        owner = claim(tmp_path, new_folder)
        assert not stale_folder.exists() and new_folder.exists()
        assert owner.rollout_socket == new_folder / "rollout" and isinstance(owner, Owner)
    finally:
        remove_folder(new_folder)


@pytest.mark.parametrize("killed", [False, True])
def test_the_folder_of_a_role_lives_as_long_as_the_role(killed: bool) -> None:
    code = "import os, time; print(os.environ['RLSYS_SOCKETS'], flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "launch.keeper", "--grace", "1", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as guard:
        assert guard.stdout is not None and guard.stdin is not None
        folder = Path(guard.stdout.readline().strip())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        if killed:
            psutil.Process(guard.pid).children()[0].send_signal(signal.SIGKILL)
        guard.stdin.close()
    assert not folder.exists()


# -- ranks ---------------------------------------------------------------------------------------------------------


def ranks(*words: str, code: str, tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "a_rank.py").write_text(code)
    command = [sys.executable, "-m", "launch.ranks", "--ranks", "2", "--address", "127.0.0.1", *words]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    return subprocess.Popen(
        [*command, "-m", "a_rank", "--config", "x"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_rank_receives_its_number_and_the_rendezvous_file(tmp_path: Path) -> None:
    code = (
        "import os, sys\nn = [os.environ[k] for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'RLSYS_STORE')]\n"
        "n += [os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'], *sys.argv[1:]]\n"
        "os.write(1, (' '.join(n) + chr(10)).encode())  # in one piece: two ranks write\n"
    )
    with ranks(code=code, tmp_path=tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    first, second = (line.split() for line in sorted(out.splitlines()))
    assert first[:3] == ["0", "0", "2"] and second[:3] == ["1", "1", "2"]
    assert first[3] == second[3] and not Path(first[3]).exists()
    assert first[4:] == ["lo", "=lo", "--config", "x"]


@pytest.mark.parametrize(("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_rank_that_fails_ends_the_others_and_its_code_is_passed_on(
    tmp_path: Path, how: str, code: int
) -> None:
    body = f"import os, signal, sys\nif os.environ['RANK'] == '1': {how}\nsignal.pause()\n"
    with ranks(code=body, tmp_path=tmp_path) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"launch.ranks: rank 1 exited with code {code}" in err


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    body = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "import os; os.write(1, b'up\\n')\nsignal.pause()\n"
    )
    with ranks(code=body, tmp_path=tmp_path) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        process.terminate()
        assert process.wait(60) == 0


def test_an_address_of_another_machine_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = sys.argv
    try:
        sys.argv = ["launch.ranks", "--ranks", "1", "--address", "192.0.2.77", "-m", "nothing"]
        assert start_ranks() == 2
    finally:
        sys.argv = argv
    assert "192.0.2.77: no network interface of" in capsys.readouterr().err


# -- interfaces ----------------------------------------------------------------------------------------------------


def test_loopback_addresses_are_of_the_loopback_interface() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == interface_of("localhost") == "lo"


def test_an_interface_set_by_the_user_is_kept() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "eth7"}
    choose_interface("127.0.0.1", environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo"}
    choose_interface("0.0.0.0", nothing := dict[str, str]())
    assert nothing == {}


@pytest.mark.parametrize(
    "arg",
    [
        "--enable-dp-attention",
        "--kv-events-config={}",
        "--disaggregation-mode",
        "--nccl-port",
        "--dist-init-addr",
    ],
)
def test_an_option_of_sglang_that_opens_a_listener_without_a_key_is_refused(arg: str) -> None:
    """ZeroMQ over TCP, which unpickles what anybody sends, or another place for ranks to meet."""
    with pytest.raises(ValidationError, match=arg.partition("=")[0]):
        EngineConfig(extra_args=[arg])
    EngineConfig(extra_args=["--enable-pdmux", "--speculative-algorithm", "NEXTN"])


# -- hooks into SGLang ---------------------------------------------------------------------------------------------


def test_a_hook_that_finds_no_target_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs it and goes on: its ranks would meet on all addresses, and nobody would know."""

    registry = SimpleNamespace(_hooks={"sglang.a": [], "sglang.b": []}, _patched={"sglang.a"})
    module = SimpleNamespace(HookRegistry=registry, envs=object())
    monkeypatch.setattr("rlsys.engine.hooks.sockets.importlib.import_module", lambda _: module)
    with pytest.raises(RunError, match=r"lacks functions that rlsys wraps: sglang\.b"):
        check_hooks()
    registry._patched = {"sglang.a", "sglang.b"}
    with pytest.raises(RunError, match="SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"):
        check_hooks()


@pytest.mark.parametrize("installed", [True, False])
def test_an_engine_without_hooks_does_not_start(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds no plug-in of a source tree that is only on PYTHONPATH, or skips it (SGLANG_PLUGINS)."""
    monkeypatch.setattr("rlsys.engine.cpu.hooks.complete", False, raising=False)
    original_entry_points = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **k: original_entry_points(**k) if installed else []
    )
    registry = SimpleNamespace(_hooks={}, _patched=set())
    envs = SimpleNamespace(SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE="")
    module = SimpleNamespace(HookRegistry=registry, envs=envs, load_plugins=lambda: None)
    monkeypatch.setattr("rlsys.engine.hooks.sockets.importlib.import_module", lambda _: module)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(UserError, match="SGLANG_PLUGINS" if installed else "not installed"):
        preload_modules()


def test_a_role_folder_that_was_removed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sockets.FOLDER_VARIABLE, raising=False)
    first = sockets.role_folder()
    assert sockets.role_folder() == first
    shutil.rmtree(first)
    second = sockets.role_folder()
    assert second != first and second.is_dir()
    sockets.remove_folder(second)


def test_processes_that_start_concurrently_keep_their_folders() -> None:
    """Before: a sweep took a folder between its creation and its lock for one whose maker had ended."""
    code = "from rlsys.core.sockets import make_folder\n"
    code += "print(sum(not (make_folder() / '.lock').exists() for _ in range(100)))"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)]
    assert [p.communicate()[0].strip() for p in processes] == ["0"] * 4
