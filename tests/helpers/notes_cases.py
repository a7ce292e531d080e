"""Train the recorded step in several layouts and write its token logs.

Under torchrun: `notes_cases.py WORKSPACE LAYOUT...`; a layout's run folder is WORKSPACE/LAYOUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlsys.algo.objective import Objective
from rlsys.trainer.step import train_step
from rlsys.trainer.token_log import MicroBatchRecord, write_token_log
from rlsys.trainer.trainer import Trainer
from tests.helpers import signal_cases as cases

KEEP_GROUPS = 3


def train_recorded(run: Path, *overrides: str) -> None:
    config = cases.config_of(None, run, *overrides, f"rollout.keep_groups={KEEP_GROUPS}")
    objective = Objective(config.algo)
    trainer = Trainer(config, objective.requirements.passes)
    batch, records = cases.single_rewards(cases.recorded()), list[MicroBatchRecord]()
    train_step(trainer, objective, batch, records=records)
    write_token_log(trainer, batch, records)
    trainer.close()


if __name__ == "__main__":
    for layout in sys.argv[2:]:
        train_recorded(Path(sys.argv[1]) / layout, *(f"parallel.{pair}" for pair in layout.split(",")))
