"""Scored responses to the first prompts of a run, for people to read. `rlsys try` starts the program:

    python -m rlsys.evaluation.tryout --config TRY/config.yaml --engine URL ...

The program samples from engines that serve `model.path`, with the sampling parameters of the run, and writes try.json
into its folder. It samples SAMPLES responses to each of the source's first PROMPTS prompts. `algo.prompt`, which may
choose or reword prompts, and `algo.planners`, which may drop or resize groups, do not apply.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.config import Config, load_config
from rlsys.core.identity import Identity, engine_identity
from rlsys.core.owner import owner_of_process
from rlsys.core.types import Sample
from rlsys.data import Tokenizer, build_source
from rlsys.evaluation.evaluation import respond
from rlsys.generators.censoring import train_prompt
from rlsys.generators.turns import sampling_turns
from rlsys.obs.role import run_role
from rlsys.router.router import EVALUATION

FILE_NAME = "try.json"
PROMPTS, SAMPLES = 3, 4
"""Number of training prompts, and number of responses to each."""


async def try_out(config: Config, identities: Mapping[str, Identity]) -> list[dict[str, Any]]:
    """Sample and score responses.

    Args:
        identities: URL of each engine -> its identity.

    Returns:
        for each prompt, its text, its number of tokens and its samples. A sample has text, tokens, status, reward or
        the reason why there is none, and whether an evaluation would count it as correct. An agent or environment
        may write prompts; the text is then the most common prompt, and a sample with another one has it as `prompt`.
    """
    tokenizer = Tokenizer.of(config)
    source = build_source(config, tokenizer)
    prompts = [train_prompt(source, i) for i in range(PROMPTS)]
    items = [(Sample(EVALUATION, EVALUATION, i, p.ids, seed=i), p) for p in prompts for i in range(SAMPLES)]
    verdicts = await respond(config, tokenizer, identities, items, sampling_turns)
    entries = [
        {
            "text": tokenizer.decode(s.judged_ids), "tokens": s.sampled_tokens, "status": s.status.value,
            "reward": v.parts or v.reward, "reason": v.reason, "right": v.right,
        }
        for (s, _), v in zip(items, verdicts, strict=True)
    ]  # fmt: skip
    prompt_ids = [s.prompt_ids for s, _ in items]
    starts = range(0, len(items), SAMPLES)
    return [_entry(tokenizer, prompt_ids[i : i + SAMPLES], entries[i : i + SAMPLES]) for i in starts]


def _entry(
    tokenizer: Tokenizer, prompt_ids: list[list[int]], samples: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the entry of one prompt.

    Args:
        prompt_ids: prompt of each sample.
        samples: entries of the samples.
    """
    prompt = max(prompt_ids, key=prompt_ids.count)
    for ids, sample in zip(prompt_ids, samples, strict=True):
        if ids != prompt:
            sample["prompt"] = tokenizer.decode(ids)
    return {"prompt": tokenizer.decode(prompt), "tokens": len(prompt), "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Sample responses to a run's first prompts; started by rlsys try."
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved config file")
    parser.add_argument(
        "--engine", action="append", required=True, metavar="URL", help="address of an SGLang server"
    )
    args = parser.parse_args()

    def run() -> None:
        config = load_config(args.config)
        owner, _ = owner_of_process(config.run.dir)
        entries = asyncio.run(try_out(config, {url: engine_identity(owner, url) for url in args.engine}))
        (config.run.dir / FILE_NAME).write_text(json.dumps(entries, indent=1))

    run_role(run)


if __name__ == "__main__":
    main()
