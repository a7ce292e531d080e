"""Checks of all rows of a run: whether they changed since it started, and how many are unusable."""

from __future__ import annotations

import asyncio
import json
import logging

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.imports import module_command
from rlsys.core.run_files import CONFIG_FILE
from rlsys.data import PromptSource
from rlsys.data.mixture import row_sources
from rlsys.data.row_check import KINDS, RowCounts
from rlsys.data.tables import Table
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.worker.assembly import prompt_limits

NOTE = "data"
"""Name of the ledger's note with the row count and the digest of each table at the first start of the run."""

log = logging.getLogger("rlsys.rollout")


async def check_same_rows(source: PromptSource, buffer: RolloutBuffer) -> None:
    """Store digests of the run's tables at the first start of the run, and compare them at each later start.

    Raises:
        UserError: the data changed, so held-out prompts and the prompts of started groups would differ.
    """
    tables = {}
    for row_source in row_sources(source):
        for table in (row_source.rows, row_source.held_rows):
            tables[table.name] = [len(table), await asyncio.to_thread(_digest, table)]
    note = buffer.note(NOTE)
    if note is None:
        buffer.set_note(NOTE, json.dumps(tables))
        return
    stored_tables = json.loads(note)
    for name, (rows, digest) in tables.items():
        if name in stored_tables and stored_tables[name][1] != digest:
            raise UserError(
                f"data.params: {name} changed since this run began: {stored_tables[name][0]} rows then, {rows} now; "
                "expected the same data, or another run.dir for a new run"
            )


def _digest(table: Table) -> str:
    return table.digest


class RowChecks:
    """Owns the process that checks all rows during the first steps, and its counts."""

    def __init__(self, config: Config, source: PromptSource) -> None:
        self._config, self._has_rows = config, bool(row_sources(source))
        self._process: asyncio.subprocess.Process | None = None
        self.metrics: dict[str, int] = {}
        """`rows_checked` and the counts by kind; empty before the check ends, and if the source has no rows."""

    async def run(self) -> None:
        """Run the check, log its result, and set `metrics`."""
        if not self._has_rows:
            return
        limits = prompt_limits(self._config)
        command = module_command(
            "rlsys.data.row_check", "--config", str(self._config.run.dir / CONFIG_FILE),
            "--vocab-size", str(limits.vocab_size), "--context-length", str(limits.context_length),
        )  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            out, errors = await self._process.communicate()
        except asyncio.CancelledError:
            self._process.kill()
            await self._process.wait()
            raise
        if self._process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            log.warning("the check of all rows failed with exit code %d: %s", self._process.returncode, last)
            return
        counts = RowCounts(**json.loads(out))
        log.info("all %d rows are checked", counts.rows)
        for line in counts.lines():
            log.warning("%s", line)
        self.metrics = {
            "rows_checked": counts.rows,
            **{f"rows_{kind}": counts.counts[kind] for kind in KINDS},
        }
