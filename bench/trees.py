"""Do look-ahead trees find more distinct answers than sampling does with the same tokens? Prints JSON.

    python bench/trees.py --prompts 32 --json

For each prompt of the quickstart's task LATR grows a tree and completes it; then responses are sampled one after
the other until as many tokens have been made, those that trees discard included. Distinct answers are counted of
both, and of as many sampled responses as a group has, whatever they took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from measure import ROOT, running_engine

from rlsys.config import Config, load_config
from rlsys.data import Tokenizer, build_source
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.rewards.answer import final_answer
from rlsys.rollout.assembly import build_router
from rlsys.rollout.generator import build_generator
from rlsys.rollout.trees import TreeGenerator
from rlsys.rollout.turns import looking_turns, sampling_turns
from rlsys.router.router import Router
from rlsys.types import Prompt, Sample


class Group:
    """The samples of one prompt, without a ledger."""

    def __init__(self, number: int, prompt: Prompt, size: int, seed: int) -> None:
        self.prompt = prompt
        self.samples = [
            Sample(number * size + i, number, i, prompt.ids, seed=1 + seed + i) for i in range(size)
        ]

    def siblings(self, sample: Sample) -> Sequence[Sample]:
        return self.samples

    @contextmanager
    def growing(self, samples: Iterable[Sample]) -> Iterator[None]:
        yield

    def keep(self, samples: Iterable[Sample]) -> None:
        pass


def answers(tokenizer: Tokenizer, samples: Iterable[Sample]) -> set[str]:
    """The final ones; a response without one adds none."""
    told = (final_answer(tokenizer.decode(s.response_ids), tokenizer.eos_token) for s in samples)
    return {a for a in told if a is not None}


async def compare(config: Config, url: str, prompts: int, size: int) -> dict[str, float]:
    tokenizer = Tokenizer(config.model.path, config.data.chat_template_args)
    source, rows = build_source(config, tokenizer), []
    async with make_session() as session:
        router = build_router(config, [EngineClient(url, session, tp=1)], tokenizer, trusted=True)
        watch = asyncio.create_task(router.watch())
        router.resume()
        try:
            for number in range(prompts):
                prompt = source.train(number)
                rows.append(await _of_prompt(config, tokenizer, router, number, prompt, size))
        finally:
            watch.cancel()
    return {name: round(mean(row[name] for row in rows), 3) for name in rows[0]}


async def _of_prompt(
    config: Config, tokenizer: Tokenizer, router: Router, number: int, prompt: Prompt, size: int
) -> dict[str, float]:
    speak = sampling_turns(config, router)
    generate = build_generator(config, tokenizer, speak)
    assert isinstance(generate, TreeGenerator)
    group = Group(2 * number, prompt, size, 1000 * number)
    generate.attach(group, looking_turns(config, router))
    await asyncio.gather(*(generate(s, prompt) for s in group.samples))
    made = sum(s.received_tokens for s in group.samples)

    plain = Group(2 * number + 1, prompt, 16 * size, 1000 * number)
    sampled: list[Sample] = []
    while sum(s.tokens for s in sampled) < made or len(sampled) < size:
        batch = plain.samples[len(sampled) : len(sampled) + size]
        await asyncio.gather(*(speak(s) for s in batch))
        sampled += batch
    within, tokens = [], 0
    for s in sampled:
        tokens += s.tokens
        if tokens <= made:
            within.append(s)
    return {
        "tokens": made,
        "tree_distinct": len(answers(tokenizer, group.samples)),
        "sampled_distinct": len(answers(tokenizer, within)),
        "sampled_responses": len(within),
        "sampled_group_distinct": len(answers(tokenizer, sampled[:size])),
        "sampled_group_tokens": sum(s.tokens for s in sampled[:size]),
        "tree_branches": sum(s.fork is not None for s in group.samples),
        "tree_discarded": sum(s.discarded for s in group.samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--quick", action="store_true", help="2 prompts: shows that it runs")
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("overrides", nargs="*", help="of configs/algorithms/latr.yaml")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(ROOT / "configs/algorithms/latr.yaml", [f"run.dir={folder}", *args.overrides])
        with running_engine(config, Path(folder)) as url:
            found = asyncio.run(compare(config, url, 2 if args.quick else args.prompts, args.size))
    print(json.dumps(found, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
