"""The generator `agent`: a response consists of the model's answers to an agent, a program of the user.

    agent  --messages-->  endpoint  -->  Conversation  --generate_turn-->  router, engines
           <--answer----            <--                <--tokens---------

This file starts agents and handles their exit; conversation.py handles the messages between agent and model.

event                                                              effect
an interruption, a push, the death of an engine                    the answer arrives later
the agent or the rollout process is killed                         the agent runs again, and gets the saved answers
the agent then sends other requests than before                    the sample is censored
an agent raises an error, hangs or makes too many requests         the sample is censored
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

MAX_STARTS = 3
"""Largest number of starts of one agent. An agent that was killed is started again."""
FIELD = "rollout.generator_params"
_KEEPERS: set[asyncio.Task[None]] = set()
"""Strong references to tasks, because an event loop has only weak references."""

log = logging.getLogger("rlsys.rollout")


class AgentParams(Section):
    """rollout.generator_params of the generator `agent`."""

    run: str | None = None
    """The agent: an async or plain function of its task, `path/to/file.py:function` or `package.module:function`."""
    python: str | None = None
    """Python of a venv that has the packages of `run`; it need not have rlsys. Unset: the run's own Python."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """The agent as a program with arguments. It reads its task as JSON from its standard input."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """The agent as a service on this machine, which gets its task by POST (rlsys/agents/remote.py)."""
    env: list[str] = Field(default_factory=list)
    """Names of environment variables that the agent gets, in addition to the few that programs need."""
    max_calls: Positive = 256
    """Largest number of requests of an agent. A sample with more is censored."""
    idle_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Longest time, in seconds, from an agent's start or an answer to its next request. Afterwards the sample is
    censored."""
    environment: ServiceParams | None = None
    """An environment for the agent, which gets its address and key as RLSYS_ENVIRONMENT_URL and RLSYS_ENVIRONMENT_KEY
    (docs/environments.md)."""
    train: Literal["all", "first"] = "all"
    """Which of the agent's conversations are trained: all, or only the first one."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(source is not None for source in (self.run, self.command, self.url)) != 1:
            raise ValueError(
                f"run = {self.run!r}, command = {self.command!r}, url = {self.url!r}: expected exactly one of them"
            )
        if self.python is not None and self.run is None:
            raise ValueError(
                f"python = {self.python!r} without `run`: expected `run`, which this Python imports"
            )
        if self.url is not None and self.env:
            raise ValueError(
                f"env = {self.env} with `url`: expected no env, because rlsys does not start the service"
            )
        return self

    @property
    def name(self) -> str:
        """Name of the agent, for errors."""
        return self.run or self.url or " ".join(self.command or ())


