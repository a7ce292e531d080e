"""Run under torchrun: `family_cases.py WORKPLACE CASE...`, a case being FAMILY:FOLDER:LAYOUT.

The trainer begins from WORKPLACE/FAMILY/FOLDER (a Hugging Face folder or a converted checkpoint) in that layout; rank
0 writes what it saw to WORKPLACE/seen.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases


def look(folder: Path, run: Path, layout: str) -> dict[str, Any]:
    """Log-probs, weights under Hugging Face names, and two optimizer steps."""
    trainer = Trainer(cases.config_of(folder, run, **cases.sections(layout)))
    results = {"logps": cases.canary_logps(trainer), "weights": digests(trainer)}
    results["steps"] = cases.steps(trainer, 2, cases.LR)
    trainer.close()
    return results


def digests(trainer: Trainer) -> dict[str, str]:
    """SHA-256 of each tensor's bytes."""
    out = {}
    for name, tensor in trainer.named_hf_tensors():
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        out[name] = hashlib.sha256(data).hexdigest()
    return out


def main(workplace: Path, todo: list[str]) -> None:
    for case in todo:
        family, folder, layout = case.split(":")
        results = look(workplace / family / folder, workplace / "run", layout)
        if torch.distributed.get_rank() == 0:
            with (workplace / "seen.jsonl").open("a") as file:
                file.write(json.dumps([case, results]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
