"""Notices a run in which nothing changes, and asks every process what it waits for (launch/diagnosis.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from launch import diagnosis
from launch.process import RoleProcess
from launch.rundir import write_whole
from launch.status import last_lines

_STACKS_SECONDS = 1.0


class Silence:
    """How long no figure of the run has changed."""

    def __init__(self, path: Path, limit: float, say: Callable[[str], None]) -> None:
        """`path`: the run folder. `limit`: launch.silence_seconds."""
        self._path, self._limit, self._say = path, limit, say
        self._began = time.monotonic()

    def end(self) -> None:
        """Something has changed."""
        self._began = time.monotonic()

    def look(
        self, processes: Collection[RoleProcess], nodes: Sequence[str], status: dict[str, Any] | None
    ) -> None:
        """Diagnose on request (`rlsys doctor RUN`), and once in a silence. `nodes`: their names. `status`: what the
        rollout process says; None: it does not answer."""
        lasted = time.monotonic() - self._began
        request = self._path / diagnosis.REQUEST
        try:
            if request.exists():
                request.unlink()
                reason = f"asked for; the last change was {lasted:.0f} s ago"
                self._diagnose(reason, processes, nodes, status)
            elif lasted > self._limit:
                self.end()
                reason = f"nothing has changed for launch.silence_seconds = {lasted:.0f} s"
                self._diagnose(reason, processes, nodes, status)
                self._say(f"nothing has changed for {lasted:.0f} s; see {self._path / diagnosis.ANSWER}")
        except OSError as e:  # a full disk: the run may still go on
            self._say(f"no diagnosis: {e.strerror}")

    def _diagnose(
        self,
        reason: str,
        processes: Collection[RoleProcess],
        nodes: Sequence[str],
        status: dict[str, Any] | None,
    ) -> None:
        asked = diagnosis.clock_of(self._path)
        for process in processes:
            process.ask_for_stacks()
        time.sleep(_STACKS_SECONDS)
        roles = [
            diagnosis.RoleState(
                p.role.name, nodes[p.role.node], p.exit_code, p.ready, p.seconds,
                "".join(last_lines(p.log, 1))[:120], p.role.unit,
            )
            for p in processes
        ]  # fmt: skip
        text = diagnosis.describe(reason, roles, status, diagnosis.read_stacks(self._path, asked))
        write_whole(self._path / diagnosis.ANSWER, text)