class AgentGenerator:
    """Runs agents. Owns their endpoint and host, from the first sample to the end of the event loop.

    Attributes:
        remote: whether agents run in a service that this run does not start.
        evaluated_step: number of train steps in the weights of an evaluation; None outside a run.
        persist: saves a sample durably before an answer is returned. A service may forward an answer to other
            processes (multi_policy.py), so a crash must not change it.
        counts: since this process started, the numbers of
            agent_calls: requests,
            agent_side_calls: requests outside the main conversation,
            agent_sequences: conversations after the first one of a sample,
            agent_restarts: agents that were started again because they were killed.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer, generate_turn: GenerateTurn, params: AgentParams
    ) -> None:
        self._config, self._generate_turn, self._params = config, generate_turn, params
        self._rendering = Rendering(tokenizer)
        parsed = config.engine.tool_call_parser or config.engine.reasoning_parser
        self._reader = TurnReader(config) if parsed else None
        self._ends = turn_ends(config, tokenizer)
        self._requires_reward = any(spec.name == "agent" for spec in config.data.reward)
        self.remote = params.url is not None
        self.evaluated_step: int | None = None
        self.persist: Callable[[Sample], Awaitable[None]] | None = None
        self._environments = None if params.environment is None else Services(params.environment, FIELD)
        self._keeper: asyncio.Task[None] | None = None
        self._servers: asyncio.Future[tuple[Endpoint, AgentHost | AgentService]] | None = None
        self.counts = dict.fromkeys(
            ("agent_calls", "agent_side_calls", "agent_sequences", "agent_restarts"), 0
        )

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
        for _ in range(MAX_STARTS):
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
                self._assign_reward(sample, session.reward, full=end is None)
                return
            self.counts["agent_restarts"] += 1
            cause = end.kill_reason
        raise ToolFailed(f"the agent {self._params.name}: killed {MAX_STARTS} times, the last time {cause}")

    def _conclude(self, conversation: Conversation, end: AgentExit | None) -> None:
        """Set the final status of the sample.

        Args:
            conversation: the conversation of the agent.
            end: exit of the agent; None: the response has reached its limit of tokens.

        Raises:
            ToolFailed: the agent raised an error, or did not request all saved turns.
        """
        if end is not None and end.error is not None:
            raise ToolFailed(f"the agent {self._params.name}: {end.error}")
        try:
            conversation.conclude(full=end is None)
        except ToolFailed as e:
            raise ToolFailed(f"the agent {self._params.name}: {e}") from None

    def _assign_reward(self, sample: Sample, reward: float | None, *, full: bool) -> None:
        """Set the rewards of the sample's turns: the agent's reward for the last turn, 0 for the others.

        Args:
            sample: the sample.
            reward: reward that the agent has reported; None: no report.
            full: whether the response has reached its limit of tokens. A missing reward is then 0.

        Raises:
            ToolFailed: data.reward requires a reward, and the agent reported none.
        """
        if self._requires_reward and reward is None:
            if not full:
                raise ToolFailed(
                    f"the agent {self._params.name}: returned no reward, which data.reward = agent requires"
                )
            reward = 0.0
        if reward is not None:
            turns = [(q.last_turn, i) for q in sample.trained_sequences for i, _ in enumerate(q.turns())]
            last_index = turns.index(max(turns))
            sample.turn_rewards = [TurnReward(reward if i == last_index else 0.0) for i in range(len(turns))]

    @asynccontextmanager
    async def _running(
        self, sample: Sample, task: dict[str, Any]
    ) -> AsyncIterator[tuple[Session, asyncio.Future[AgentExit]]]:
        """Run an agent while the context is active. Yield its session and a future of its exit."""
        endpoint, host = await self._running_servers()
        async with (
            nullcontext()
            if self._environments is None
            else self._environments.agent_environment() as environment
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

    async def _running_servers(self) -> tuple[Endpoint, AgentHost | AgentService]:
        """Return endpoint and host. Start them if they do not run, or have died."""
        if self._keeper is not None and self._host_died():
            await asyncio.wait([self._keeper])
        if self._servers is None or self._keeper is None or self._keeper.done():
            self._servers = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._servers), name="agents")
            _KEEPERS.add(self._keeper)
            self._keeper.add_done_callback(_KEEPERS.discard)
        return await asyncio.shield(self._servers)

    def _host_died(self) -> bool:
        """Return whether the host has died, or did not start."""
        if self._servers is None or not self._servers.done():
            return False
        return self._servers.exception() is not None or self._servers.result()[1].host_exit.is_set()

    async def _keep(self, servers: asyncio.Future[tuple[Endpoint, AgentHost | AgentService]]) -> None:
        """Run endpoint and host until the host dies or the task is cancelled.

        Args:
            servers: gets endpoint and host when they are ready, or the error of the start.
        """
        p = self._params
        try:
            host_context = (
                open_host(p.run, p.python, p.command, p.env) if p.url is None else open_service(p.url)
            )
            async with Endpoint().listening() as endpoint, host_context as host:
                servers.set_result((endpoint, host))
                await host.host_exit.wait()
                log.warning("the process that runs the agents has died; restarting it")
        except (UserError, OSError, TimeoutError) as e:
            if servers.done():
                raise
            servers.set_exception(e)

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
    """Create the generator of `rollout.generator: agent`. `params`: fields of AgentParams.

    Raises:
        UserError: a parameter is invalid, or there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError("rollout.generator = 'agent' requires a tokenizer")
    parsed = parse_params(FIELD, AgentParams, params)
    return AgentGenerator(config, tokenizer, generate_turn, parsed)
