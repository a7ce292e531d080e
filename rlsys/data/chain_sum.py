"""`data.source: chain_sum_tail`: sums of small numbers; most are short and some are long.

The source combines two of reasoning-gym's `chain_sum` tasks with different numbers of terms. A solution line by line
needs about seven tokens per term, so the responses to long sums take several times the mean: a workload for APRIL.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Section
from rlsys.data.source import Entry, ReasoningGymSource, Task
from rlsys.data.tokenizer import Tokenizer

Terms = Annotated[int, Field(ge=2, le=64)]


class ChainSumParams(Section):
    short: tuple[Terms, Terms] = (3, 6)
    """Fewest and most terms of a short problem."""
    long: tuple[Terms, Terms] = (12, 20)
    """Fewest and most terms of a long problem."""
    long_share: Annotated[float, Field(ge=0, le=1)] = 0.15
    """Share of long problems."""
    digits: Annotated[int, Field(ge=1, le=4)] = 1
    """Number of digits of a term."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name, (low, high) in (("short", self.short), ("long", self.long)):
            if low > high:
                raise ValueError(f"{name} = [{low}, {high}]: expected the smaller number first")
        return self

    def tasks(self) -> list[Task]:
        """Return the two reasoning-gym tasks with their shares."""
        parts = ((self.short, 1 - self.long_share), (self.long, self.long_share))
        return [
            Task(
                "chain_sum",
                share,
                {"min_terms": low, "max_terms": high, "min_digits": self.digits, "max_digits": self.digits},
            )
            for (low, high), share in parts
            if share > 0
        ]

    def source(self, tokenizer: Tokenizer, seed: int, eval_seed: int) -> ReasoningGymSource:
        """Return the source of prompts such as `4-1-7=`.

        Args:
            seed: seed of the training prompts.
            eval_seed: seed of the held-out prompts.
        """
        return ReasoningGymSource(self.tasks(), lambda e: expression(e) + "=", tokenizer, seed, eval_seed)


def expression(entry: Entry) -> str:
    """Return the expression of a `chain_sum` entry, without spaces: `4-1-7+2`."""
    return str(entry["metadata"]["expression"]).replace(" ", "")


def chain_sum_tail(config: Config, tokenizer: Tokenizer, **params: Any) -> ReasoningGymSource:
    """Build the prompt source from `params` (ChainSumParams)."""
    p = parse_params("data.params", ChainSumParams, params)
    return p.source(tokenizer, config.data.seed + config.run.seed, config.eval.seed)
