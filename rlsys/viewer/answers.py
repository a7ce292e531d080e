"""AnswerRows: rows for training other models from the samples of a run, by `rlsys sft`, reward models or judges.

A row has the sampled ids, because encoding their text again could give other ids. It also has the text, for people
and other tools.
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

        chats    the best response of each group, if it is correct and not truncated, for imitation
        pairs    the best and the worst response of each group, if their rewards differ, and the difference as margin
        labels   every response, and whether it is correct

    A response is correct if its first reward is 1 or more. These samples are excluded: samples with several sequences
    or with tokens that the model has not generated, and samples whose tokens are no longer stored
    (rollout.keep_groups).

    Args:
        decode: returns the text of token ids.

    Attributes:
        excluded: number of excluded samples.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.excluded = 0

    def convert(self, kind: RowKind, views: Iterable[SampleView]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a kind for samples with their tokens, in the order of their groups."""
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
        """Return a row with the prompt of `source` and the responses of `answers`, as texts and as ids."""
        ids = {"prompt": list(source.trained_prompt or source.prompt_ids)}
        ids |= {key: list(map(int, sample.response_ids)) for key, sample in answers.items()}
        texts = {key: self._decode(ids_of_key) for key, ids_of_key in ids.items()}
        return texts | {f"{key}_ids": ids_of_key for key, ids_of_key in ids.items()}


def _reward(sample: Sample) -> float:
    """Return the reward of data.reward, because a group reward is not comparable across groups."""
    reward = sample.reward if sample.plain_reward is None else sample.plain_reward
    assert reward is not None
    return reward


def _is_correct(sample: Sample) -> bool:
    """Return whether the response counts as correct, by the same rule as in an evaluation."""
    first_reward = next(iter(sample.named_rewards.values())) if sample.named_rewards else _reward(sample)
    return first_reward >= 1
