"""The generator `agent`: a response consists of the model's answers to an agent, a program of the user.

    agent  --messages-->  endpoint  -->  Conversation  --generate_turn-->  router, engines
           <--answer----            <--                <--tokens---------

This file starts agents and handles their exit; conversation.py handles the messages between agent and model. An
interruption, a push or an engine's death only delays an answer. If the agent or the rollout process is killed, the
agent runs again from its beginning and gets the saved answers. The sample is censored if the agent then sends other
requests, and if an agent raises an error, hangs or makes too many requests.
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
from rlsys.agents.hosting import AgentExit, AgentHost, open_host
from rlsys.agents.remote import AgentService, open_service
from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Positive, Section
from rlsys.core.errors import UserError
from rlsys.core.spans import TurnReward
from rlsys.core.types import Prompt, Sample
from rlsys.data import Tokenizer
from rlsys.data.rows import json_row
from rlsys.generators.censoring import prompt_name
from rlsys.generators.conversation import Conversation
from rlsys.generators.environment_services import ServiceParams, Services
from rlsys.generators.parser_client import ToolFailed, TurnReader
from rlsys.generators.turns import GenerateTurn
from rlsys.router.router import EVALUATION
from rlsys.router.turn_ends import turn_ends

STARTS = 3
"""Largest number of starts of one agent, which is started again after it was killed."""
FIELD = "rollout.generator_params"
_KEEPERS: set[asyncio.Task[None]] = set()
"""Strong references to tasks: an event loop has only weak ones."""

log = logging.getLogger("rlsys.rollout")


class AgentParams(Section):
    """rollout.generator_params of the generator `agent`."""

    run: str | None = None
    """The agent: an async or plain function of its task, `path/to/file.py:function` or `package.module:function`."""
    python: str | None = None
    """Python of a venv that has the packages of `run`; it need not have rlsys. Unset: the run's own Python."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """The agent as a program with arguments. Its standard input has its task as JSON."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """The agent as a service on this machine, which gets its task by POST (rlsys/agents/remote.py)."""
    env: list[str] = Field(default_factory=list)
    """Names of environment variables that the agent gets, in addition to the few that programs need."""
    max_calls: Positive = 256
    """Largest number of requests; with more the sample is censored."""
    idle_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without a request after an answer, or after the start, after which the sample is censored."""
    environment: ServiceParams | None = None
    """An environment for the agent. RLSYS_ENVIRONMENT_URL and RLSYS_ENVIRONMENT_KEY have its address and key
    (docs/environments.md)."""
    train: Literal["all", "first"] = "all"
    """Which of the agent's conversations are trained: all, or only the first one."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.run, self.command, self.url)) != 1:
            raise ValueError("run, command, url: expected one of them")
        if self.python is not None and self.run is None:
            raise ValueError(
                f"python = {self.python!r}: expected it only with `run`, which this Python imports"
            )
        if self.url is not None and self.env:
            raise ValueError(
                f"env = {self.env}: expected no env with `url`, because rlsys does not start the service"
            )
        return self

    @property
    def name(self) -> str:
        """The agent's name in messages."""
        return self.run or self.url or " ".join(self.command or ())


