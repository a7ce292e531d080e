"""TODO"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Evaluated:
    """What became of an evaluation in the background. Done without a result: its engine died, it is given up."""

    done: bool
    result: EvalResult | None = None


@dataclass(slots=True)
class EvalResult:
    accuracy: float
    prompts: int
    mean_length: float
    truncated: int
    weight_version: int = 0
    """That sampled every token of it."""
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures of the named sets."""
    same_answer: float | None = None
    """Share of the prompts that got the commonest answer; None where answers are not known."""
    constant: float | None = None
    """Accuracy of who gives the best constant answer; None where the data has no right answers."""
    left_out: int = 0
    """Prompts without an answer, or without a verdict on it; they are not among `prompts`."""

    def figures(self) -> dict[str, float]:
        """Of an `eval` line of metrics.jsonl; those of a set are called SET/FIGURE."""
        own = {
            "accuracy": self.accuracy, "mean_length": self.mean_length, "prompts": self.prompts,
            "truncated": self.truncated, "weight_version": self.weight_version, "left_out": self.left_out,
        }  # fmt: skip
        for name, share in (("same_answer_share", self.same_answer), ("constant_accuracy", self.constant)):
            if share is not None:
                own[name] = share
        return own | {f"{name}/{key}": v for name, found in self.sets.items() for key, v in found.items()}
