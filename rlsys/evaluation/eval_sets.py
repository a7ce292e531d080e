"""Named evaluation sets (`eval.sets`), each with its own prompts, reward and sampling parameters.

The ledger does not contain their samples, which have no ids and seeds of training samples. Therefore an evaluation
changes no training batch.
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
    """Return the run's config with the prompts, reward and response length of an evaluation set."""
    tokens = eval_set.max_response_tokens or config.rollout.max_response_tokens
    return config.model_copy(
        update={
            "data": eval_set.data or config.data,
            "eval": config.eval.model_copy(update={"prompts": eval_set.prompts, "sets": []}),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": tokens}),
        }
    )


class EvalSetRunner:
    """Evaluates one set, any number of times. Owns the set's reward processes, which `close` ends.

    Attributes:
        name: name of the set.
        generator: generator of the responses.
    """

    def __init__(self, config: Config, eval_set: EvalSet, tokenizer: Tokenizer, router: Engines) -> None:
        """Load the prompts and start the reward processes.

        Raises:
            UserError: the prompts, the reward or the generator of the set are invalid.
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
        """Generate and score responses with the current weights, and return the metrics.

        Raises:
            RunError: no response has a reward, or the responses come from several weight versions.
        """
        n = self._eval_set.samples
        items = [(self._sample(p, i), p) for p in self._prompts for i in range(n)]
        reasons = await asyncio.gather(*(self._respond(sample, prompt) for sample, prompt in items))
        samples = [sample for sample, _ in items]
        version = one_version(samples)
        verdicts = await asyncio.gather(
            *(self._verdict(s, p, reason) for (s, p), reason in zip(items, reasons, strict=True))
        )
        correct = [
            [v.right for v in verdicts[start : start + n] if v.reward is not None]
            for start in range(0, len(items), n)
        ]
        judged = sum(map(len, correct))
        if not judged:
            raise RunError(
                f"eval.sets {self.name}: no response got a reward; reason for the first one: {verdicts[0].reason}"
            )
        return {
            "accuracy": sum(map(sum, correct)) / judged,
            **pass_at_k_metrics(correct, n),
            "reward": sum(v.reward for v in verdicts if v.reward is not None) / judged,
            "prompts": sum(map(bool, correct)),
            "samples": n,
            "left_out": len(items) - judged,
            "mean_length": sum(s.sampled_tokens for s in samples) / len(samples),
            "truncated": sum(s.status is Status.TRUNCATED for s in samples),
            "weight_version": version,
        }

    async def _respond(self, sample: Sample, prompt: Prompt) -> str | None:
        """Generate a response to a prompt. Return None, or the reason why there is no response."""
        name = self._name_of(prompt)
        censored = await respond(self.generator, sample, prompt, name)
        if censored is None:
            return None
        log.warning("%s is excluded (%s): %s", name, censored.cause.value, censored.reason)
        return censored.reason

    async def _verdict(self, sample: Sample, prompt: Prompt, reason: str | None) -> Verdict:
        """Return the verdict on a response, or a verdict with the reason why there is no response."""
        if reason is not None:
            return Verdict(reason=reason)
        return await self._scorer.verdict(prompt, sample, self._name_of(prompt))

    def _name_of(self, prompt: Prompt) -> str:
        """Return the name of a prompt of this set for messages."""
        return f"eval.sets {self.name}, {prompt_name(prompt)}"

    def _sample(self, prompt: Prompt, number: int) -> Sample:
        """Return the empty sample of a prompt's response `number`. Its seed is the same in each evaluation."""
        seed = stable_hash("evaluation", self.name, prompt.index, number, bits=31)
        return Sample(EVALUATION, EVALUATION, number, prompt.ids, seed=seed)

    async def close(self) -> None:
        """End the reward processes."""
        await self._rewards.close()


def heldout_prompts(config: Config, eval_set: EvalSet, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of an evaluation set.

    Args:
        config: config from `eval_set_config`.

    Raises:
        UserError: the source is invalid, or has too few held-out prompts.
    """
    try:
        source: PromptSource = build_source(config, tokenizer)
        return draw_heldout(source, eval_set.prompts)
    except UserError as e:
        raise UserError(f"eval.sets {eval_set.name}: {e}") from None


def one_version(samples: Sequence[Sample]) -> int:
    """Return the weight version that sampled all tokens; 0 if there are no tokens.

    Raises:
        RunError: several versions sampled them.
    """
    versions = sorted({span.version for s in samples for span in s.spans})
    if len(versions) > 1:
        raise RunError(f"evaluation: tokens come from the weight versions {versions}; expected one version")
    return versions[0] if versions else 0
