"""The generator `agent`: a response is what the model says to an agent, a program of the user's with a stock client.

    agent  --messages-->  endpoint  -->  Conversation  --speak-->  router, engines
           <--answer----            <--                <--tokens--

This file starts agents and judges how they end; what is said between an agent and the model is conversation.py's. An
interruption, a push or an engine's death holds up an answer, and the agent sees none of them. An agent that is
killed, or whose rollout process was, is run again from its beginning and told what was said before; where it then
asks something else, the sample is censored. So is one whose agent raises, stands still or asks for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlsys.agents.endpoint import Endpoint, Session
from rlsys.agents.host import EVALUATION_STEP, SAMPLE
from rlsys.agents.hosting import AgentHost, Ended, open_host
from rlsys.agents.remote import AgentService, open_service
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Positive, Section
from rlsys.core.errors import UserError
from rlsys.core.spans import TurnReward
from rlsys.core.types import Prompt, Sample
from rlsys.data import Tokenizer
from rlsys.environments.client import KEY as ENVIRONMENT_KEY
from rlsys.environments.client import URL as ENVIRONMENT_URL
from rlsys.generators.conversation import Conversation
from rlsys.generators.environment_services import ServiceParams, Services
from rlsys.generators.parser_client import ToolFailed, TurnReader
from rlsys.generators.turns import Speak
from rlsys.router.router import EVALUATION
from rlsys.router.turn_ends import turn_ends

STARTS = 3
"""Of one agent: after so many that were killed it is not run again."""
FIELD = "rollout.generator_params"
_KEEPERS: set[asyncio.Task[None]] = set()
"""An event loop itself holds its tasks by weak references only."""

log = logging.getLogger("rlsys.rollout")


class AgentParams(Section):
    """rollout.generator_params of the generator `agent`."""

    run: str | None = None
    """The agent: an async or plain function of its task, `path/to/file.py:function` or `package.module:function`."""
    python: str | None = None
    """The Python of a venv that has the packages of `run`; rlsys need not be there. Unset: the run's own."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """The agent as a program, with its arguments; its task comes as JSON through its standard input."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """The agent as a service of this machine, which gets its task by POST (rlsys/agents/remote.py)."""
    env: list[str] = Field(default_factory=list)
    """Environment variables that it may read, beside the few that programs need."""
    max_calls: Positive = 256
    """Requests after which it counts as running away, and the sample is censored."""
    patience: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that it may take between an answer and its next request, or its end; then the sample is censored."""
    environment: ServiceParams | None = None
    """An environment for the agent: its address and key are in RLSYS_ENVIRONMENT_URL and RLSYS_ENVIRONMENT_KEY
    (docs/environments.md)."""
    train: Literal["all", "first"] = "all"
    """Which of the agent's conversations are trained. With `first`, the others are answered on the side."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(way is not None for way in (self.run, self.command, self.url)) != 1:
            raise ValueError("run, command, url: expected one of them")
        if self.python is not None and self.run is None:
            raise ValueError(f"python = {self.python!r}: only an agent with `run` is imported")
        if self.url is not None and self.env:
            raise ValueError(f"env = {self.env}: a service of its own has an environment of its own")
        return self

    @property
    def name(self) -> str:
        """For messages."""
        return self.run or self.url or " ".join(self.command or ())


