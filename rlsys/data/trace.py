"""Training item of `rlsys sft`: an answer to a prompt, as ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Trace:
    """A prompt and an answer to it; the answer's last id is the eos, unless it is a truncated sample.

    Attributes:
        prompt_ids: the prompt.
        response_ids: the answer.
        trained: whether each id of the answer is trained; None: all are.
        pair: number of its pair, the same for two compared answers; -1 without a pair.
        liked: whether it is the better one of its pair, or labelled as good.
        margin: difference of the rewards of the pair.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool] | None = None
    pair: int = -1
    liked: bool = True
    margin: float = 0.0
