"""Comparison of the scores of a micro-batch with logits of all rows at once and of a few rows at a time.

Under torchrun, `-m tests.helpers.row_cases WORKPLACE LAYOUT...` compares them in other parallel layouts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.trainer.model.output_layer import OutputLayer
from rlsys.trainer.trainer import Trainer
from tests.helpers import prefix_cases as prefixes
from tests.helpers import trainer_cases as cases

ROWS = 7


def output_layers(trainer: Trainer) -> Iterator[OutputLayer]:
    """Yield the output layers of the policy and of its MTP layer on this rank."""
    scoring: Any = trainer.passes._scores_of
    layers = [scoring.output] + ([trainer._prediction.output] if trainer._prediction else [])
    yield from (layer for layer in layers if layer is not None)


def gaps(trainer: Trainer) -> dict[str, Any]:
    cases.randomize_adapters(trainer)
    reference = prefixes.run_passes(trainer, False)
    products = 0
    for layer in output_layers(trainer):
        layer._rows = ROWS
        logits = layer.logits

        def count_call(*args: Any, logits: Any = logits) -> Any:
            nonlocal products
            products += 1
            return logits(*args)

        vars(layer)["logits"] = count_call
    rows = prefixes.run_passes(trainer, False)
    return prefixes.compare(reference, rows) | {"products": products}


def main(workplace: Path, layouts: list[str]) -> None:
    for layout in layouts:
        trainer = prefixes.trainer_of(workplace, layout)
        rank_gaps = trainer.gather_dp(gaps(trainer))
        with (workplace / f"gaps-{trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps([layout, rank_gaps]) + "\n")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
