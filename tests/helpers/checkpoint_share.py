"""Save and load a checkpoint, and record the bytes that this rank writes and the ranges that it reads.

Under torchrun: torchrun ... -m tests.helpers.checkpoint_share MODEL WORKSPACE LAYOUT
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


def main(model: Path, workspace: Path, layout: str) -> None:
    ranges_read: list[tuple[str, int, int]] = []
    original_read_data = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            ranges_read.append((info.relative_path, info.offset, info.length))
        return original_read_data(self, plan, planner)

    FileSystemReader.read_data = read_data  # type: ignore[method-assign]
    config = cases.config_of(model, workspace / "run", **cases.sections(layout))
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
    folder = workspace / "run" / "checkpoints" / "step-000001"
    bytes_written = sum(p.stat().st_size for p in folder.glob(f"__{rank}_*.distcp"))
    (workspace / f"rank{rank}.json").write_text(
        json.dumps({"wrote": bytes_written, "read": ranges_read, "same": is_equal})
    )
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
