"""Under torchrun: saves a checkpoint, loads it, and writes what this rank wrote and read.

torchrun ... -m tests.helpers.checkpoint_share MODEL WORKPLACE LAYOUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases


def main(model: Path, workplace: Path, layout: str) -> None:
    read: list[tuple[str, int, int]] = []
    plain = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            read.append((info.relative_path, info.offset, info.length))
        return plain(self, plan, planner)

    FileSystemReader.read_data = read_data  # type: ignore[method-assign]
    config = cases.config_of(model, workplace / "run", **cases.sections(layout))
    trainer = Trainer(config)
    cases.steps(trainer, 1)
    expected = cases.weight_sums(trainer), cases.steps(trainer, 1)
    trainer.close()
    trainer = Trainer(config)
    cases.steps(trainer, 1)
    cases.save(trainer, 1)
    assert trainer.load_checkpoint() == 1
    is_equal = (cases.weight_sums(trainer), cases.steps(trainer, 1)) == expected
    rank = dist.get_rank()
    folder = workplace / "run" / "checkpoints" / "step-000001"
    wrote = sum(p.stat().st_size for p in folder.glob(f"__{rank}_*.distcp"))
    (workplace / f"rank{rank}.json").write_text(json.dumps({"wrote": wrote, "read": read, "same": is_equal}))
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
