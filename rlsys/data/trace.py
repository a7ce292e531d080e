"""Training item of `rlsys sft`: an answer to a prompt, as ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Trace:
    """A prompt and an answer to it; the answer's last id is the eos, unless it is a sample that was cut off.

    `trained`: which ids of the answer are; None: all. `pair`: a number that two answers share which are compared; -1:
    compared with none. `liked`: the better one of its pair, or marked as good. `margin`: by how much it is better.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool] | None = None
    pair: int = -1
    liked: bool = True
    margin: float = 0.0
