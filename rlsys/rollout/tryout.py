"""A few prompts of a run, asked and scored, for a person to read. For `rlsys try`:

    python -m rlsys.rollout.tryout --config TRY/config.yaml --engine URL ...

asks engines that serve `model.path` as the run would sample, and writes `try.json` into its folder. Nothing of it
enters a ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.config import Config, load_config
from rlsys.data import Tokenizer, build_source
from rlsys.identity import Identity, engine_identity
from rlsys.obs.role import run_role
from rlsys.owner import of_process
from rlsys.rewards import Rewards
from rlsys.rollout.assembly import build_router, build_scorer
from rlsys.rollout.evaluation import open_engines
from rlsys.rollout.generator import build_generator, sampling_turns
from rlsys.router.router import EVALUATION
from rlsys.types import Prompt, Sample

FILE_NAME = "try.json"
PROMPTS, SAMPLES = 3, 4
"""Training prompts that are asked, and how often each."""


async def try_out(config: Config, whose: Mapping[str, Identity]) -> list[dict[str, Any]]:
    """One entry a prompt: its text, and each sample's text, tokens, status, and reward or the reason for none."""
    tokenizer = Tokenizer(config.model.path)
    source, rewards = build_source(config, tokenizer), Rewards(config)
    prompts = [source.train(i) for i in range(PROMPTS)]
    asked: list[tuple[Prompt, list[Sample]]] = [
        (p, [Sample(EVALUATION, EVALUATION, i, p.ids, seed=i) for i in range(SAMPLES)]) for p in prompts
    ]
    try:
        async with open_engines(config, whose) as engines:
            router = build_router(config, engines, tokenizer, trusted=True)
            watch = asyncio.ensure_future(router.watch())
            router.resume()
            answer = build_generator(config, tokenizer, sampling_turns(config, router))
            await asyncio.gather(*(answer(sample, p) for p, samples in asked for sample in samples))
            watch.cancel()
        scorer = build_scorer(config, rewards, tokenizer)
        found = []
        for prompt, samples in asked:
            verdicts = await asyncio.gather(*(scorer.score(prompt, s.response_ids) for s in samples))
            told = [
                {
                    "text": tokenizer.decode(s.response_ids), "tokens": s.sampled_tokens, "status": s.status.value,
                    "reward": v.named or v.reward, "reason": v.reason,
                }
                for s, v in zip(samples, verdicts, strict=True)
            ]  # fmt: skip
            found.append({"prompt": tokenizer.decode(prompt.ids), "tokens": len(prompt.ids), "samples": told})
        return found
    finally:
        await rewards.close()


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
