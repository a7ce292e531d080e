"""Named evaluation sets (`eval.sets`), each with its own prompts, reward and sampling parameters.

They are outside the ledger: no sample of a set has an id, a seed or a position among the training samples, so
an evaluation changes no training batch.
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
from rlsys.data.source import draw_heldout
from rlsys.evaluation.pass_at_k import pass_at_k_metrics
from rlsys.generators.censoring import prompt_name
from rlsys.generators.generator import build_generator, respond
from rlsys.generators.turns import probing_turns
from rlsys.rewards import Rewards
from rlsys.router.engines import Engines
from rlsys.router.router import EVALUATION
from rlsys.worker.assembly import build_scorer
from rlsys.worker.scoring import Verdict

log = logging.getLogger("rlsys.rollout")


def eval_set_config(config: Config, eval_set: EvalSet) -> Config:
    """Return the run's config with the prompts, reward and sizes of an evaluation set.

    Raises:
        UserError: the result is invalid.
    """
    tokens = eval_set.max_response_tokens or config.rollout.max_response_tokens
    return config.model_copy(
        update={
            "data": eval_set.data or config.data,
            "eval": config.eval.model_copy(update={"prompts": eval_set.prompts, "sets": []}),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": tokens}),
        }
    )


class EvalSetRunner:
    """Evaluation of one set, repeatedly. Owns its reward processes; `close` ends them."""

    def __init__(self, config: Config, eval_set: EvalSet, tokenizer: Tokenizer, router: Engines) -> None:
        """Load the prompts and start the reward processes.

        Raises:
            UserError: invalid set; the message names it.
        """
        self.name, self._eval_set = eval_set.name, eval_set
        set_config = eval_set_config(config, eval_set)
        if eval_set.data is not None:
            tokenizer = Tokenizer.of(set_config)
        self._prompts = heldout_prompts(set_config, eval_set, tokenizer)
        self._rewards = Rewards(set_config)
        self._scorer = build_scorer(set_config, self._rewards, tokenizer)
        self.generator = build_generator(
            set_config,
            tokenizer,
            probing_turns(set_config, router, eval_set.temperature, eval_set.truncation),
        )

    async def measure(self) -> dict[str, float]:
        """Generate and judge responses with the weights that serve now, and return the metrics.

        Raises:
            RunError: no response can be judged, or the responses come from more than one weight version.
        """
        samples_by_prompt = [
            [self._sample(p, i) for i in range(self._eval_set.samples)] for p in self._prompts
        ]
        pairs = [(s, p) for p, samples in zip(self._prompts, samples_by_prompt, strict=True) for s in samples]
        names = [f"eval.sets {self.name}, {prompt_name(p)}" for _, p in pairs]
        outcomes = await asyncio.gather(
            *(respond(self.generator, s, p, name) for (s, p), name in zip(pairs, names, strict=True))
        )
        for name, censored in zip(names, outcomes, strict=True):
            if censored is not None:
                log.warning("%s is left out (%s): %s", name, censored.cause.value, censored.reason)
        version = one_version([s for s, _ in pairs])
        verdicts = await asyncio.gather(
            *(
                self._verdict(s, p, name, None if censored is None else censored.reason)
                for (s, p), name, censored in zip(pairs, names, outcomes, strict=True)
            )
        )
        n = self._eval_set.samples
        judged = [
            [v.right for v in verdicts[i * n : (i + 1) * n] if v.reward is not None]
            for i in range(len(samples_by_prompt))
        ]
        all_judged = [right for of_prompt in judged for right in of_prompt]
        if not all_judged:
            raise RunError(f"eval.sets {self.name}: no response could be judged: {verdicts[0].reason}")
        return {
            "accuracy": sum(all_judged) / len(all_judged),
            **pass_at_k_metrics(judged, n),
            "reward": sum(v.reward for v in verdicts if v.reward is not None) / len(all_judged),
            "prompts": sum(map(bool, judged)),
            "samples": n,
            "left_out": len(pairs) - len(all_judged),
            "mean_length": sum(s.sampled_tokens for s, _ in pairs) / len(pairs),
            "truncated": sum(s.status is Status.TRUNCATED for s, _ in pairs),
            "weight_version": version,
        }

    async def _verdict(self, sample: Sample, prompt: Prompt, name: str, reason: str | None) -> Verdict:
        """Judge a response; `reason` is set if there is none."""
        if reason is not None:
            return Verdict(reason=reason)
        return await self._scorer.verdict(prompt, sample, name)

    def _sample(self, prompt: Prompt, number: int) -> Sample:
        """Return an empty sample; each response has its own seed, the same in every evaluation."""
        seed = stable_hash("evaluation", self.name, prompt.index, number, bits=31)
        return Sample(EVALUATION, EVALUATION, number, prompt.ids, seed=seed)

    async def close(self) -> None:
        """End the reward processes."""
        await self._rewards.close()


def heldout_prompts(config: Config, eval_set: EvalSet, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the held-out prompts of an evaluation set.

    Raises:
        UserError: invalid set; the message names it.
    """
    try:
        source: PromptSource = build_source(config, tokenizer)
        return draw_heldout(source, eval_set.prompts)
    except UserError as e:
        raise UserError(f"eval.sets {eval_set.name}: {e}") from None


def one_version(samples: Sequence[Sample]) -> int:
    """Return the weight version that sampled all tokens; 0 without tokens.

    Raises:
        RunError: there are several.
    """
    versions = sorted({span.version for s in samples for span in s.spans})
    if len(versions) > 1:
        raise RunError(f"evaluation: its tokens come from the weight versions {versions}, expected one")
    return versions[0] if versions else 0
