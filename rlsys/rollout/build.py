"""RolloutComponents: creates the components of the rollout process from a config."""

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
from rlsys.router.router import Router
from rlsys.worker.assembly import ask_engines, build_router, build_scorer, client_maker
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers, remote_workers, worker_commands


class RolloutComponents:
    """The components that RolloutManager needs. The caller starts and closes `rewards`.

    Raises:
        UserError: a plug-in does not exist, or the data section is invalid.
    """

    def __init__(
        self,
        config: Config,
        urls: list[str],
        reference: str | None,
        teacher: str | None,
        owner: Owner,
        session: ClientSession,
    ) -> None:
        """Create all components.

        Args:
            urls: URLs of the engines that the launch starts, by engine index.
            reference: URL of the server with reference weights, for prompt scores; None: there is none.
            teacher: URL of the server with the teacher's weights; None: there is none.
            owner: the launch; authorizes requests to its engines.
        """
        client = client_maker(config, session)

        def launch_client(url: str, index: int) -> EngineClient:
            return client(url, engine_identity(owner, url), tp=config.engine.tp_of(index), index=index)

        def create_client(url: str, tp: int, pool: str | None) -> EngineClient:
            return client(url, engine_identity(owner, url), tp=tp, pool=pool)

        self.create_client = create_client
        """Creates the client of an engine that joins during the run."""
        self.tokenizer = Tokenizer.of(config)
        self.source = build_source(config, self.tokenizer)
        check_teachers(config, self.source)
        self.rewards = Rewards(config)
        self.scorer = build_scorer(config, self.rewards, self.tokenizer)
        self.engines = [launch_client(url, i) for i, url in enumerate(urls)]
        if config.rollout.workers > 1:
            self.workers = remote_workers(config, worker_commands(config, urls))
        else:
            router = build_router(config, self.engines, self.tokenizer)
            self.workers = direct_workers(config, router, self.scorer, self.tokenizer)
        engines = self.workers.engines
        self.references: list[EngineClient] = []
        prompt_scores = None
        if reference is not None:
            engine_key: Identity = (
                engine_identity(owner, reference) if config.engine.reference == "own" else ANONYMOUS
            )
            self.references = [client(reference, engine_key, adapter=None)]
            protected = self.tokenizer.special_ids
            prompt_scores = ReferenceScores(engines, self.references[0], protected, config.start_seconds)
        engine_teacher = None if teacher is None else build_teacher(config, teacher, owner, session)
        if engine_teacher is not None:
            self.references.append(engine_teacher.client)
        ask_model = partial(ask_engines, engines, self.tokenizer, config.rollout.max_response_tokens)
        judge = build_judge(config, ask_model, lambda: engines.open)
        explorer = None
        if config.engine.explorers:
            assert config.rollout.workers == 1, "the config refuses explorers with several workers"
            explorer = _build_explorer(config, router, self.tokenizer, self.scorer)
        self.planning = Planning(
            config,
            self.source,
            self.tokenizer,
            judge,
            prompt_scores,
            _build_repairs(config, self.tokenizer),
            explorer,
            engine_teacher,
        )

    @property
    def reward_hung(self) -> bool:
        """Whether a cancelled reward function may still be running."""
        return bool(self.scorer.timeouts or self.planning.has_timeouts)


def _build_explorer(config: Config, router: Router, tokenizer: Tokenizer, scorer: Scorer) -> Explorer:
    generate_turn = sampling_turns(config, router, explorers=True)
    return Explorer(build_generator(config, tokenizer, generate_turn), scorer, config.run.seed)


def _build_repairs(config: Config, tokenizer: Tokenizer) -> Repairs | None:
    process_judge = build_process_judge(config)
    if process_judge is None:
        return None
    return Repairs(process_judge, tokenizer, config.data.judge_timeout, config.rollout.max_response_tokens)
