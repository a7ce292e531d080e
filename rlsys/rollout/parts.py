"""What the manager of a run works with, made of its config."""

from __future__ import annotations

from functools import partial

from aiohttp import ClientSession

from rlsys.config import Config
from rlsys.core.identity import ANONYMOUS, Identity, engine_identity
from rlsys.core.owner import Owner
from rlsys.data import Tokenizer, build_source
from rlsys.data.mixture import check_teachers
from rlsys.engine.client import EngineClient
from rlsys.generators.generator import build_generator
from rlsys.generators.turns import sampling_turns
from rlsys.planning.exploring import Explorer
from rlsys.planning.planning import Planning
from rlsys.planning.prompt_scores import ReferenceScores
from rlsys.planning.repairs import Repairs
from rlsys.planning.teacher import build_teacher
from rlsys.rewards import Rewards
from rlsys.rewards.judges import build_judge
from rlsys.rewards.repairs import build_process_judge
from rlsys.router.engines import Engines
from rlsys.router.router import Router
from rlsys.worker.assembly import ask_engines, build_router, build_scorer, client_maker
from rlsys.worker.workers import Workers, worker_commands


class Parts:
    """Raises UserError for a plug-in that does not exist, or a wrong data section. The caller closes `rewards`."""

    def __init__(
        self,
        config: Config,
        urls: list[str],
        reference: str | None,
        teacher: str | None,
        owner: Owner,
        session: ClientSession,
    ) -> None:
        """`urls`: of the engines. `reference`: of the server that prompts are held against. `teacher`: of the one
        that is asked about responses."""
        client = client_maker(config, session)

        def own(url: str, index: int) -> EngineClient:
            return client(url, engine_identity(owner, url), tp=config.engine.tp_of(index), index=index)

        def joiner(url: str, tp: int, pool: str | None) -> EngineClient:
            return client(url, engine_identity(owner, url), tp=tp, pool=pool)

        self.joiner = joiner
        """Of an engine that joins later."""
        self.tokenizer = Tokenizer.of(config)
        self.source = build_source(config, self.tokenizer)
        check_teachers(config, self.source)
        self.rewards = Rewards(config)
        self.rewards.begin()  # beside the engines' start
        self.scorer = build_scorer(config, self.rewards, self.tokenizer)
        self.engines = [own(url, i) for i, url in enumerate(urls)]
        self.router: Router | Workers
        """What samples run in."""
        self.asked: Engines
        """Who answers everything else."""
        if config.rollout.workers > 1:
            self.router = workers = Workers(config, worker_commands(config, urls))
            self.asked = workers.engines
        else:
            self.router = self.asked = build_router(config, self.engines, self.tokenizer)
        self.references: list[EngineClient] = []
        prompt_scores = None
        if reference is not None:
            whose: Identity = (
                engine_identity(owner, reference) if config.engine.reference == "own" else ANONYMOUS
            )
            self.references = [client(reference, whose, adapter=None)]
            protected = self.tokenizer.special_ids
            prompt_scores = ReferenceScores(self.asked, self.references[0], protected, config.start_seconds)
        asked_teacher = None if teacher is None else build_teacher(config, teacher, owner, session)
        if asked_teacher is not None:
            self.references.append(asked_teacher.client)
        ask = partial(ask_engines, self.asked, self.tokenizer, config.rollout.max_response_tokens)
        judge = build_judge(config, ask, lambda: self.asked.open)
        repairs = None
        if (process_judge := build_process_judge(config)) is not None:
            seconds, budget = config.data.judge_timeout, config.rollout.max_response_tokens
            repairs = Repairs(process_judge, self.tokenizer, seconds, budget)
        explorer = None
        if config.engine.explorers:
            assert isinstance(self.router, Router), "the config refuses it with several workers"
            speak = sampling_turns(config, self.router, explorers=True)
            generate = build_generator(config, self.tokenizer, speak)
            explorer = Explorer(generate, self.scorer, config.run.seed)
        self.planning = Planning(
            config, self.source, self.tokenizer, judge, prompt_scores, repairs, explorer, asked_teacher
        )

    @property
    def hung(self) -> bool:
        """Whether a reward function may still be busy that does not end when it should."""
        return bool(self.scorer.timeouts or self.planning.hung)
