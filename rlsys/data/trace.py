"""The training item of `rlsys sft`: a prompt and an answer, as token ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Trace:
    """A prompt and an answer to it. The answer ends with a stop id, unless it was truncated.

    Attributes:
        prompt_ids: token ids of the prompt.
        response_ids: token ids of the answer.
        trained: for each id of the answer, whether the loss includes it; None: all ids.
        pair: number in the batch, equal for the two answers of a pair; -1: none.
        liked: whether the answer is the better one of its pair, or labelled as good.
        margin: reward of the better answer minus the reward of the other one; 0: unknown.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool] | None = None
    pair: int = -1
    liked: bool = True
    margin: float = 0.0
