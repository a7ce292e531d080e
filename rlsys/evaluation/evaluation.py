"""Evaluation: greedy responses to the held-out prompts. A response with the full reward is right.

`respond` has engines that nobody trains answer prompts, and scores the answers.

Within a run the manager does it. On its own, for `rlsys eval`:

    python -m rlsys.evaluation.evaluation --config EVALUATION/config.yaml --engine URL ...

asks engines that serve `model.path`, and writes one line to metrics.jsonl of its folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rlsys.config import Config, load_config
from rlsys.core.errors import RunError
from rlsys.core.identity import Identity, engine_identity
from rlsys.core.owner import of_process
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer, build_source
from rlsys.data.source import PromptSource
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import Limits, make_session
from rlsys.evaluation.eval_sets import AskedSet, one_version
from rlsys.evaluation.results import EvalResult
from rlsys.generators.censoring import named
from rlsys.generators.generator import Generator, build_generator
from rlsys.generators.generator import respond as respond_to
from rlsys.generators.turns import Speak, greedy_turns
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.rewards import Rewards
from rlsys.router.engines import Engines
from rlsys.router.router import EVALUATION, Router
from rlsys.worker.assembly import build_router, build_scorer
from rlsys.worker.scoring import Scorer, Verdict

PROBE_SECONDS = 0.5

log = logging.getLogger("rlsys.rollout")

Probe = tuple[Sample, Prompt]


def probes(source: PromptSource, count: int) -> list[Probe]:
    """The held-out prompts, each with a sample outside the ledger."""
    return [(Sample(EVALUATION, EVALUATION, 0, p.ids, seed=0), p) for p in source.heldout(count)]


async def answers(answer: Generator, asked: Sequence[Probe]) -> list[str | None]:
    """Make the responses, all at once. Why one is left out, in their order; None: there it is."""
    made = await asyncio.gather(*(respond_to(answer, s, p, named(p)) for s, p in asked))
    for (_, prompt), censored in zip(asked, made, strict=True):
        if censored is not None:
            log.warning("evaluation: held-out prompt %d is left out: %s", prompt.index, censored.reason)
    return [None if censored is None else censored.reason for censored in made]


async def answer_all(asked: list[Probe], answer: Generator) -> list[Probe]:
    """Those that have their answers. A prompt that has none, whatever went wrong with it alone, is left out. Raises
    RunError when all are."""
    reasons = await answers(answer, asked)
    if all(reasons):
        raise RunError(f"evaluation: no prompt could be answered; the first one: {reasons[0]}")
    return [probe for probe, reason in zip(asked, reasons, strict=True) if reason is None]


async def score_all(answered: list[Probe], scorer: Scorer) -> list[Verdict]:
    """In their order."""
    return await asyncio.gather(*(scorer.verdict(p, s, named(p)) for s, p in answered))


def judge(answered: list[Probe], verdicts: list[Verdict], asked: int) -> EvalResult:
    """Of so many prompts that were asked. What has no answer, or cannot be judged, is not among `prompts`. Raises
    RunError when nothing can."""
    judged = [v for v in verdicts if v.reward is not None]
    if not judged:
        raise RunError(f"evaluation: no response could be judged: {verdicts[0].reason}")
    return EvalResult(
        accuracy=sum(v.right for v in judged) / len(judged),
        prompts=len(judged),
        mean_length=sum(s.sampled_tokens for s, _ in answered) / len(answered),
        truncated=sum(s.status is Status.TRUNCATED for s, _ in answered),
        weight_version=one_version([s for s, _ in answered]),
        same_answer=commonest([v.answer for v in judged]),
        constant=commonest([right_answer(p) for _, p in answered]),
        left_out=asked - len(judged),
    )


def commonest(answers: Sequence[str | None]) -> float | None:
    """The share of the answer that stands most often in `answers`; None when less than half of them are known."""
    known = Counter(a for a in answers if a is not None)
    return max(known.values()) / len(answers) if 2 * known.total() >= len(answers) else None


def right_answer(prompt: Prompt) -> str | None:
    """As the data has it, written as final answers are when they are compared; None for what is no text or number."""
    found = prompt.entry.get("answer")
    return " ".join(str(found).casefold().split()) if isinstance(found, str | int | float) else None


@asynccontextmanager
async def open_engines(config: Config, whose: Mapping[str, Identity]) -> AsyncIterator[list[EngineClient]]:
    """Clients of these engines, by URL, once all of them answer."""
    async with make_session() as session:
        tp, limits = config.engine.tp, Limits(config.answer_seconds, config.work_seconds)
        engines = [EngineClient(url, session, tp=tp, identity=of, limits=limits) for url, of in whose.items()]
        while not all(await asyncio.gather(*(e.healthy() for e in engines))):
            await asyncio.sleep(PROBE_SECONDS)
        yield engines


async def respond(
    config: Config,
    tokenizer: Tokenizer,
    whose: Mapping[str, Identity],
    asked: list[Probe],
    turns: Callable[[Config, Router], Speak],
) -> list[Verdict]:
    """What the responses are worth that engines give to `asked`, in its order; its samples hold them then.

    `whose`: engines that serve the model already, by URL; waits until all of them answer. `turns`: sampled or greedy
    ones.
    """
    rewards = Rewards(config)
    try:
        async with open_engines(config, whose) as engines:
            router = build_router(config, engines, tokenizer, skip_attestation=True)
            watch = asyncio.ensure_future(router.watch())
            router.resume()
            answer = build_generator(config, tokenizer, turns(config, router))
            reasons = await answers(answer, asked)
            watch.cancel()
        answered = [probe for probe, reason in zip(asked, reasons, strict=True) if reason is None]
        scored = iter(await score_all(answered, build_scorer(config, rewards, tokenizer)))
        return [next(scored) if reason is None else Verdict(reason=reason) for reason in reasons]
    finally:
        await rewards.close()


async def evaluate(config: Config, whose: Mapping[str, Identity]) -> EvalResult:
    """Of the model that these engines serve, by URL: on the held-out prompts and every named set."""
    tokenizer = Tokenizer.of(config)
    asked = probes(build_source(config, tokenizer), config.eval.prompts)
    verdicts = await respond(config, tokenizer, whose, asked, greedy_turns)
    result = judge(asked, verdicts, len(asked))
    async with open_engines(config, whose) as engines:
        router = build_router(config, engines, tokenizer, skip_attestation=True)
        watch = asyncio.ensure_future(router.watch())
        router.resume()
        async with open_sets(config, tokenizer, router) as sets:
            for one in sets:
                result.sets[one.name] = await one.measure()
        watch.cancel()
    return result


@asynccontextmanager
async def open_sets(config: Config, tokenizer: Tokenizer, router: Engines) -> AsyncIterator[list[AskedSet]]:
    """The config's named sets, with processes for their rewards as long as they are open."""
    made: list[AskedSet] = []
    try:
        for chosen in config.eval.sets:
            made.append(AskedSet(config, chosen, tokenizer, router))
        yield made
    finally:
        for one in made:
            await one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluates a model on engines; started by rlsys eval.")
    parser.add_argument("--config", type=Path, required=True, help="resolved config of the evaluation")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="an SGLang server")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def run() -> None:
        config = load_config(args.config)
        owner, _ = of_process(config.run.dir)
        metrics = MetricsWriter(config.run.dir)
        whose = {url: engine_identity(owner, url) for url in args.engine}
        result = asyncio.run(evaluate(config, whose))
        metrics.write("eval", 0, **result.figures())
        metrics.close()

    run_role(run)


if __name__ == "__main__":
    main()
