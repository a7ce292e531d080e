"""Stall detection: if nothing in a run changes, write a diagnosis (launch/diagnosis.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from launch import diagnosis
from launch.process import RoleProcess
from launch.status import last_lines
from rlsys.core.folders import replace_file

_STACKS_SECONDS = 1.0


class StallDetector:
    """Measures the time since the last change in the run's status and metrics."""

    def __init__(self, path: Path, limit: float, report: Callable[[str], None]) -> None:
        """Start the timer.

        Args:
            path: the run folder.
            limit: seconds without a change before a diagnosis.
            report: receives messages.
        """
        self._path, self._limit, self._report = path, limit, report
        self._last_change = time.monotonic()

    def reset(self) -> None:
        """Restart the timer after a change."""
        self._last_change = time.monotonic()

    def check(
        self, processes: Collection[RoleProcess], nodes: Sequence[str], status: dict[str, Any] | None
    ) -> None:
        """Write a diagnosis on request (`rlsys doctor RUN`), and once per stall.

        Args:
            processes: all roles.
            nodes: names of the nodes.
            status: status of the rollout process; None if it does not respond.
        """
        seconds = time.monotonic() - self._last_change
        request = self._path / diagnosis.REQUEST
        try:
            if request.exists():
                request.unlink()
                reason = f"requested; the last change was {seconds:.0f} s ago"
                self._diagnose(reason, processes, nodes, status)
            elif seconds > self._limit:
                self.reset()
                reason = f"nothing has changed for {seconds:.0f} s"
                self._diagnose(reason, processes, nodes, status)
                self._report(f"nothing has changed for {seconds:.0f} s; see {self._path / diagnosis.ANSWER}")
        except OSError as e:  # the run may continue on a full disk
            self._report(f"cannot write {self._path / diagnosis.ANSWER}: {e.strerror}")

    def _diagnose(
        self,
        reason: str,
        processes: Collection[RoleProcess],
        nodes: Sequence[str],
        status: dict[str, Any] | None,
    ) -> None:
        """Collect the stacks of all processes, and write the diagnosis. The arguments are those of `check`."""
        request_time = diagnosis.file_time(self._path)
        for process in processes:
            process.dump_stacks()
        time.sleep(_STACKS_SECONDS)
        roles = [
            diagnosis.RoleState(
                p.role.name, nodes[p.role.node], p.exit_code, p.ready, p.seconds,
                "".join(last_lines(p.log, 1))[:120], p.role.unit,
            )
            for p in processes
        ]  # fmt: skip
        text = diagnosis.describe(reason, roles, status, diagnosis.read_stacks(self._path, request_time))
        replace_file(self._path / diagnosis.ANSWER, text.encode(), sync=True)
