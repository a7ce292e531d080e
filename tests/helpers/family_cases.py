"""Train models of several families. Under torchrun: `family_cases.py WORKSPACE FAMILY:FOLDER:LAYOUT...`.

The trainer starts from WORKSPACE/FAMILY/FOLDER (a Hugging Face folder or a converted checkpoint) in LAYOUT; rank 0
appends its results to WORKSPACE/seen.jsonl.
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


def measure(folder: Path, run: Path, layout: str) -> dict[str, Any]:
    """Return log-probs, digests of the weights by Hugging Face names, and the metrics of two optimizer steps."""
    trainer = Trainer(cases.config_of(folder, run, **cases.sections(layout)))
    results = {"logps": cases.canary_logps(trainer), "weights": digests(trainer)}
    results["steps"] = cases.steps(trainer, 2, cases.LR)
    trainer.close()
    return results


def digests(trainer: Trainer) -> dict[str, str]:
    """Return the SHA-256 of each tensor."""
    out = {}
    for name, tensor in trainer.named_hf_tensors():
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        out[name] = hashlib.sha256(data).hexdigest()
    return out


def main(workspace: Path, case_names: list[str]) -> None:
    for case in case_names:
        family, folder, layout = case.split(":")
        results = measure(workspace / family / folder, workspace / "run", layout)
        if torch.distributed.get_rank() == 0:
            with (workspace / "seen.jsonl").open("a") as file:
                file.write(json.dumps([case, results]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
