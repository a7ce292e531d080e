"""Save step 1, start saving step 2, print "writing" once its first file is written, and wait for SIGKILL."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from rlsys.trainer.checkpoints import manifest
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases


def main(model: Path, run: Path) -> None:
    trainer = Trainer(cases.config_of(model, run))
    cases.steps(trainer, 1)
    cases.save(trainer, 1)
    print(repr(cases.weight_sums(trainer)), flush=True)
    cases.steps(trainer, 1)
    write_event, forever = threading.Event(), threading.Event()

    def block_forever(file: Path) -> str:
        write_event.set()
        forever.wait()
        return ""

    manifest.sha256 = block_forever  # called by the writing thread after its first file
    trainer.save_checkpoint(2)
    write_event.wait()
    print("writing", flush=True)
    forever.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
