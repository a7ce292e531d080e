"""Results of evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EvalStatus:
    """State of a background evaluation. It is done without a result if it was abandoned because its engine died."""

    done: bool
    result: EvalResult | None = None


@dataclass(slots=True)
class EvalResult:
    """Metrics of one evaluation."""

    accuracy: float
    prompts: int
    mean_length: float
    truncated: int
    weight_version: int = 0
    """The version that sampled every token."""
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of each named set."""
    same_answer: float | None = None
    """Fraction of prompts with the most common answer; None if answers are unknown."""
    constant: float | None = None
    """Accuracy of the best constant answer; None if the data has no reference answers."""
    reward: float | None = None
    """Mean reward."""
    left_out: int = 0
    """Prompts without a response or without a verdict; `prompts` excludes them."""

    def metrics(self) -> dict[str, float]:
        """Return the fields of an `eval` line of metrics.jsonl; a metric of a set is called SET/METRIC."""
        values = {
            "accuracy": self.accuracy, "mean_length": self.mean_length, "prompts": self.prompts,
            "truncated": self.truncated, "weight_version": self.weight_version, "left_out": self.left_out,
        }  # fmt: skip
        optional = {
            "reward": self.reward, "same_answer_share": self.same_answer, "constant_accuracy": self.constant,
        }  # fmt: skip
        values |= {name: value for name, value in optional.items() if value is not None}
        return values | {
            f"{name}/{key}": v for name, set_metrics in self.sets.items() for key, v in set_metrics.items()
        }
