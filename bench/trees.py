"""Measure the effect of trees and of repairs, on a real engine and the quickstart's task.

    python bench/trees.py --json                  distinct answers of LATR, and of sampling with as many tokens
    python bench/trees.py --part scope --json     groups without success, before and after SCOPE's repairs

Token counts include generated tokens that trees discard. In the part latr the names of the figures begin with:

    tree            a group of LATR
    sampled         responses that are sampled one after the other, until they have as many tokens as the tree
    sampled_group   as many sampled responses as a group has
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from statistics import mean

from measure import ROOT, running_engine

from rlsys.algo.methods.scope import Scope
from rlsys.config import Config, load_config
from rlsys.core.forks import fork
from rlsys.core.types import Prompt, Response, Sample
from rlsys.data import Tokenizer, build_source
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.generators.generator import build_generator
from rlsys.generators.trees import TreeGenerator
from rlsys.generators.turns import sampling_turns, top_logprob_turns
from rlsys.planning.repairs import Repairs
from rlsys.rewards.answer import final_answer
from rlsys.rewards.repairs import build_process_judge
from rlsys.router.router import Router
from rlsys.worker.assembly import build_router
from tests.helpers.families import Siblings


def group_of(number: int, prompt: Prompt, size: int) -> Siblings:
    """Return the new samples of one prompt.

    Args:
        number: number of the group, which determines ids and seeds.
        prompt: the prompt.
        size: number of samples.
    """
    first_seed = 1 + 1000 * number
    return Siblings(
        [Sample(number * size + i, number, i, prompt.ids, seed=first_seed + i) for i in range(size)]
    )


def answers(tokenizer: Tokenizer, samples: Iterable[Sample]) -> set[str]:
    """Return the distinct final answers of the responses that ended with a stop id."""
    complete = [
        s.response_ids for s in samples if s.response_ids and s.response_ids[-1] in tokenizer.stop_ids
    ]
    final_answers = (final_answer(Response(tokenizer.decode(ids), finished=True)) for ids in complete)
    return {a for a in final_answers if a is not None}


Part = Callable[[Config, Tokenizer, Router, int, Prompt, int], Awaitable[dict[str, float]]]
"""(config, tokenizer, router, number of the group, prompt, samples of the group) -> figures of the group."""


async def measure(part: Part, config: Config, url: str, prompts: int, size: int) -> dict[str, float]:
    """Return the figures of a part as means over prompts.

    Args:
        part: measures one group.
        config: the config.
        url: URL of the engine.
        prompts: number of prompts.
        size: samples of a group.
    """
    tokenizer = Tokenizer(config.model.path, config.data.chat_template_args)
    source, rows = build_source(config, tokenizer), []
    async with make_session() as session:
        router = build_router(config, [EngineClient(url, session, tp=1)], tokenizer, skip_attestation=True)
        watch = asyncio.create_task(router.watch())
        router.resume()
        try:
            for number in range(prompts):
                rows.append(await part(config, tokenizer, router, number, source.train(number), size))
        finally:
            watch.cancel()
    return {name: round(mean(row[name] for row in rows), 3) for name in rows[0]}


async def repair_group(
    config: Config, tokenizer: Tokenizer, router: Router, number: int, prompt: Prompt, size: int
) -> dict[str, float]:
    """Sample a group, and SCOPE's repairs if the group has no success. Return the figures of the part scope."""
    generate_turn, judge = sampling_turns(config, router), build_process_judge(config)
    assert judge is not None
    group = group_of(number, prompt, size).samples
    await asyncio.gather(*(generate_turn(s) for s in group))
    answer = str(prompt.entry["answer"])
    solved = answer in answers(tokenizer, group)
    repairs = Repairs(judge, tokenizer, 60, config.rollout.max_response_tokens)
    prefixes = [] if solved else await repairs.of(prompt, group[: Scope().repairs])
    repaired = []
    for prefix in prefixes:
        repaired.append(
            Sample(10**6 + size * number + prefix.index, number, size + prefix.index, prompt.ids, seed=7)
        )
        fork(group[prefix.index], prefix.at, repaired[-1], inserted=prefix.ids)
    await asyncio.gather(*(generate_turn(s) for s in repaired))
    successes = [answer in answers(tokenizer, [s]) for s in repaired]
    return {
        "without_success": float(not solved),
        "without_success_repaired": float(not solved and not any(successes)),
        "repairs": len(repaired),
        "repairs_that_won": sum(successes),
        "tokens": sum(s.received_tokens for s in group),
        "repair_tokens": sum(s.received_tokens for s in repaired),
    }


async def distinct(
    config: Config, tokenizer: Tokenizer, router: Router, number: int, prompt: Prompt, size: int
) -> dict[str, float]:
    """Grow a tree, then sample responses with as many tokens. Return the figures of the part latr."""
    generate_turn = sampling_turns(config, router)
    generate = build_generator(config, tokenizer, generate_turn)
    assert isinstance(generate, TreeGenerator)
    group = group_of(2 * number, prompt, size)
    generate.attach(group, top_logprob_turns(config, router))
    await asyncio.gather(*(generate(s, prompt) for s in group.samples))
    tree_tokens = sum(s.received_tokens for s in group.samples)

    candidates = group_of(2 * number + 1, prompt, 16 * size)
    sampled: list[Sample] = []
    while sum(s.tokens for s in sampled) < tree_tokens or len(sampled) < size:
        batch = candidates.samples[len(sampled) : len(sampled) + size]
        await asyncio.gather(*(generate_turn(s) for s in batch))
        sampled += batch
    within_budget, tokens = [], 0
    for s in sampled:
        tokens += s.tokens
        if tokens <= tree_tokens:
            within_budget.append(s)
    return {
        "tokens": tree_tokens,
        "tree_distinct": len(answers(tokenizer, group.samples)),
        "sampled_distinct": len(answers(tokenizer, within_budget)),
        "sampled_responses": len(within_budget),
        "sampled_group_distinct": len(answers(tokenizer, sampled[:size])),
        "sampled_group_tokens": sum(s.tokens for s in sampled[:size]),
        "tree_branches": sum(s.fork is not None for s in group.samples),
        "tree_discarded": sum(s.discarded for s in group.samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("latr", "scope"), default="latr", help="part (default: latr)")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--size", type=int, default=8, help="number of samples of a group")
    parser.add_argument("--quick", action="store_true", help="2 prompts: checks only that the bench runs")
    parser.add_argument("--json", action="store_true", help="print the figures in one line")
    parser.add_argument("overrides", nargs="*", help="overrides of the part's recipe in configs/algorithms")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            ROOT / "configs/algorithms" / f"{args.part}.yaml", [f"run.dir={folder}", *args.overrides]
        )
        with running_engine(config, Path(folder)) as url:
            part = distinct if args.part == "latr" else repair_group
            prompts = 2 if args.quick else args.prompts
            figures = asyncio.run(measure(part, config, url, prompts, args.size))
    print(json.dumps(figures, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
