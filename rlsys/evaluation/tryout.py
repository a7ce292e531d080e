"""A few prompts of a run, asked and scored, for a person to read. For `rlsys try`:

    python -m rlsys.evaluation.tryout --config TRY/config.yaml --engine URL ...

asks engines that serve `model.path` as the run would sample, and writes `try.json` into its folder. Nothing of it
enters a ledger. It asks the source's prompts in their order, SAMPLES times each: `algo.prompt`, which may choose or
reword prompts, and `algo.planners`, which may drop groups or change their size, do not act here.
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
from rlsys.core.owner import of_process
from rlsys.core.types import Sample
from rlsys.data import Tokenizer, build_source
from rlsys.evaluation.evaluation import respond
from rlsys.generators.censoring import train_prompt
from rlsys.generators.turns import sampling_turns
from rlsys.obs.role import run_role
from rlsys.router.router import EVALUATION

FILE_NAME = "try.json"
PROMPTS, SAMPLES = 3, 4
"""Training prompts that are asked, and how often each."""


async def try_out(config: Config, whose: Mapping[str, Identity]) -> list[dict[str, Any]]:
    """One entry a prompt: its text, and each sample's text, tokens, status, and reward or the reason for none, and
    whether an evaluation would count it as right. The prompt is what the model read: an agent or an environment may
    make its own. A sample with another one than most has it itself.
    """
    tokenizer = Tokenizer.of(config)
    source = build_source(config, tokenizer)
    prompts = [train_prompt(source, i) for i in range(PROMPTS)]
    asked = [(Sample(EVALUATION, EVALUATION, i, p.ids, seed=i), p) for p in prompts for i in range(SAMPLES)]
    verdicts = await respond(config, tokenizer, whose, asked, sampling_turns)
    told = [
        {
            "text": tokenizer.decode(s.judged_ids), "tokens": s.sampled_tokens, "status": s.status.value,
            "reward": v.parts or v.reward, "reason": v.reason, "right": v.right,
        }
        for (s, _), v in zip(asked, verdicts, strict=True)
    ]  # fmt: skip
    read = [s.prompt_ids for s, _ in asked]
    places = range(0, len(asked), SAMPLES)
    return [_entry(tokenizer, read[i : i + SAMPLES], told[i : i + SAMPLES]) for i in places]


def _entry(tokenizer: Tokenizer, read: list[list[int]], told: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the samples of one prompt. `read`: the prompt of each."""
    prompt = max(read, key=read.count)
    for ids, sample in zip(read, told, strict=True):
        if ids != prompt:
            sample["prompt"] = tokenizer.decode(ids)
    return {"prompt": tokenizer.decode(prompt), "tokens": len(prompt), "samples": told}


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a run's first prompts; started by rlsys try.")
    parser.add_argument("--config", type=Path, required=True, help="resolved config")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="an SGLang server")
    args = parser.parse_args()

    def run() -> None:
        config = load_config(args.config)
        owner, _ = of_process(config.run.dir)
        found = asyncio.run(try_out(config, {url: engine_identity(owner, url) for url in args.engine}))
        (config.run.dir / FILE_NAME).write_text(json.dumps(found, indent=1))

    run_role(run)


if __name__ == "__main__":
    main()
