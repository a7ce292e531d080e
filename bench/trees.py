"""Effect of trees and repairs, on a real engine and the quickstart's task. Prints JSON.

    python bench/trees.py --json                  distinct answers: LATR against sampling with as many tokens
    python bench/trees.py --part scope --json     groups without success, before and after SCOPE's repairs

Tokens are counted as engines generate them, including those that trees discard. `tree` has the figures of a group of
LATR, `sampled` those of responses that are sampled one after the other until as many tokens are generated, and
`sampled_group` those of as many sampled responses as a group has.
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
    """Return the samples of one prompt."""
    seeds = 1 + 1000 * number
    return Siblings([Sample(number * size + i, number, i, prompt.ids, seed=seeds + i) for i in range(size)])


def answers(tokenizer: Tokenizer, samples: Iterable[Sample]) -> set[str]:
    """Return the distinct final answers; responses without an answer do not count."""
    complete = [
        s.response_ids for s in samples if s.response_ids and s.response_ids[-1] in tokenizer.stop_ids
    ]
    final_answers = (final_answer(Response(tokenizer.decode(ids), finished=True)) for ids in complete)
    return {a for a in final_answers if a is not None}


Part = Callable[[Config, Tokenizer, Router, int, Prompt, int], Awaitable[dict[str, float]]]


async def measure(part: Part, config: Config, url: str, prompts: int, size: int) -> dict[str, float]:
    """Return the figures as means over prompts."""
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
    """Return a group, with SCOPE's additional samples if it has no success."""
    generate_turn, judge = sampling_turns(config, router), build_process_judge(config)
    assert judge is not None
    group = group_of(number, prompt, size).samples
    await asyncio.gather(*(generate_turn(s) for s in group))
    right = str(prompt.entry["answer"])
    solved = right in answers(tokenizer, group)
    repairs = Repairs(judge, tokenizer, 60, config.rollout.max_response_tokens)
    repairs_made = [] if solved else await repairs.of(prompt, group[: Scope().repairs])
    extra = []
    for prefix in repairs_made:
        extra.append(
            Sample(10**6 + size * number + prefix.index, number, size + prefix.index, prompt.ids, seed=7)
        )
        fork(group[prefix.index], prefix.at, extra[-1], inserted=prefix.ids)
    await asyncio.gather(*(generate_turn(s) for s in extra))
    won = [right in answers(tokenizer, [s]) for s in extra]
    return {
        "without_success": float(not solved),
        "without_success_repaired": float(not solved and not any(won)),
        "repairs": len(extra),
        "repairs_that_won": sum(won),
        "tokens": sum(s.received_tokens for s in group),
        "repair_tokens": sum(s.received_tokens for s in extra),
    }


async def distinct(
    config: Config, tokenizer: Tokenizer, router: Router, number: int, prompt: Prompt, size: int
) -> dict[str, float]:
    generate_turn = sampling_turns(config, router)
    generate = build_generator(config, tokenizer, generate_turn)
    assert isinstance(generate, TreeGenerator)
    group = group_of(2 * number, prompt, size)
    generate.attach(group, top_logprob_turns(config, router))
    await asyncio.gather(*(generate(s, prompt) for s in group.samples))
    tree_tokens = sum(s.received_tokens for s in group.samples)

    plain = group_of(2 * number + 1, prompt, 16 * size)
    sampled: list[Sample] = []
    while sum(s.tokens for s in sampled) < tree_tokens or len(sampled) < size:
        batch = plain.samples[len(sampled) : len(sampled) + size]
        await asyncio.gather(*(generate_turn(s) for s in batch))
        sampled += batch
    within, tokens = [], 0
    for s in sampled:
        tokens += s.tokens
        if tokens <= tree_tokens:
            within.append(s)
    return {
        "tokens": tree_tokens,
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
    parser.add_argument("--part", choices=("latr", "scope"), default="latr")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
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
