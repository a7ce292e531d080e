"""Rows for training other models from the samples of a run: `rlsys sft`, reward model pairs, judge labels.

A row has ids as they were sampled, and their text for people and other tools. Encoding the text again could give
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
    """Converts samples to rows of one of these kinds.

        chats    each group's best response, if it counts as correct and ended by itself: to be imitated
        pairs    each group's best and worst response, if their rewards differ, and the difference as the margin
        labels   every response, and whether it counts as correct: its first reward is 1 or more

    Excluded, and counted: samples of several sequences or with tokens that the model has not written, and samples
    whose tokens are not stored any more (rollout.keep_groups).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.excluded = 0

    def of(self, kind: RowKind, views: Iterable[SampleView]) -> Iterator[dict[str, Any]]:
        """Yield the rows. `views`: samples with their tokens."""
        groups: defaultdict[int, list[Sample]] = defaultdict(list)
        for view in views:
            sample = view.sample
            if sample.reward is None or sample.status not in (Status.FINISHED, Status.TRUNCATED):
                continue
            if sample.extra_sequences or sample.observed or not view.has_tokens:
                self.excluded += 1
            else:
                groups[sample.group_id].append(sample)
        for group_id in sorted(groups):
            group = sorted(groups[group_id], key=lambda s: s.index)
            if kind == "labels":
                for sample in group:
                    yield self._row(sample, completion=sample) | {"label": _is_correct(sample)}
                continue
            best, worst = max(group, key=_reward), min(group, key=_reward)
            if kind == "pairs" and _reward(best) > _reward(worst):
                margin = _reward(best) - _reward(worst)
                yield self._row(best, chosen=best, rejected=worst) | {"margin": margin}
            if kind == "chats" and _is_correct(best) and best.status is Status.FINISHED:
                yield self._row(best, completion=best)

    def _row(self, source: Sample, **answers: Sample) -> dict[str, Any]:
        ids = {"prompt": list(source.trained_prompt or source.prompt_ids)}
        ids |= {key: list(map(int, sample.response_ids)) for key, sample in answers.items()}
        texts = {key: self._decode(ids_of_key) for key, ids_of_key in ids.items()}
        return texts | {f"{key}_ids": ids_of_key for key, ids_of_key in ids.items()}


def _reward(sample: Sample) -> float:
    """Return the reward function's own reward: a group reward is not comparable across groups."""
    reward = sample.reward if sample.plain_reward is None else sample.plain_reward
    assert reward is not None
    return reward


def _is_correct(sample: Sample) -> bool:
    """Whether the response counts as correct, as in an evaluation."""
    first = next(iter(sample.named_rewards.values())) if sample.named_rewards else _reward(sample)
    return first >= 1
