"""The named sets of an evaluation (`eval.sets`): each with prompts, reward and sampling of its own.

All of it is outside the ledger: no sample of a set has an id, a seed or a place in the order of the training samples,
so an evaluation changes no trained batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rlsys.config import Config
from rlsys.config.data import EvalSet
from rlsys.core.errors import RunError, UserError
from rlsys.core.seeds import stable_hash
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import PromptSource, Tokenizer, build_source
from rlsys.evaluation.pass_at import pass_figures
from rlsys.generators.censoring import named
from rlsys.generators.generator import build_generator, respond
from rlsys.generators.turns import probing_turns
from rlsys.rewards import Rewards
from rlsys.router.engines import Engines
from rlsys.router.router import EVALUATION
from rlsys.worker.assembly import build_scorer
from rlsys.worker.scoring import Verdict

log = logging.getLogger("rlsys.rollout")


def config_of(config: Config, chosen: EvalSet) -> Config:
    """What the run's config would be if it had the set's prompts, reward and sizes. Raises UserError."""
    tokens = chosen.max_response_tokens or config.rollout.max_response_tokens
    return config.model_copy(
        update={
            "data": chosen.data or config.data,
            "eval": config.eval.model_copy(update={"prompts": chosen.prompts, "sets": []}),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": tokens}),
        }
    )


class AskedSet:
    """One set, ready to be asked again and again. Owns its reward processes; `close` ends them."""

    def __init__(self, config: Config, chosen: EvalSet, tokenizer: Tokenizer, router: Engines) -> None:
        """Raises UserError that names the set."""
        self.name, self._chosen = chosen.name, chosen
        own = config_of(config, chosen)
        if chosen.data is not None:
            tokenizer = Tokenizer.of(own)
        self._prompts = heldout_of(own, chosen, tokenizer)
        self._rewards = Rewards(own)
        self._scorer = build_scorer(own, self._rewards, tokenizer)
        self.answer = build_generator(own, tokenizer, probing_turns(own, router, chosen.temperature))

    async def measure(self) -> dict[str, float]:
        """Figures of the weights that serve now. Raises RunError when nothing can be judged, and when the answers
        come from more than one weight version."""
        asked = [[self._sample(p, i) for i in range(self._chosen.samples)] for p in self._prompts]
        pairs = [(s, p) for p, samples in zip(self._prompts, asked, strict=True) for s in samples]
        names = [f"eval.sets {self.name}, {named(p)}" for _, p in pairs]
        made = await asyncio.gather(
            *(respond(self.answer, s, p, name) for (s, p), name in zip(pairs, names, strict=True))
        )
        for name, censored in zip(names, made, strict=True):
            if censored is not None:
                log.warning("%s is left out (%s): %s", name, censored.cause.value, censored.reason)
        version = one_version([s for s, _ in pairs])
        verdicts = await asyncio.gather(
            *(
                self._verdict(s, p, name, None if censored is None else censored.reason)
                for (s, p), name, censored in zip(pairs, names, made, strict=True)
            )
        )
        n = self._chosen.samples
        judged = [
            [v.right for v in verdicts[i * n : (i + 1) * n] if v.reward is not None]
            for i in range(len(asked))
        ]
        all_judged = [right for of_prompt in judged for right in of_prompt]
        if not all_judged:
            raise RunError(f"eval.sets {self.name}: no response could be judged: {verdicts[0].reason}")
        return {
            "accuracy": sum(all_judged) / len(all_judged),
            **pass_figures(judged, n),
            "reward": sum(v.reward for v in verdicts if v.reward is not None) / len(all_judged),
            "prompts": sum(map(bool, judged)),
            "samples": n,
            "left_out": len(pairs) - len(all_judged),
            "mean_length": sum(s.sampled_tokens for s, _ in pairs) / len(pairs),
            "truncated": sum(s.status is Status.TRUNCATED for s, _ in pairs),
            "weight_version": version,
        }

    async def _verdict(self, sample: Sample, prompt: Prompt, name: str, reason: str | None) -> Verdict:
        """`reason`: why there is no response."""
        if reason is not None:
            return Verdict(reason=reason)
        return await self._scorer.verdict(prompt, sample, name)

    def _sample(self, prompt: Prompt, number: int) -> Sample:
        """Each response has a seed of its own, the same in every evaluation."""
        seed = stable_hash("evaluation", self.name, prompt.index, number, bits=31)
        return Sample(EVALUATION, EVALUATION, number, prompt.ids, seed=seed)

    async def close(self) -> None:
        await self._rewards.close()


def heldout_of(own: Config, chosen: EvalSet, tokenizer: Tokenizer) -> list[Prompt]:
    """Raises UserError that names the set."""
    try:
        source: PromptSource = build_source(own, tokenizer)
        return source.heldout(chosen.prompts)
    except UserError as e:
        raise UserError(f"eval.sets {chosen.name}: {e}") from None


def one_version(samples: Sequence[Sample]) -> int:
    """The weight version that sampled all tokens; 0 where there is none. Raises RunError for several."""
    versions = sorted({span.version for s in samples for span in s.spans})
    if len(versions) > 1:
        raise RunError(f"evaluation: its tokens come from the weight versions {versions}, expected one")
    return versions[0] if versions else 0
