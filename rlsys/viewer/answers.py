"""What the samples of a run teach another model: rows for `rlsys sft` (a reward model's pairs, a judge's labels).

A row has ids as they were sampled, and their text for people and other tools. Encoded again, the text could give
other ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

from rlsys.core.types import Sample, Status
from rlsys.ledger.samples import SampleView

RowKind = Literal["chats", "pairs", "labels"]
KINDS: tuple[RowKind, ...] = get_args(RowKind)


class AnswerRows:
    """chats    each group's best response, where it counts as right and ended by itself: to be imitated
    pairs    each group's best and worst response, where their rewards differ; the margin is by how much
    labels   every response, and whether it counts as right: its first reward is 1 or more

    Left out, and counted: samples of several sequences or with tokens that the model has not written, and those whose
    tokens are no longer kept (rollout.keep_groups).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.left_out = 0

    def of(self, kind: RowKind, seen: Iterable[SampleView]) -> Iterator[dict[str, Any]]:
        """`seen`: samples with their tokens."""
        groups: defaultdict[int, list[Sample]] = defaultdict(list)
        for one in seen:
            sample = one.sample
            if sample.reward is None or sample.status not in (Status.FINISHED, Status.TRUNCATED):
                continue
            if sample.extra_sequences or sample.observed or not one.has_tokens:
                self.left_out += 1
            else:
                groups[sample.group_id].append(sample)
        for group_id in sorted(groups):
            group = sorted(groups[group_id], key=lambda s: s.index)
            if kind == "labels":
                for sample in group:
                    yield self._row(sample, completion=sample) | {"label": _right(sample)}
                continue
            best, worst = max(group, key=_reward), min(group, key=_reward)
            if kind == "pairs" and _reward(best) > _reward(worst):
                margin = _reward(best) - _reward(worst)
                yield self._row(best, chosen=best, rejected=worst) | {"margin": margin}
            if kind == "chats" and _right(best) and best.status is Status.FINISHED:
                yield self._row(best, completion=best)

    def _row(self, asked: Sample, **answers: Sample) -> dict[str, Any]:
        ids = {"prompt": list(asked.trained_prompt or asked.prompt_ids)}
        ids |= {key: list(map(int, sample.response_ids)) for key, sample in answers.items()}
        texts = {key: self._decode(of_key) for key, of_key in ids.items()}
        return texts | {f"{key}_ids": of_key for key, of_key in ids.items()}


def _reward(sample: Sample) -> float:
    """The reward function's own: a group reward in its place compares nothing with other groups."""
    reward = sample.reward if sample.plain_reward is None else sample.plain_reward
    assert reward is not None
    return reward


def _right(sample: Sample) -> bool:
    """As an evaluation counts it."""
    first = next(iter(sample.named_rewards.values())) if sample.named_rewards else _reward(sample)
    return first >= 1
