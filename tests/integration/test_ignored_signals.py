"""Commands that serve until a signal, started as `command &` in a script starts them: SIGINT stays ignored."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS

pytestmark = pytest.mark.integration

MEET = "examples/relay/relay.py:play"


@pytest.mark.parametrize(
    "words",
    [
        ("router", "--port", "0", "--engine", "http://127.0.0.1:9"),
        ("dash", "RUNS"),
        ("meet", MEET, "--policy", "a", "--policy", "b", "--port", "0"),
    ],
    ids=lambda words: words[0],
)
def test_an_ignored_signal_stays_ignored(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: none}\n")  # a run, for the dashboard
    command = [*RLSYS, *(str(tmp_path) if word == "RUNS" else word for word in words)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and "http" not in line:
                line = process.stdout.readline()
            assert "http" in line, "it does not serve"
            process.send_signal(signal.SIGINT)
            status = Path(f"/proc/{process.pid}/status").read_text()
            mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
            assert int(mask, 16) >> (signal.SIGINT - 1) & 1, "a handler has taken its place"
            process.terminate()
            assert process.wait(30) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
        finally:
            process.kill()
