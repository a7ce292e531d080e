"""The generator `replayed`: the model follows an expert's trajectory from the data (UI-S1).

    observation 1 -> turn 1 matches the expert's action   -> observation 2, after the model's turn -> turn 2 -> ...
                     turn 1 differs, and a patch is left  -> observation 2, after the expert's action -> turn 2 -> ...
                     turn 1 differs, and none is left     -> the end of the response

A patch starts a new sequence of the sample. Its prompt has the expert's action instead of the model's turn, and is
not trained. Each matching turn has the reward 1 / steps, so the reward `environment` is the share of correct steps.
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
from rlsys.core.types import Prompt, Sample, Status, TokenSequence, is_reward
from rlsys.data import Tokenizer
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.replay import BudgetExhausted, SavedTurns
from rlsys.generators.turns import GenerateTurn
from rlsys.router.turn_ends import turn_ends

FIELD = "rollout.generator_params"


class ReplayedParams(Section):
    """rollout.generator_params of the generator `replayed`."""

    patches: Annotated[int, Field(ge=-1)] = 0
    """Number of wrong turns that are replaced by the expert's action. The next wrong turn ends the response. -1: no
    limit."""
    match: str | None = None
    """`path/to/file.py:function` of (the model's text, the expert's action). It returns a number: 1 or more is a
    match, less is a partial reward. Unset: texts match if they differ only in white space and case."""
    steps: str = "steps"
    """Column with the list of steps, each with an `observation` and an `action`."""
    system: str = ""
    """System message; empty: none."""


class ReplayedTurns:
    """The generator `replayed`. Its only state is the sample's sequences and the row."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn, params: ReplayedParams
    ) -> None:
        self._generate_turn, self._params = generate_turn, params
        self._rendering = Rendering(tokenizer)
        self._ends = turn_ends(config, tokenizer)
        self._budget = config.rollout.max_response_tokens
        self._match: Callable[[str, str], Any] = (
            _same_text if params.match is None else resolve(f"{FIELD}.match", params.match, {})
        )

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Generate the turns of a trajectory.

        Raises:
            RowError: the row has no valid trajectory.
            ToolFailed: the row has changed since the sample started, or the match function returns no number.
        """
        steps, patches_left = self._steps(prompt), self._params.patches
        history: list[dict[str, Any]] = []
        if self._params.system:
            history.append({"role": "system", "content": self._params.system})
        rewards: list[TurnReward] = []
        sequence_count, end_text = 0, ""
        turns: SavedTurns | None = None
        sample.turn_rewards = rewards
        for observation, action in steps:
            question = {"role": "user", "content": observation}
            try:
                if turns is None:
                    sequence = self._sequence(sample, sequence_count, [*history, question], prompt)
                    sequence_count += 1
                    turns = SavedTurns(self._generate_turn, self._ends, sequence, self._budget)
                else:
                    turns.observe(self._rendering.continuation([question], (), end_text))
                start, end = await turns.turn()
                if turns.finish == "length":
                    rewards.append(TurnReward(0.0, False))
                    raise BudgetExhausted
            except BudgetExhausted:
                sample.status = Status.TRUNCATED
                return
            except BadRequest as e:
                raise ToolFailed(f"{prompt.location or f'prompt {prompt.index}'}: {e}") from None
            sequence.last_turn = len(rewards) + 1
            text, end_text = self._turn_text(sequence.response_ids[start:end].tolist())
            score = self._match_score(text, action)
            rewards.append(TurnReward(score / len(steps), score >= 1))
            if score >= 1:
                history += [question, {"role": "assistant", "content": text}]
            elif patches_left == 0:
                break
            else:
                patches_left -= 1
                turns = None
                history += [question, {"role": "assistant", "content": action}]
        sample.status = Status.FINISHED

    def _turn_text(self, ids: list[int]) -> tuple[str, str]:
        """Return the text of a turn, and the text of the token that ended it."""
        end_text = self._rendering.text(ids[-1:]) if ids[-1] in self._ends.ids else ""
        return self._rendering.text(ids).removesuffix(end_text), end_text

    def _sequence(
        self, sample: Sample, number: int, messages: list[dict[str, Any]], prompt: Prompt
    ) -> TokenSequence:
        """Return the saved sequence `number` of a sample, or begin it.

        Args:
            sample: the sample.
            number: number of the sequence in the sample.
            messages: messages of the sequence's prompt.
            prompt: prompt of the sample.

        Raises:
            ToolFailed: the saved sequence has another prompt.
        """
        ids = self._rendering.prompt(messages, ())
        if number == len(sample.sequences):
            return sample.begin(ids, parent=number - 1)
        sequence = sample.sequences[number]
        if sequence.tokens and sequence.prompt_ids != ids:
            raise ToolFailed(
                f"{prompt.location or f'prompt {prompt.index}'}: the row has changed since the sample started"
            )
        sequence.prompt_ids = ids
        if sequence is sample:
            sample.own_prompt = ids != prompt.ids
        return sequence

    def _steps(self, prompt: Prompt) -> list[tuple[str, str]]:
        """Return the (observation, action) pairs of a row.

        Raises:
            RowError: the row has no list of steps, or a step is malformed.
        """
        steps, location = prompt.entry.get(self._params.steps), prompt.location or f"prompt {prompt.index}"
        if not isinstance(steps, list) or not steps:
            raise RowError(
                f"{location}: {self._params.steps} = {steps!r:.80}; expected a non-empty list of steps"
            )
        for i, step in enumerate(steps):
            if not isinstance(step, Mapping) or not all(
                isinstance(step.get(k), str) for k in ("observation", "action")
            ):
                raise RowError(
                    f"{location}: {self._params.steps}[{i}] = {step!r:.80}; expected an object with the texts "
                    "observation and action"
                )
        return [(step["observation"], step["action"]) for step in steps]

    def _match_score(self, text: str, action: str) -> float:
        """Return the score of a turn: 1 or more for a match.

        Raises:
            ToolFailed: the score is not finite.
        """
        score = float(self._match(text, action))
        if not is_reward(score):
            raise ToolFailed(f"{FIELD}.match returned {score}; expected a finite number")
        return score


def _same_text(text: str, action: str) -> float:
    """Return 1 if the texts differ only in white space and case, otherwise 0."""
    return float(" ".join(text.casefold().split()) == " ".join(action.casefold().split()))


def replayed(
    config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn, **params: Any
) -> ReplayedTurns:
    """Create the generator of `rollout.generator: replayed`. `params`: fields of ReplayedParams.

    Raises:
        UserError: a parameter is invalid, or there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError("rollout.generator = 'replayed' requires a tokenizer")
    return ReplayedTurns(config, tokenizer, generate_turn, parse_params(FIELD, ReplayedParams, params))