class AgentGenerator:
    """Owns the endpoint and the process of the agents, from the first sample to the end of the event loop."""

    def __init__(self, config: Config, tokenizer: Tokenizer, speak: Speak, params: AgentParams) -> None:
        self._config, self._speak, self._params = config, speak, params
        self._rendering = Rendering(tokenizer)
        parsed = config.engine.tool_call_parser or config.engine.reasoning_parser
        self._reader = TurnReader(config) if parsed else None
        self._ends = turn_ends(config, tokenizer)
        self._wants_reward = any(spec.name == "agent" for spec in config.data.reward)
        self.remote = params.url is not None
        """Agents are somebody else's processes."""
        self.evaluated_step: int | None = None
        """Of an evaluation within a run: how many train steps its weights contain."""
        self.persist: Callable[[Sample], Awaitable[None]] | None = None
        """Where samples are saved; returns when what the sample has outlives this process. Of a service, whoever is
        told an answer may tell it to others (meeting.py), so it must be the same after a death of ours."""
        self._environments = None if params.environment is None else Services(params.environment, FIELD)
        self._keeper: asyncio.Task[None] | None = None
        self._parts: asyncio.Future[tuple[Endpoint, AgentHost | AgentService]] | None = None
        self.counts = dict.fromkeys(
            ("agent_calls", "agent_side_calls", "agent_sequences", "agent_restarts"), 0
        )
        """Since this process began: requests of agents, those that were answered on the side, conversations beside
        the first one of a sample, and agents that were killed and run again."""

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Raises ToolFailed when the agent fails, UserError when there is no such agent."""
        if sample.trained_prompt is not None:
            raise UserError(
                "rollout.generator = 'agent': an agent makes its prompt itself, so no planner may change it; remove "
                "lens from algo.planners"
            )
        task = {**prompt.entry, "question": prompt.question}
        lost = ""
        for _ in range(STARTS):
            talk = Conversation(
                self._config, self._rendering, self._reader, self._speak, self._ends, sample, prompt,
                self.counts, train_all=self._params.train == "all",
                saved=self.persist if self.remote and sample.sample_id != EVALUATION else None,
            )  # fmt: skip
            async with self._running(sample, task) as (session, ended):
                try:
                    end = await talk.lead(
                        session.questions, ended, self._params.max_calls, self._params.patience
                    )
                except ToolFailed as e:
                    raise ToolFailed(f"the agent {self._params.name}: {e}") from None
            if end is None or not end.lost:
                self._conclude(talk, end)
                self._take_reward(sample, session.reward, full=end is None)
                return
            self.counts["agent_restarts"] += 1
            lost = end.lost
        raise ToolFailed(f"the agent {self._params.name}: killed {STARTS} times, at last {lost}")

    def _conclude(self, talk: Conversation, end: Ended | None) -> None:
        if end is not None and end.error is not None:
            raise ToolFailed(f"the agent {self._params.name}: {end.error}")
        try:
            talk.conclude(full=end is None)
        except ToolFailed as e:
            raise ToolFailed(f"the agent {self._params.name}: {e}") from None

    def _take_reward(self, sample: Sample, reward: float | None, *, full: bool) -> None:
        """What the agent has said, as the worth of the last turn. One that had no room to come to its end has not
        said more: nothing is worth 0."""
        if self._wants_reward and reward is None:
            if not full:
                raise ToolFailed(
                    f"the agent {self._params.name}: gave no reward, and data.reward = agent is its own"
                )
            reward = 0.0
        if reward is not None:
            turns = [(q.last_turn, i) for q in sample.trained_sequences for i, _ in enumerate(q.turns())]
            last = turns.index(max(turns))
            sample.turn_rewards = [TurnReward(reward if i == last else 0.0) for i in range(len(turns))]

    @asynccontextmanager
    async def _running(
        self, sample: Sample, task: dict[str, Any]
    ) -> AsyncIterator[tuple[Session, asyncio.Future[Ended]]]:
        """An agent, for as long as this lasts."""
        endpoint, host = await self._serving()
        async with nullcontext() if self._environments is None else self._environments.service() as service:
            session = endpoint.open()
            found = {} if service is None else {ENVIRONMENT_URL: service.url, ENVIRONMENT_KEY: service.key}
            if sample.sample_id != EVALUATION:
                found[SAMPLE] = str(sample.sample_id)
            elif self.evaluated_step is not None:
                found[EVALUATION_STEP] = str(self.evaluated_step)
            agent, ended = host.start(task, sample.seed, {**session.environment(), **found})
            try:
                yield session, ended
            finally:
                host.kill(agent)
                endpoint.close(session)

    async def _serving(self) -> tuple[Endpoint, AgentHost | AgentService]:
        """Started by the first sample; started anew where the process of the agents has died."""
        if self._keeper is not None and self._lost():
            await asyncio.wait([self._keeper])
        if self._parts is None or self._keeper is None or self._keeper.done():
            self._parts = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._parts), name="agents")
            _KEEPERS.add(self._keeper)
            self._keeper.add_done_callback(_KEEPERS.discard)
        return await asyncio.shield(self._parts)

    def _lost(self) -> bool:
        """Whether there was a process of the agents, and is none."""
        if self._parts is None or not self._parts.done():
            return False
        return self._parts.exception() is not None or self._parts.result()[1].lost.is_set()

    async def _keep(self, parts: asyncio.Future[tuple[Endpoint, AgentHost | AgentService]]) -> None:
        """Ends with the event loop, which cancels it."""
        p = self._params
        try:
            opened = open_host(p.run, p.python, p.command, p.env) if p.url is None else open_service(p.url)
            async with Endpoint().listening() as endpoint, opened as host:
                parts.set_result((endpoint, host))
                await host.lost.wait()
                log.warning("the process of the agents has died; it is started anew")
        except (UserError, OSError, TimeoutError) as e:
            if parts.done():
                raise
            parts.set_exception(e)

    async def close(self) -> None:
        """End all agents, and their environment."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._reader is not None:
            await self._reader.close()
        if self._environments is not None:
            await self._environments.close()


def agent(config: Config, tokenizer: Tokenizer | None, speak: Speak, **params: Any) -> AgentGenerator:
    """The generator of `rollout.generator: agent`."""
    if tokenizer is None:
        raise UserError("rollout.generator = 'agent': it needs a tokenizer")
    parsed = parse_params(FIELD, AgentParams, params)
    return AgentGenerator(config, tokenizer, speak, parsed)
