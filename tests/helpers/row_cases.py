"""Scores of a micro-batch whose logits are computed at once, and for a few rows at a time.

Run under torchrun it compares them in other layouts: `-m tests.helpers.row_cases WORKPLACE LAYOUT...`.
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
    """Yield the output layers of the policy and of its MTP layer that this rank has."""
    scoring: Any = trainer.passes._scores_of
    layers = [scoring.output] + ([trainer._prediction.output] if trainer._prediction else [])
    yield from (layer for layer in layers if layer is not None)


def gaps(trainer: Trainer) -> dict[str, Any]:
    cases.randomize_adapters(trainer)
    reference = prefixes.seen(trainer, False)
    products = 0
    for layer in output_layers(trainer):
        layer._rows = ROWS
        logits = layer.logits

        def counted(*args: Any, logits: Any = logits) -> Any:
            nonlocal products
            products += 1
            return logits(*args)

        vars(layer)["logits"] = counted
    rows = prefixes.seen(trainer, False)
    return prefixes.compare(reference, rows) | {"products": products}


def main(workplace: Path, layouts: list[str]) -> None:
    for layout in layouts:
        trainer = prefixes.trainer_of(workplace, layout)
        of_ranks = trainer.gather_dp(gaps(trainer))
        with (workplace / f"gaps-{trainer.rank}.jsonl").open("a") as file:
            file.write(json.dumps([layout, of_ranks]) + "\n")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