class AgentGenerator:
    """Runs agents. Owns their endpoint and process, from the first sample to the end of the event loop."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn, params: AgentParams
    ) -> None:
        self._config, self._generate_turn, self._params = config, generate_turn, params
        self._rendering = Rendering(tokenizer)
        parsed = config.engine.tool_call_parser or config.engine.reasoning_parser
        self._reader = TurnReader(config) if parsed else None
        self._ends = turn_ends(config, tokenizer)
        self._wants_reward = any(spec.name == "agent" for spec in config.data.reward)
        self.remote = params.url is not None
        """Whether agents run in a service that this run does not start."""
        self.evaluated_step: int | None = None
        """Train steps contained in the weights of an evaluation within a run."""
        self.persist: Callable[[Sample], Awaitable[None]] | None = None
        """Saves a sample durably before an answer is returned.

        A service may forward an answer to other processes (multi_policy.py), so a crash must not change it.
        """
        self._environments = None if params.environment is None else Services(params.environment, FIELD)
        self._keeper: asyncio.Task[None] | None = None
        self._parts: asyncio.Future[tuple[Endpoint, AgentHost | AgentService]] | None = None
        self.counts = dict.fromkeys(
            ("agent_calls", "agent_side_calls", "agent_sequences", "agent_restarts"), 0
        )
        """Counts since this process started: of requests, of those outside the main conversation, of conversations
        after the first one of a sample, and of restarts of agents that were killed.
        """

    async def __call__(self, sample: Sample, prompt: Prompt) -> None:
        """Run the agent.

        Raises:
            ToolFailed: the agent fails.
            UserError: the agent does not exist.
        """
        if sample.trained_prompt is not None:
            raise UserError(
                "rollout.generator = 'agent': an agent creates its own prompt, which planners cannot change; remove "
                "lens from algo.planners"
            )
        task = json_row(prompt.entry, prompt_name(prompt)) | {"question": prompt.question}
        cause = ""
        for _ in range(STARTS):
            conversation = Conversation(
                self._config, self._rendering, self._reader, self._generate_turn, self._ends, sample, prompt,
                self.counts, train_all=self._params.train == "all",
                persist=self.persist if self.remote and sample.sample_id != EVALUATION else None,
            )  # fmt: skip
            async with self._running(sample, task) as (session, exit_future):
                try:
                    end = await conversation.run(
                        session.questions, exit_future, self._params.max_calls, self._params.idle_seconds
                    )
                except ToolFailed as e:
                    raise ToolFailed(f"the agent {self._params.name}: {e}") from None
            if end is None or not end.kill_reason:
                self._conclude(conversation, end)
                self._take_reward(sample, session.reward, full=end is None)
                return
            self.counts["agent_restarts"] += 1
            cause = end.kill_reason
        raise ToolFailed(f"the agent {self._params.name}: killed {STARTS} times, the last time {cause}")

    def _conclude(self, conversation: Conversation, end: AgentExit | None) -> None:
        if end is not None and end.error is not None:
            raise ToolFailed(f"the agent {self._params.name}: {end.error}")
        try:
            conversation.conclude(full=end is None)
        except ToolFailed as e:
            raise ToolFailed(f"the agent {self._params.name}: {e}") from None

    def _take_reward(self, sample: Sample, reward: float | None, *, full: bool) -> None:
        """Assign the agent's reward to the last turn.

        The reward is 0 if the conversation hit its limit before the agent returned one.
        """
        if self._wants_reward and reward is None:
            if not full:
                raise ToolFailed(
                    f"the agent {self._params.name}: returned no reward, which data.reward = agent requires"
                )
            reward = 0.0
        if reward is not None:
            turns = [(q.last_turn, i) for q in sample.trained_sequences for i, _ in enumerate(q.turns())]
            last = turns.index(max(turns))
            sample.turn_rewards = [TurnReward(reward if i == last else 0.0) for i in range(len(turns))]

    @asynccontextmanager
    async def _running(
        self, sample: Sample, task: dict[str, Any]
    ) -> AsyncIterator[tuple[Session, asyncio.Future[AgentExit]]]:
        """Run an agent while the context is active."""
        endpoint, host = await self._serving()
        async with (
            nullcontext() if self._environments is None else self._environments.of_agent() as environment
        ):
            session = endpoint.open(None if environment is None else environment.request)
            variables = {}
            if sample.sample_id != EVALUATION:
                variables[SAMPLE] = str(sample.sample_id)
            elif self.evaluated_step is not None:
                variables[EVALUATION_STEP] = str(self.evaluated_step)
            agent, exit_future = host.start(task, sample.seed, {**session.environment(), **variables})
            try:
                yield session, exit_future
            finally:
                host.kill(agent)
                endpoint.close(session)

    async def _serving(self) -> tuple[Endpoint, AgentHost | AgentService]:
        """Return endpoint and host. The first sample starts them; a later one restarts them after a crash."""
        if self._keeper is not None and self._host_died():
            await asyncio.wait([self._keeper])
        if self._parts is None or self._keeper is None or self._keeper.done():
            self._parts = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._parts), name="agents")
            _KEEPERS.add(self._keeper)
            self._keeper.add_done_callback(_KEEPERS.discard)
        return await asyncio.shield(self._parts)

    def _host_died(self) -> bool:
        """Return whether the process that runs the agents has died."""
        if self._parts is None or not self._parts.done():
            return False
        return self._parts.exception() is not None or self._parts.result()[1].host_exit.is_set()

    async def _keep(self, parts: asyncio.Future[tuple[Endpoint, AgentHost | AgentService]]) -> None:
        """Run endpoint and host until the event loop cancels it."""
        p = self._params
        try:
            opened = open_host(p.run, p.python, p.command, p.env) if p.url is None else open_service(p.url)
            async with Endpoint().listening() as endpoint, opened as host:
                parts.set_result((endpoint, host))
                await host.host_exit.wait()
                log.warning("the process that runs the agents has died; restarting it")
        except (UserError, OSError, TimeoutError) as e:
            if parts.done():
                raise
            parts.set_exception(e)

    async def close(self) -> None:
        """Stop all agents and their environment."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._reader is not None:
            await self._reader.close()
        if self._environments is not None:
            await self._environments.close()


def agent(
    config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn, **params: Any
) -> AgentGenerator:
    """Create the generator of `rollout.generator: agent`."""
    if tokenizer is None:
        raise UserError("rollout.generator = 'agent': it requires a tokenizer")
    parsed = parse_params(FIELD, AgentParams, params)
    return AgentGenerator(config, tokenizer, generate_turn, parsed)
