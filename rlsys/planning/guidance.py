"""Guidance (AOI): prompts with a hint that a judge derives from failed responses."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.core.types import Prompt, Sample
from rlsys.data import Tokenizer
from rlsys.rewards.judges import JudgeWithTimeout

REQUEST = """Problem:
{problem}

{failures}
All of these are wrong. Say in one or two sentences what went wrong and how to go about it. Do not give the answer."""
FAILED = "Wrong solution {number}:\n{text}\n"
GUIDED = "{problem}\n\nHint: {guidance}"


class Guidance:
    """Requests guidance from the judge, which has its own time limit.

    Attributes:
        counts: Number of prompts with guidance, and of requests without a response, by metric.
    """

    def __init__(self, judge: JudgeWithTimeout, tokenizer: Tokenizer) -> None:
        self._judge, self._tokenizer = judge, tokenizer
        self.counts: dict[str, float] = {"guided": 0, "guidance_missing": 0}

    async def guided_prompt_ids(self, prompt: Prompt, samples: Sequence[Sample]) -> list[int] | None:
        """Request guidance from the judge, and return the ids of the prompt with it; None if the judge gives none.

        Args:
            prompt: the group's prompt.
            samples: failed samples of the group, with their tokens in memory.
        """
        problem = prompt.question or prompt.text
        texts = [self._tokenizer.without_special(self._tokenizer.decode(s.judged_ids)) for s in samples]
        failures = "\n".join(FAILED.format(number=i + 1, text=text.strip()) for i, text in enumerate(texts))
        response = await self._judge(REQUEST.format(problem=problem, failures=failures))
        guidance = self._tokenizer.without_special(response or "").strip()
        if not guidance:
            self.counts["guidance_missing"] += 1
            return None
        self.counts["guided"] += 1
        content = GUIDED.format(problem=problem, guidance=guidance)
        return self._tokenizer.encode(self._tokenizer.apply_chat([{"role": "user", "content": content}]))
