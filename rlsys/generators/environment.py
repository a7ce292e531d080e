"""The generator `environment`: a response is an episode with turns of the model and messages of an environment.

prompt  turn: ... <eos>    |  messages of the environment, and the header of the next turn  |  turn: ... <eos>
        sampled, trained      by the chat template, not trained                                sampled, trained

The environment is a separate process, or an external service (environment_services.py). It returns a reward for each
turn (Sample.turn_rewards), and the reward `environment` is their sum. After a crash of the rollout process, the saved
turns are replayed in the environment. If it fails or returns other messages, the sample is censored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.agents.messages import BadRequest, Message, read_message, read_tools
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Positive
from rlsys.core.errors import RowError, UserError
from rlsys.core.spans import TurnReward
from rlsys.core.texts import valid_json
from rlsys.core.types import LARGEST_REWARD, Prompt, Sample, Status, is_reward
from rlsys.data import Tokenizer
from rlsys.data.rows import json_row
from rlsys.data.tokenizer import TextTooLong
from rlsys.engine_requests import short
from rlsys.generators.censoring import prompt_name
from rlsys.generators.environment_services import EnvironmentFailed, LeasedEpisode, ServiceParams, Services
from rlsys.generators.parser_client import TAIL_IDS, ToolFailed, TurnReader
from rlsys.generators.replay import BudgetExhausted, SavedTurns
from rlsys.generators.turns import GenerateTurn
from rlsys.router.turn_ends import turn_ends

FIELD = "rollout.generator_params"


@dataclass(frozen=True)
class CheckedStep:
    """The validated result of a turn.

    Attributes:
        messages: messages for the model's next turn; empty after the last turn.
        done: whether this was the last turn.
    """

    messages: list[Message]
    reward: float
    done: bool


def read_step(answer: Any, number: int) -> CheckedStep:
    """Validate the result of a turn. An environment may be untrusted code or an external service.

    Args:
        answer: the environment's response, decoded from JSON.
        number: number of the turn, from 0.

    Raises:
        BadRequest: the response is malformed.
    """
    location = f"step {number}"
    if not isinstance(answer, dict):
        raise BadRequest(f"{location}: the response is {answer!r:.80}; expected an object")
    if missing := [name for name in ("reward", "done", "messages") if name not in answer]:
        raise BadRequest(f"{location}: the response has no {missing[0]}; expected reward, done and messages")
    reward, done = answer["reward"], answer["done"]
    if not is_reward(reward):
        raise BadRequest(
            f"{location}: reward = {short(reward)}; expected a finite number of at most {LARGEST_REWARD:g}"
        )
    if done not in (True, False):
        raise BadRequest(f"{location}: done = {done!r:.80}; expected true or false")
    return CheckedStep([] if done else read_messages(answer["messages"], location), float(reward), bool(done))


def read_messages(messages: Any, location: str) -> list[Message]:
    """Validate and parse messages of an environment.

    Args:
        messages: the messages, decoded from JSON.
        location: prefix of errors.

    Raises:
        BadRequest: a message is malformed.
    """
    if not isinstance(messages, list | tuple):
        raise BadRequest(f"{location}: messages = {messages!r:.80}; expected a list of messages")
    valid = valid_json(messages)
    return [read_message(message, f"{location}: messages[{i}]") for i, message in enumerate(valid)]


class EnvironmentParams(ServiceParams):
    """rollout.generator_params of the generator `environment`."""

    max_turns: Positive = 16
    """Largest number of turns. The last turn ends the response, even if the environment is not done."""


class EnvironmentGenerator:
    """The generator `environment`. Owns the services that run environments."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn, params: EnvironmentParams
    ) -> None:
        self._generate_turn, self._params = generate_turn, params
        self._rendering = Rendering(tokenizer)
        self._reader = TurnReader(config) if config.engine.tool_call_parser else None
        self._ends = turn_ends(config, tokenizer)
        self._budget = config.rollout.max_response_tokens
        self._services = Services(params, FIELD)
        self.counts = {"environment_restarts": 0, "environment_replays": 0}
        """Numbers of restarts of the environment's processes and of replayed episodes, since this process started."""

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Run an episode.

        Raises:
            ToolFailed: the environment fails or returns unusable data.
            UserError: the environment does not exist.
        """
        if sample.trained_prompt is not None:
            raise UserError(
                "rollout.generator = 'environment': the environment creates the prompt, which planners cannot "
                "change; remove lens from algo.planners"
            )
        seed = prompt.entry.get("seed", prompt.index)
        if not isinstance(seed, int):
            raise RowError(f"{prompt_name(prompt)}: seed = {seed!r:.80}; expected a whole number")
        task = json_row(prompt.entry, prompt_name(prompt)) | {"question": prompt.question}
        try:
            async with self._services.episode(task, seed) as episode:
                try:
                    await self._play(episode, sample, prompt)
                finally:
                    self.counts["environment_replays"] += episode.restarts
                    self.counts["environment_restarts"] = self._services.restarts
        except (EnvironmentFailed, BadRequest, ToolFailed, TextTooLong) as e:
            raise ToolFailed(f"the environment {self._params.name}: {e}") from None

    async def _play(self, episode: LeasedEpisode, sample: Sample, prompt: Prompt) -> None:
        """Run all turns of an episode. The saved turns are replayed, and the others are generated."""
        messages = read_messages(episode.messages, "opening")
        tools = read_tools(valid_json(episode.tools), "opening: tools")
        if messages:
            ids = self._rendering.prompt(messages, tools)
            if sample.tokens and sample.prompt_ids != ids:
                raise ToolFailed("the first messages after a restart differ from the saved ones")
            sample.prompt_ids, sample.own_prompt = ids, ids != prompt.ids
        turns = SavedTurns(self._generate_turn, self._ends, sample, self._budget)
        rewards: list[TurnReward] = []
        while True:
            try:
                start, end = await turns.turn()
                if turns.finish == "length":
                    raise BudgetExhausted
                text, calls, end_text = await self._read_turn(tools, sample, start, end)
                step = read_step(await episode.step(text, calls), len(rewards))
                rewards.append(TurnReward(step.reward))
                if step.done or len(rewards) >= self._params.max_turns:
                    sample.turn_rewards, sample.status = rewards, Status.FINISHED
                    return
                turns.observe(self._rendering.continuation(step.messages, tools, end_text))
            except BudgetExhausted:
                turn_count = len(sample.observed) + (not sample.observed_last)
                rewards += [TurnReward(0.0)] * (turn_count - len(rewards))  # a truncated turn has no step
                sample.turn_rewards, sample.status = rewards, Status.TRUNCATED
                return

    async def _read_turn(
        self, tools: Sequence[Mapping[str, Any]], sample: Sample, start: int, end: int
    ) -> tuple[str, list[dict[str, Any]], str]:
        """Parse the turn of tokens [start, end).

        Returns:
            Text of the turn, its tool calls, and the text of the token that ended it (empty if truncated).
        """
        ids = sample.response_ids[start:end].tolist()
        end_text = self._rendering.text(ids[-1:]) if ids[-1] in self._ends.ids else ""
        text = self._rendering.text(ids).removesuffix(end_text)
        if self._reader is None:
            return text, [], end_text
        preceding_ids = [*sample.prompt_ids, *sample.response_ids[:start]][-TAIL_IDS:]
        turn = await self._reader(text, self._rendering.text(preceding_ids), tools)
        calls = [
            {"id": f"call_{start}_{i}", "name": c.name, "arguments": c.arguments}
            for i, c in enumerate(turn.calls)
        ]
        return turn.text, calls, end_text

    async def close(self) -> None:
        """Stop the environments and the parser."""
        await self._services.close()
        if self._reader is not None:
            await self._reader.close()


def environment(
    config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn, **params: Any
) -> EnvironmentGenerator:
    """Create the generator of `rollout.generator: environment`. `params`: fields of EnvironmentParams.

    Raises:
        UserError: a parameter is invalid, or there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError("rollout.generator = 'environment' requires a tokenizer")
    return EnvironmentGenerator(
        config, tokenizer, generate_turn, parse_params(FIELD, EnvironmentParams, params)
    )
