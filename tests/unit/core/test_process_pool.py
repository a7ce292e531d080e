"""Processes of a user's functions that do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.core import process_pool
from rlsys.core.errors import RunError
from rlsys.core.process_pool import ProcessPool


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import signal; signal.pause()", "no answer in 2 s"),
        ("raise SystemExit(3)", "ProcessEnded: exit code 3"),
    ],
)
async def test_a_process_that_does_not_start_is_named_with_the_reason(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_never.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(process_pool, "START_SECONDS", 2.0)
    pool = ProcessPool("data.reward", "starts_never", b"{}")
    with pytest.raises(RunError, match=rf"^data\.reward: its process did not start: {reason}$"):
        async with pool.acquire():
            pass
