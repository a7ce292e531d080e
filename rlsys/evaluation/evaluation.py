"""Evaluation with greedy responses to held-out prompts. A response with the full reward is correct.

The evaluations of a run (evaluator.py) and `rlsys try` (tryout.py) use functions of this module. `rlsys eval` starts
the module as a program, which evaluates engines that serve `model.path`:

    python -m rlsys.evaluation.evaluation --config EVALUATION/config.yaml --engine URL ...

The program writes a line to metrics.jsonl in its folder, and the responses to answers.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rlsys.config import Config, load_config
from rlsys.core.errors import RunError, disk_errors
from rlsys.core.folders import replace_file
from rlsys.core.identity import Identity, engine_identity
from rlsys.core.owner import owner_of_process
from rlsys.core.run_files import ANSWERS_FILE, PROGRESS_FILE
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer, build_source
from rlsys.data.source import PromptSource, draw_heldout
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import Limits, make_session
from rlsys.evaluation.eval_sets import EvalSetRunner, one_version
from rlsys.evaluation.results import EvalResult
from rlsys.generators.censoring import prompt_name
from rlsys.generators.generator import Generator, build_generator
from rlsys.generators.generator import respond as respond_to
from rlsys.generators.turns import GenerateTurn, greedy_turns
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.rewards import Rewards
from rlsys.router.engines import Engines
from rlsys.router.router import EVALUATION, Router
from rlsys.worker.assembly import build_router, build_scorer
from rlsys.worker.scoring import Scorer, Verdict

PROBE_SECONDS = 0.5
PROGRESS_SECONDS = 10.0

log = logging.getLogger("rlsys.rollout")

EvalItem = tuple[Sample, Prompt]
"""A sample outside the ledger, which receives the response, and its prompt."""


def eval_items(source: PromptSource, count: int | None) -> list[EvalItem]:
    """Return the held-out prompts of an evaluation, each with an empty sample.

    Args:
        count: number of prompts; None: HELDOUT_PROMPTS, or all that the source has if it has fewer.
    """
    return [(Sample(EVALUATION, EVALUATION, 0, p.ids, seed=0), p) for p in draw_heldout(source, count)]


async def generate_responses(generator: Generator, items: Sequence[EvalItem]) -> list[str | None]:
    """Generate all responses concurrently, and log the failures.

    Returns:
        for each item, None, or the reason why it has no response.
    """
    outcomes = await asyncio.gather(*(respond_to(generator, s, p, prompt_name(p)) for s, p in items))
    for (_, prompt), censored in zip(items, outcomes, strict=True):
        if censored is not None:
            log.warning("evaluation: held-out prompt %d is excluded: %s", prompt.index, censored.reason)
    return [None if censored is None else censored.reason for censored in outcomes]


async def answered_items(items: list[EvalItem], generator: Generator) -> list[EvalItem]:
    """Generate responses, and return the items with a response.

    Raises:
        RunError: no item has a response.
    """
    reasons = await generate_responses(generator, items)
    if all(reasons):
        raise RunError(f"evaluation: no prompt got a response; reason for the first prompt: {reasons[0]}")
    return [item for item, reason in zip(items, reasons, strict=True) if reason is None]


async def score_all(items: list[EvalItem], scorer: Scorer) -> list[Verdict]:
    """Score all responses concurrently, and return the verdict on each."""
    return await asyncio.gather(*(scorer.verdict(p, s, prompt_name(p)) for s, p in items))


def judge(items: list[EvalItem], verdicts: list[Verdict], prompts: int) -> EvalResult:
    """Return the metrics of an evaluation.

    Args:
        items: the items with responses.
        verdicts: the verdict on the response of each item.
        prompts: number of prompts, including those without a response.

    Raises:
        RunError: no response has a reward.
    """
    judged = [v for v in verdicts if v.reward is not None]
    if not judged:
        raise RunError(
            f"evaluation: no response got a reward; reason for the first one: {verdicts[0].reason}"
        )
    return EvalResult(
        accuracy=sum(v.right for v in judged) / len(judged),
        prompts=len(judged),
        mean_length=sum(s.sampled_tokens for s, _ in items) / len(items),
        truncated=sum(s.status is Status.TRUNCATED for s, _ in items),
        weight_version=one_version([s for s, _ in items]),
        same_answer=most_common_fraction([v.answer for v in judged]),
        constant=most_common_fraction(
            [reference_answer(p) for (_, p), v in zip(items, verdicts, strict=True) if v.reward is not None]
        ),
        reward=sum(v.reward for v in judged if v.reward is not None) / len(judged),
        left_out=prompts - len(judged),
    )


def most_common_fraction(answers: Sequence[str | None]) -> float | None:
    """Return the fraction of responses with the most common answer; None if fewer than half have a known answer."""
    counts = Counter(a for a in answers if a is not None)
    return max(counts.values()) / len(answers) if 2 * counts.total() >= len(answers) else None


def reference_answer(prompt: Prompt) -> str | None:
    """Return the reference answer of a prompt, normalised like final answers; None if it is no text or number."""
    answer = prompt.entry.get("answer")
    return " ".join(str(answer).casefold().split()) if isinstance(answer, str | int | float) else None


@asynccontextmanager
async def open_engines(
    config: Config, identities: Mapping[str, Identity]
) -> AsyncIterator[list[EngineClient]]:
    """Wait until all engines are healthy, and provide their clients for the context.

    Args:
        identities: URL of each engine -> its identity.
    """
    async with make_session() as session:
        tp, limits = config.engine.tp, Limits(config.answer_seconds, config.work_seconds)
        engines = [
            EngineClient(url, session, tp=tp, identity=identity, limits=limits)
            for url, identity in identities.items()
        ]
        while not all(await asyncio.gather(*(e.healthy() for e in engines))):
            await asyncio.sleep(PROBE_SECONDS)
        yield engines


@asynccontextmanager
async def open_router(
    config: Config, tokenizer: Tokenizer, identities: Mapping[str, Identity]
) -> AsyncIterator[Router]:
    """Wait until all engines are healthy, and provide a router of them for the context.

    Its progress is written to PROGRESS_FILE in run.dir.

    Args:
        identities: URL of each engine -> its identity.
    """
    async with open_engines(config, identities) as engines:
        router = build_router(config, engines, tokenizer, skip_attestation=True)
        tasks = [
            asyncio.ensure_future(router.watch()),
            asyncio.ensure_future(_report_progress(config, router)),
        ]
        router.resume()
        try:
            yield router
        finally:
            for task in tasks:
                task.cancel()
            _write_progress(config, router)


async def _report_progress(config: Config, router: Router) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        _write_progress(config, router)


def _write_progress(config: Config, router: Router) -> None:
    counts = router.stats()
    text = f"{counts['received_tokens']:,} tokens generated, {counts['in_flight']} responses in flight"
    with contextlib.suppress(OSError):  # the disk may be full; the evaluation continues without progress
        replace_file(config.run.dir / PROGRESS_FILE, text.encode())


async def respond(
    config: Config,
    tokenizer: Tokenizer,
    identities: Mapping[str, Identity],
    items: list[EvalItem],
    turns: Callable[[Config, Router], GenerateTurn],
) -> list[Verdict]:
    """Wait until all engines are healthy, and generate and score responses with them.

    Args:
        config: the config of the evaluation.
        tokenizer: tokenizer of the model.
        identities: URL of each engine, which serves the model -> its identity.
        items: prompts and samples; the samples receive the responses.
        turns: returns the function that generates a turn, sampled or greedy.

    Returns:
        the verdict on each item; an item without a response has a verdict with the reason.
    """
    rewards = Rewards(config)
    try:
        async with open_router(config, tokenizer, identities) as router:
            generator = build_generator(config, tokenizer, turns(config, router))
            reasons = await generate_responses(generator, items)
        scored_items = [item for item, reason in zip(items, reasons, strict=True) if reason is None]
        verdicts = iter(await score_all(scored_items, build_scorer(config, rewards, tokenizer)))
        return [next(verdicts) if reason is None else Verdict(reason=reason) for reason in reasons]
    finally:
        await rewards.close()


async def evaluate(
    config: Config, identities: Mapping[str, Identity], answers: Path | None = None
) -> EvalResult:
    """Evaluate the model that engines serve on the held-out prompts and all named sets.

    Args:
        identities: URL of each engine -> its identity.
        answers: file for the responses to the held-out prompts; None: they are not written.
    """
    tokenizer = Tokenizer.of(config)
    items = eval_items(build_source(config, tokenizer), config.eval.prompts)
    verdicts = await respond(config, tokenizer, identities, items, greedy_turns)
    if answers is not None:
        write_answers(answers, tokenizer, items, verdicts)
    result = judge(items, verdicts, len(items))
    if not config.eval.sets:
        return result
    async with (
        open_router(config, tokenizer, identities) as router,
        open_sets(config, tokenizer, router) as sets,
    ):
        for eval_set in sets:
            result.sets[eval_set.name] = await eval_set.measure()
    return result


def write_answers(path: Path, tokenizer: Tokenizer, items: list[EvalItem], verdicts: list[Verdict]) -> None:
    """Write one JSON object per prompt.

    An object has the texts of prompt and response, the reward or the reason why there is none, whether the response
    is correct, its final answer, the sample's status and number of sampled tokens, and the prompt's location.
    """
    with disk_errors(path), path.open("w", encoding="utf-8") as file:
        for (sample, prompt), verdict in zip(items, verdicts, strict=True):
            entry = {
                "prompt": tokenizer.decode(sample.prompt_ids), "response": tokenizer.decode(sample.judged_ids),
                "reward": verdict.parts or verdict.reward, "correct": verdict.right, "reason": verdict.reason,
                "answer": verdict.answer, "status": sample.status.value, "tokens": sample.sampled_tokens,
                "location": prompt.location,
            }  # fmt: skip
            file.write(json.dumps(entry) + "\n")


@asynccontextmanager
async def open_sets(
    config: Config, tokenizer: Tokenizer, router: Engines
) -> AsyncIterator[list[EvalSetRunner]]:
    """Provide the runners of eval.sets for the context, and end their reward processes after it."""
    runners: list[EvalSetRunner] = []
    try:
        for eval_set in config.eval.sets:
            runners.append(EvalSetRunner(config, eval_set, tokenizer, router))
        yield runners
    finally:
        for runner in runners:
            await runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Evaluate the model that engines serve; started by rlsys eval."
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved config file of the evaluation")
    parser.add_argument(
        "--engine", action="append", required=True, metavar="URL", help="address of an SGLang server"
    )
    parser.add_argument("--step", type=int, default=0, metavar="N", help="train step of the model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def run() -> None:
        config = load_config(args.config)
        owner, _ = owner_of_process(config.run.dir)
        metrics = MetricsWriter(config.run.dir)
        identities = {url: engine_identity(owner, url) for url in args.engine}
        result = asyncio.run(evaluate(config, identities, config.run.dir / ANSWERS_FILE))
        metrics.write("eval", args.step, **result.metrics())
        metrics.close()

    run_role(run)


if __name__ == "__main__":
    main()
