"""The generator `replayed`: the model walks along an expert's trajectory of the data, as if it acted (UI-S1).

    observation 1 -> turn 1  ==  the expert's action  -> observation 2 behind the model's own words -> turn 2 -> ...
                             !=  the expert's action  -> a patch: a new sequence, whose history has the expert's
                                                         action in the place of the model's; without one, the end

Each turn is worth 1 / steps where it matches, so the reward `environment` is the share of steps that were right.
A new history is a sequence of its own in the sample: it is a prompt, and nothing of it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from rlsys.agents.messages import BadRequest
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Section
from rlsys.core.errors import RowError, UserError
from rlsys.core.imports import resolve
from rlsys.core.spans import TurnReward
from rlsys.core.types import Prompt, Sample, Status, is_reward
from rlsys.data import Tokenizer
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.replay import Full, SavedTurns
from rlsys.generators.turns import Speak
from rlsys.router.turn_ends import turn_ends

FIELD = "rollout.generator_params"


class ReplayedParams(Section):
    """rollout.generator_params of the generator `replayed`."""

    patches: Annotated[int, Field(ge=-1)] = 0
    """Wrong turns that the expert's action takes the place of; after so many, one ends the response. -1: all."""
    match: str | None = None
    """`path/to/file.py:function` of (what was said, the expert's action), which gives a number: 1 or more
    matches, less may be a part of the reward. Unset: the same text, but for white space and case."""
    steps: str = "steps"
    """Key of the row's list of steps, each with an `observation` and an `action`."""
    system: str = ""
    """What the system message says; none where it is empty."""


class ReplayedTurns:
    """A generator (generator.py). All it knows of a sample is in the sample's sequences and the row."""

    def __init__(self, config: Config, tokenizer: Tokenizer, speak: Speak, params: ReplayedParams) -> None:
        self._speak, self._params = speak, params
        self._rendering = Rendering(tokenizer)
        self._ends = turn_ends(config, tokenizer)
        self._budget = config.rollout.max_response_tokens
        self._match: Callable[[str, str], Any] = (
            _same if params.match is None else resolve(f"{FIELD}.match", params.match, {})
        )

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Raises RowError for a row without a trajectory, ToolFailed where the row has changed, and what `match`
        raises."""
        steps, left = self._steps(prompt), self._params.patches
        history: list[dict[str, Any]] = []
        if self._params.system:
            history.append({"role": "system", "content": self._params.system})
        marks: list[TurnReward] = []
        begun, last = 0, ""
        turns: SavedTurns | None = None
        sample.turn_rewards = marks
        for observation, action in steps:
            asked = {"role": "user", "content": observation}
            try:
                if turns is None:
                    sequence = self._sequence(sample, begun, [*history, asked], prompt)
                    turns, begun = SavedTurns(self._speak, self._ends, sequence, self._budget), begun + 1
                else:
                    turns.observe(self._rendering.behind([asked], (), last))
                start, end = await turns.turn()
                if turns.finish == "length":
                    marks.append(TurnReward(0.0, False))
                    raise Full
            except Full:
                sample.status = Status.TRUNCATED
                return
            except BadRequest as e:
                raise ToolFailed(f"{prompt.location or f'prompt {prompt.index}'}: {e}") from None
            sequence.last_turn = len(marks) + 1
            ids = sequence.response_ids[start:end].tolist()
            last = self._rendering.text(ids[-1:]) if ids[-1] in self._ends.ids else ""
            said = self._rendering.text(ids).removesuffix(last)
            share = self._found(said, action)
            marks.append(TurnReward(share / len(steps), share >= 1))
            if share >= 1:
                history += [asked, {"role": "assistant", "content": said}]
            elif left == 0:
                break
            else:
                left, turns = left - 1, None
                history += [asked, {"role": "assistant", "content": action}]
        sample.status = Status.FINISHED

    def _sequence(
        self, sample: Sample, number: int, messages: list[dict[str, Any]], prompt: Prompt
    ) -> Sample:
        """The one that begins with these messages: a new one, or that which was saved."""
        ids = self._rendering.prompt(messages, ())
        if number == len(sample.sequences):
            return sample.begin(ids, parent=number - 1)
        found = sample.sequences[number]
        if found.tokens and found.prompt_ids != ids:
            raise ToolFailed("its row says something else after a restart than before")
        found.prompt_ids = ids
        if not number:
            found.own_prompt = ids != prompt.ids
        return found

    def _steps(self, prompt: Prompt) -> list[tuple[str, str]]:
        found, where = prompt.entry.get(self._params.steps), prompt.location or f"prompt {prompt.index}"
        if not isinstance(found, list) or not found:
            raise RowError(f"{where}: {self._params.steps} = {found!r:.80}, expected a list of steps")
        for step in found:
            if not isinstance(step, Mapping) or not all(
                isinstance(step.get(k), str) for k in ("observation", "action")
            ):
                raise RowError(f"{where}: step {step!r:.80}, expected texts observation and action")
        return [(step["observation"], step["action"]) for step in found]

    def _found(self, said: str, action: str) -> float:
        found = float(self._match(said, action))
        if not is_reward(found):
            raise ToolFailed(f"{FIELD}.match gave {found}, expected a finite number")
        return found


def _same(said: str, action: str) -> float:
    return float(" ".join(said.casefold().split()) == " ".join(action.casefold().split()))


def replayed(config: Config, tokenizer: Tokenizer | None, speak: Speak, **params: Any) -> ReplayedTurns:
    """The generator of `rollout.generator: replayed`."""
    if tokenizer is None:
        raise UserError("rollout.generator = 'replayed': it needs a tokenizer")
    return ReplayedTurns(config, tokenizer, speak, parse_params(FIELD, ReplayedParams, params))
