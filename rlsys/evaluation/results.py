"""Results of evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EvalStatus:
    """State of a background evaluation.

    Attributes:
        done: whether the evaluation has ended.
        result: the metrics; None if it has not ended, or was abandoned because its engine died.
    """

    done: bool
    result: EvalResult | None = None


@dataclass(slots=True)
class EvalResult:
    """Metrics of one evaluation.

    Attributes:
        accuracy: fraction of correct responses.
        prompts: number of prompts whose response has a reward.
        mean_length: mean number of sampled tokens of a response.
        truncated: number of responses that reached the maximum length.
        weight_version: the version that sampled all tokens.
        sets: name of a set -> its metrics.
        same_answer: fraction of responses with the most common answer; None: most answers are unknown.
        constant: accuracy of the best constant answer; None: most reference answers are unknown.
        reward: mean reward.
        left_out: number of prompts without a response or a reward.
    """

    accuracy: float
    prompts: int
    mean_length: float
    truncated: int
    weight_version: int = 0
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    same_answer: float | None = None
    constant: float | None = None
    reward: float | None = None
    left_out: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the fields of an `eval` line of metrics.jsonl. The metrics of a set are named SET/METRIC."""
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
