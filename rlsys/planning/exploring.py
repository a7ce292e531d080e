"""Probes: responses of exploration engines whose rewards planners use, and which are not trained."""

from __future__ import annotations

import asyncio
import logging

from rlsys.algo.planners import MAX_GROUP
from rlsys.core.seeds import sample_seed
from rlsys.core.types import Prompt, Sample
from rlsys.generators.censoring import prompt_name
from rlsys.generators.generator import Generator, respond
from rlsys.router.router import EVALUATION, NoExplorationEngine
from rlsys.worker.scoring import Scorer

log = logging.getLogger("rlsys.rollout")


class Explorer:
    """Generates and scores probes."""

    def __init__(self, generate: Generator, scorer: Scorer, seed: int) -> None:
        """Create an explorer.

        Args:
            generate: generator that uses exploration engines.
            scorer: scorer of the responses.
            seed: run.seed. The seeds of probes differ from those of samples.
        """
        self._generate, self._scorer, self._seed = generate, scorer, seed
        self._warned = False  # whether the current lack of exploration engines was logged

    async def rewards(self, prompt: Prompt, group_id: int, count: int) -> list[float]:
        """Run `count` probes of a prompt, and return the rewards of those that did not fail.

        Without an exploration engine, all probes fail immediately.
        """
        seeds = [sample_seed(self._seed, group_id, MAX_GROUP + i) for i in range(count)]
        probes = [Sample(EVALUATION, EVALUATION, i, prompt.ids, seed=seed) for i, seed in enumerate(seeds)]
        rewards = await asyncio.gather(*(self._reward(sample, prompt) for sample in probes))
        return [reward for reward in rewards if reward is not None]

    async def _reward(self, sample: Sample, prompt: Prompt) -> float | None:
        """Return the reward of a probe; None if it failed."""
        try:
            censored = await respond(self._generate, sample, prompt, f"a probe of {prompt_name(prompt)}")
        except NoExplorationEngine:
            if not self._warned:
                log.warning(
                    "no engine with role = explore is available; until one is, groups get rollout.group_size samples"
                )
            self._warned = True
            return None
        self._warned = False
        if censored is not None:  # reported with the group's samples
            return None
        return (await self._scorer.verdict(prompt, sample, f"a probe of {prompt_name(prompt)}")).reward
