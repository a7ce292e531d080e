"""The generator `environment`: a response is an episode, turns of the model with an environment's messages between.

prompt  turn: ... <eos>    |  what the environment says, and the opening of the next turn  |  turn: ... <eos>
        sampled, trained      by the chat template, not trained                               sampled, trained

The environment is a process of its own, or somebody's service (environment_services.py). It says what each turn is
worth: `Sample.turn_marks`, and the reward `environment` is their sum. After a crash of the rollout process the saved
turns are played again; an environment that then says something else, or fails, censors the sample.
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
from rlsys.data.tokenizer import TextTooLong
from rlsys.engine_requests import short
from rlsys.generators.environment_services import EnvironmentFailed, LeasedEpisode, ServiceParams, Services
from rlsys.generators.parser_client import TAIL_IDS, ToolFailed, TurnReader
from rlsys.generators.replay import Full, SavedTurns
from rlsys.generators.turns import Speak
from rlsys.router.turn_ends import turn_ends

FIELD = "rollout.generator_params"


@dataclass(frozen=True)
class CheckedStep:
    """What an environment says to a turn, once it has been read. `messages`: none behind the last turn."""

    messages: list[Message]
    reward: float
    done: bool


def read_step(answer: Any, number: int) -> CheckedStep:
    """An environment is somebody else's code, and may be somebody else's service: raises BadRequest for what is no
    answer to turn `number`, counted from 0."""
    where = f"step {number}"
    if not isinstance(answer, dict):
        raise BadRequest(f"{where}: {answer!r:.80}, expected an object")
    if missing := [name for name in ("reward", "done", "messages") if name not in answer]:
        raise BadRequest(f"{where}: it has no {missing[0]}")
    reward, done = answer["reward"], answer["done"]
    if not is_reward(reward):
        raise BadRequest(
            f"{where}: reward = {short(reward)}, expected a finite number, at most {LARGEST_REWARD:g}"
        )
    if done not in (True, False):
        raise BadRequest(f"{where}: done = {done!r:.80}, expected true or false")
    return CheckedStep([] if done else read_messages(answer["messages"], where), float(reward), bool(done))


def read_messages(messages: Any, where: str) -> list[Message]:
    """As those of an agent's request are read. Raises BadRequest."""
    if not isinstance(messages, list | tuple):
        raise BadRequest(f"{where}: messages = {messages!r:.80}, expected a list of messages")
    valid = valid_json(messages)
    return [read_message(message, f"{where}: messages[{i}]") for i, message in enumerate(valid)]


class EnvironmentParams(ServiceParams):
    """rollout.generator_params of the generator `environment`."""

    max_turns: Positive = 16
    """Turns that the model gets; the last one ends the response, whatever the environment says."""


class EnvironmentGenerator:
    """A generator (generator.py). Owns the services."""

    def __init__(self, config: Config, tokenizer: Tokenizer, speak: Speak, params: EnvironmentParams) -> None:
        self._speak, self._params = speak, params
        self._rendering = Rendering(tokenizer)
        self._reader = TurnReader(config) if config.engine.tool_call_parser else None
        self._ends = turn_ends(config, tokenizer)
        self._budget = config.rollout.max_response_tokens
        self._services = Services(params, FIELD)
        self.counts = {"environment_restarts": 0, "environment_replays": 0}
        """Since this process began: processes of the environment that were started anew, and episodes that were
        played again for it."""

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Raises ToolFailed when the environment fails or gives what cannot be used, UserError when there is none."""
        if sample.trained_prompt is not None:
            raise UserError(
                "rollout.generator = 'environment': the environment makes the prompt, so no planner may change it; "
                "remove lens from algo.planners"
            )
        seed = prompt.entry.get("seed", prompt.index)
        if not isinstance(seed, int):
            raise RowError(
                f"{prompt.location or f'prompt {prompt.index}'}: seed = {seed!r:.80}, expected a whole number"
            )
        try:
            async with self._services.episode({**prompt.entry, "question": prompt.question}, seed) as episode:
                try:
                    await self._play(episode, sample, prompt)
                finally:
                    self.counts["environment_replays"] += episode.restarts
                    self.counts["environment_restarts"] = self._services.restarts
        except (EnvironmentFailed, BadRequest, ToolFailed, TextTooLong) as e:
            raise ToolFailed(f"the environment {self._params.name}: {e}") from None

    async def _play(self, episode: LeasedEpisode, sample: Sample, prompt: Prompt) -> None:
        """All turns: those that were saved, and then those that are missing."""
        messages = read_messages(episode.messages, "opening")
        tools = read_tools(valid_json(episode.tools), "opening: tools")
        if messages:
            ids = self._rendering.prompt(messages, tools)
            if sample.tokens and sample.prompt_ids != ids:
                raise ToolFailed("it began otherwise after a restart than before")
            sample.prompt_ids, sample.own_prompt = ids, ids != prompt.ids
        turns = SavedTurns(self._speak, self._ends, sample, self._budget)
        marks: list[TurnReward] = []
        while True:
            try:
                start, end = await turns.turn()
                if turns.finish == "length":
                    raise Full
                said, calls, last = await self._read(tools, sample, start, end)
                step = read_step(await episode.step(said, calls), len(marks))
                marks.append(TurnReward(step.reward))
                if step.done or len(marks) >= self._params.max_turns:
                    sample.turn_rewards, sample.status = marks, Status.FINISHED
                    return
                turns.observe(self._rendering.behind(step.messages, tools, last))
            except Full:
                begun = len(sample.observed) + (not sample.observed_last)
                marks += [TurnReward(0.0)] * (begun - len(marks))  # a turn that was cut off
                sample.turn_rewards, sample.status = marks, Status.TRUNCATED
                return

    async def _read(
        self, tools: Sequence[Mapping[str, Any]], sample: Sample, start: int, end: int
    ) -> tuple[str, list[dict[str, Any]], str]:
        """A turn's text, its calls, and the text of the token that ended it."""
        ids = sample.response_ids[start:end].tolist()
        last = self._rendering.text(ids[-1:]) if ids[-1] in self._ends.ids else ""
        text = self._rendering.text(ids).removesuffix(last)
        if self._reader is None:
            return text, [], last
        before = [*sample.prompt_ids, *sample.response_ids[:start]][-TAIL_IDS:]
        turn = await self._reader(text, self._rendering.text(before), tools)
        calls = [
            {"id": f"call_{start}_{i}", "name": c.name, "arguments": c.arguments}
            for i, c in enumerate(turn.calls)
        ]
        return turn.text, calls, last

    async def close(self) -> None:
        """End the services."""
        await self._services.close()
        if self._reader is not None:
            await self._reader.close()


def environment(
    config: Config, tokenizer: Tokenizer | None, speak: Speak, **params: Any
) -> EnvironmentGenerator:
    """The generator of `rollout.generator: environment`."""
    if tokenizer is None:
        raise UserError("rollout.generator = 'environment': it needs a tokenizer")
    return EnvironmentGenerator(config, tokenizer, speak, parse_params(FIELD, EnvironmentParams, params))
