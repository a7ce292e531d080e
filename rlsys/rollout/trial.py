"""What the rollout process is made of, run once before anything starts: `rlsys explain`, `train` and `submit`.

    prompt source -> first prompt -> chat template and tokenizer -> generator -> reward -> group reward -> planners

All of it is what the run has. Made up is only what an engine or another server would say: a turn of the model, a
judge's verdict, the scores of a prompt. Nothing is written, and no server is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from rlsys.algo.planners import Accept, More
from rlsys.config import Config
from rlsys.config.beside import teacher_config
from rlsys.config.data import EvalSet
from rlsys.config.plugins import tried
from rlsys.core.errors import UserError
from rlsys.core.model_folder import vocabulary_files
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, SampleGroup, Segment, Status
from rlsys.data import PromptSource, Tokenizer, build_source
from rlsys.data.mixture import check_teachers, row_sources
from rlsys.data.row_check import row_counts
from rlsys.data.row_source import RowSource
from rlsys.engine_requests import Limits, RefusedPrompt
from rlsys.evaluation.eval_sets import eval_set_config, heldout_prompts
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.censoring import exceptions_unlogged, named, train_prompt
from rlsys.generators.environment import EnvironmentGenerator
from rlsys.generators.functions import FunctionTurns
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.turns import within
from rlsys.planning.planning import Planning
from rlsys.rewards import Rewards
from rlsys.rewards.judges import PatientJudge, build_judge
from rlsys.rewards.results import TURNS
from rlsys.rewards.service import is_url
from rlsys.worker.assembly import build_scorer, prompt_limits
from rlsys.worker.scoring import Scorer

RESPONSE = "<answer>0</answer>"
"""What the model is taken to say."""
VERDICT = r"\boxed{-1}"
"""What a judge is taken to say."""
GENERATOR_SECONDS = 90.0
"""In which a generator has to end a response whose turns cost no time."""
HELDOUT = 256
"""Held-out prompts that are drawn, at most: they cost about half a millisecond each."""
TRAINED = 64
"""Training prompts that are read."""
LONGEST = 32
"""Training prompts with the longest texts that are held against the engines' limits."""
SHOWN = 3
"""Rows that a line names; it counts the others."""
CHECKED = 2000
"""Rows of a table that are all checked before a run; those of a larger one beside its first steps."""
TRIED = 3
"""Prompts that are answered and rewarded."""
ROUNDS = 64
"""After which a planner has to have accepted or dropped a group."""


@dataclass(frozen=True)
class Tried:
    """`rewards`: names of the reward's parts, none for a plain number; None: not known."""

    rewards: tuple[str, ...] | None
    notes: tuple[str, ...] = ()
    """What is worth knowing, one line each."""


T = TypeVar("T")


class TokenizerMissing(UserError):
    """Something asked the tokenizer of a folder that has none."""


class _NoTokenizer:
    """Stands where a tokenizer would be; whoever uses it learns that there is none."""

    def __getattr__(self, name: str) -> object:
        raise TokenizerMissing(f"no tokenizer to ask for {name}")


def try_rollout(config: Config) -> Tried:
    """Raises UserError, one line that names the field, for what would stop the run at its first prompt."""
    inputs = build_inputs(config)
    if inputs is None:
        return Tried(None)
    with exceptions_unlogged():
        return asyncio.run(_try(config, *inputs))


def build_inputs(config: Config) -> tuple[Tokenizer, PromptSource] | None:
    """Tokenizer and prompt source, which has enough held-out prompts; None where the folder has no tokenizer."""
    if not vocabulary_files(config.model.path):
        _build_without_tokenizer(config)
        return None
    tokenizer = Tokenizer.of(config)
    with tried(f"data.source = {config.data.source!r}"):
        source = build_source(config, tokenizer)
        check_teachers(config, source)
        source.heldout(min(config.eval.prompts, HELDOUT))
    return tokenizer, source


def _build_without_tokenizer(config: Config) -> None:
    """What can be known of the prompt source all the same: above all, whether it takes its parameters."""
    with tried(f"data.source = {config.data.source!r}"):
        try:
            build_source(config, cast(Tokenizer, _NoTokenizer()))
        except TokenizerMissing:
            return  # it wants one at once; nothing is known


async def _try(config: Config, tokenizer: Tokenizer, source: PromptSource) -> Tried:
    prompts = await conclude_groups(config, tokenizer, source)
    rewards = Rewards(config)
    try:
        scorer = build_scorer(config, rewards, tokenizer)
        found, notes = await _first_that_works(
            prompts, lambda prompt: _score(config, scorer, prompt, tokenizer)
        )
    finally:
        await rewards.close()
    for chosen in config.eval.sets:
        notes += await _try_set(config, chosen, tokenizer)
    notes += _look_at_prompts(config, tokenizer, source)
    return Tried(found, tuple(dict.fromkeys(notes)))


async def _first_that_works(
    prompts: Sequence[Prompt], attempt: Callable[[Prompt], Awaitable[T]]
) -> tuple[T, list[str]]:
    """One bad item costs one item here, too: what the first prompt gives that can be used, and a line for each before
    it. Raises the first one's UserError when none can."""
    errors: list[UserError] = []
    for prompt in prompts:
        try:
            return await attempt(prompt), [f"{named(p)}: {e}" for p, e in zip(prompts, errors, strict=False)]
        except UserError as e:
            errors.append(e)
    raise errors[0]


def _look_at_prompts(config: Config, tokenizer: Tokenizer, source: PromptSource) -> list[str]:
    """Lines for prompts that will not be answered, and for what the model cannot read in the others. Raises UserError
    when no prompt of a kind can be used."""
    limits = prompt_limits(config)
    with tried(f"data.source = {config.data.source!r}"):
        train = [train_prompt(source, i) for i in range(TRAINED)]
        heldout = source.heldout(min(config.eval.prompts, HELDOUT))
        tables = row_sources(source)
        longest = source.longest(LONGEST) if isinstance(source, RowSource) else []
        counts = [row_counts(table, limits, most=CHECKED) for table in tables]
    lines = list(_short_teacher(config, limits, [*train, *longest]))
    lines += [line for one in counts if one is not None for line in one.lines()]
    if any(table.held_is_trained for table in tables):
        lines.append("too few different prompts to hold any out: evaluations ask the training prompts")
    whole = bool(counts) and None not in counts
    if None in counts:
        rows = sum(len(table.rows) for table in tables)
        lines.append(
            f"{rows:,} rows: all are checked beside the first steps (rollout.log, rows_* of metrics.jsonl)"
        )
    for what, prompts, fate in (
        ("training prompts", [*train, *longest], "their samples will be censored"),
        ("held-out prompts", heldout, "evaluations leave them out"),
    ):
        bad = {named(p): reason for p in prompts if (reason := why_unused(p, limits)) is not None}
        if prompts and all(named(p) in bad for p in prompts):
            raise UserError(
                f"data.source = {config.data.source!r}: none of {len(bad)} {what} can be used; "
                f"{_some([*bad.values()])}"
            )
        rest = [] if whole else [*bad.values()]
        if rest:
            more = "" if what != "training prompts" else f" of the first {TRAINED} and the longest {LONGEST}"
            lines.append(f"{len(rest)} {what}{more} cannot be used, and {fate}: {_some(rest)}")
    return [*lines, *_unread(tokenizer, [*train, *heldout])]


def _short_teacher(config: Config, limits: Limits, prompts: Sequence[Prompt]) -> Iterator[str]:
    """A line for a teacher whose engine holds less than a sample may have."""
    if config.algo.teacher is None or config.algo.teacher.engine is None:
        return
    its = prompt_limits(teacher_config(config))
    fitting = [len(p.ids) for p in prompts if limits.fits(p.ids)]
    longest = min(max(fitting, default=0) + config.rollout.max_response_tokens, limits.room)
    if longest >= its.room:
        yield (
            f"algo.teacher: its engine holds {its.context_length} tokens, and a prompt with its response may have "
            f"{longest}; samples of {its.room} and more will be censored"
        )


def why_unused(prompt: Prompt, limits: Limits) -> str | None:
    """Why no engine will get the prompt, with its place; None: engines take it."""
    if prompt.refusal:
        return prompt.refusal
    try:
        limits.check_prompt(prompt.ids)
    except RefusedPrompt as e:
        return f"{named(prompt)}: {e}"
    return None


def _some(lines: Sequence[str]) -> str:
    rest = len(lines) - SHOWN
    return "; ".join(lines[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _unread(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Iterator[str]:
    """A line for characters of the prompts that the model cannot read."""
    unread = tokenizer.unread("".join(p.text for p in prompts))
    if unread:
        among = next(p for p in prompts if unread[0] in p.text)
        yield (
            f"the model's tokenizer has no token for {' '.join(unread[:20])}, so it cannot read these in prompts; "
            f"the first is in {among.location or 'the prompt ' + repr(among.text[:60])}"
        )


async def _try_set(config: Config, chosen: EvalSet, tokenizer: Tokenizer) -> list[str]:
    """Its prompts are there, and its reward says something to a made-up answer. A line for prompts that will not be
    answered."""
    own, limits = eval_set_config(config, chosen), prompt_limits(config)
    with tried(f"eval.sets {chosen.name}"):
        prompts = heldout_prompts(
            own, chosen.model_copy(update={"prompts": min(chosen.prompts, HELDOUT)}), tokenizer
        )
    bad = {p.index: reason for p in prompts if (reason := why_unused(p, limits)) is not None}
    try:
        if len(bad) == len(prompts):
            raise UserError(f"none of its prompts can be used; {_some([*bad.values()])}")
        rewards = Rewards(own)
        try:
            scorer = build_scorer(own, rewards, tokenizer)
            usable = [p for p in prompts if p.index not in bad]
            _, notes = await _first_that_works(
                usable[:TRIED], lambda prompt: _score(own, scorer, prompt, tokenizer)
            )
        finally:
            await rewards.close()
        if bad:
            notes.append(
                f"{len(bad)} prompts cannot be used, and evaluations leave them out: {_some([*bad.values()])}"
            )
        return [f"eval.sets {chosen.name}: {note}" for note in notes]
    except UserError as e:
        raise UserError(f"eval.sets {chosen.name}: {e}") from None


async def conclude_groups(config: Config, tokenizer: Tokenizer, source: PromptSource) -> list[Prompt]:
    """Three groups from prompt to decision: one with wins and losses, one all won, one all lost. Their prompts, that
    first to which the generator has made a response."""

    async def verdict(question: str) -> str:
        return VERDICT

    async def prompt_scores(ids: list[int]) -> tuple[list[float], list[bool]]:
        return [float(i) for i in range(len(ids))], [i in tokenizer.special_ids for i in ids]

    with tried(f"data.judge = {config.data.judge!r}"):
        local = config.data.judge is None or "://" not in config.data.judge
        judge = build_judge(config, verdict) if local else PatientJudge(verdict, config.data.judge_timeout)
    planning = Planning(config, source, tokenizer, judge, prompt_scores)
    chosen = first_prompts(config, planning)
    answer, notes = await _first_that_works(
        [*chosen.values()], lambda prompt: _respond(config, tokenizer, prompt)
    )
    for (group_id, prompt), won in zip(chosen.items(), ((1.0, 0.0), (1.0,), (0.0,)), strict=True):
        await _conclude(planning, prompt, answer, won, group_id)
    with tried("algo: the state of prompt, planners or group_reward"):
        Planning(config, source, tokenizer, judge, prompt_scores).restore(planning.state())
    return [*chosen.values()][len(notes) :]


def first_prompts(config: Config, planning: Planning) -> dict[int, Prompt]:
    """By group, the first prompts of a run that engines take. Raises UserError when there are too few."""
    field, limits = f"data.source = {config.data.source!r}", prompt_limits(config)
    found: dict[int, Prompt] = {}
    reason = ""
    for group_id in range(TRAINED):
        with tried(field):
            prompt = planning.prompt(group_id)
        if not isinstance(prompt, Prompt):
            raise UserError(
                f"{field}: prompt {group_id} is a {type(prompt).__name__}, expected rlsys.core.types.Prompt"
            )
        why = why_unused(prompt, limits)
        if why is None:
            found[group_id] = prompt
            if len(found) == TRIED:
                return found
        else:
            reason = reason or (why if prompt.refusal else f"no engine takes {why}")
    if not found:
        raise UserError(f"{field}: {reason}")
    raise UserError(f"{field}: only {len(found)} of the first {TRAINED} prompts can be used; {reason}")


async def _respond(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> Sample:
    """One response by the run's generator, of a model that says RESPONSE at each turn."""
    said = [*tokenizer.encode(RESPONSE), tokenizer.turn_end_id]

    async def speak(sample: Sample, *, most: int | None = None, stop_texts: Sequence[str] = ()) -> None:
        room = within(config.rollout.max_response_tokens, most) - sample.tokens
        ids = said[: max(room, 0)]
        sample.append(Segment(ids, [-0.5] * len(ids), [VersionSpan(0, 0, len(ids))]))
        sample.status = Status.FINISHED if ids == said else Status.TRUNCATED

    field = f"rollout.generator = {config.rollout.generator!r}"
    sample = Sample(0, 0, 0, list(prompt.ids), seed=0)
    with tried(field):
        generate = build_generator(config, tokenizer, speak)
        try:
            async with asyncio.timeout(GENERATOR_SECONDS):
                if isinstance(generate, AgentGenerator) and generate.remote:
                    await speak(sample)  # no server is asked
                else:
                    await generate(sample, prompt)
        except TimeoutError:
            raise UserError(
                f"{field}: it has not ended a response within {GENERATOR_SECONDS:g} s, though each turn of the "
                "model took none"
            ) from None
        except ToolFailed as e:
            raise UserError(f"{field}: {e}") from None
        finally:
            if isinstance(generate, AgentGenerator | EnvironmentGenerator | FunctionTurns):
                await generate.close()
    if not sample.status.terminal:
        raise UserError(
            f"{field}: it left the first response {sample.status}; expected finished, truncated or censored"
        )
    return sample


async def _score(
    config: Config, scorer: Scorer, prompt: Prompt, tokenizer: Tokenizer
) -> tuple[str, ...] | None:
    """Names of the reward's parts; None: a service says them, which is not asked."""
    if any(is_url(spec.name) for spec in config.data.reward):
        return None
    own = any(spec.name == "agent" for spec in config.data.reward)
    if own or config.rollout.generator in ("environment", "replayed"):
        prompt = replace(prompt, entry={**prompt.entry, TURNS: [0.0]})
    answer = Sample(0, 0, 0, list(prompt.ids), seed=0, status=Status.FINISHED)
    answer.response_ids.extend([*tokenizer.encode(RESPONSE), tokenizer.turn_end_id])
    verdict = await scorer.score(prompt, answer)
    if verdict.reward is None:
        raise UserError(
            f"data.reward = {config.data.reward_name!r}: the response {RESPONSE} to the first prompt gets none: "
            f"{verdict.reason}"
        )
    return tuple(verdict.parts or ())


async def _conclude(
    planning: Planning, prompt: Prompt, answer: Sample, won: Sequence[float], group_id: int
) -> None:
    """A group with rewards `won` in turn, to its end."""
    group = SampleGroup(group_id, prompt.index, [])
    _grow(group, prompt.ids, answer, won, planning.size)
    for _ in range(ROUNDS):
        with tried("algo.group_reward"):
            if reason := await planning.reward(prompt, group):
                raise UserError(f"algo.group_reward: a group of made-up responses gets no rewards: {reason}")
        with tried("algo.planners"):
            await planning.score_prompt(group)
            decision = planning.decide(group)
        if not isinstance(decision, More):
            break
        _grow(group, list(decision.prompt_ids or prompt.ids), answer, won, decision.samples)
        if len(group.samples) > planning.largest:
            raise UserError(
                f"algo.planners: a group grew to {len(group.samples)} samples; its planners' limit is "
                f"{planning.largest}"
            )
    else:
        raise UserError(f"algo.planners: a group was neither accepted nor dropped in {ROUNDS} rounds")
    with tried("algo.prompt"):
        planning.close(group, rewarded=isinstance(decision, Accept))


def _grow(group: SampleGroup, ids: list[int], answer: Sample, won: Sequence[float], count: int) -> None:
    """`count` more samples with the answer's tokens."""
    for place in range(len(group.samples), len(group.samples) + count):
        sample = Sample(place, group.group_id, place, ids, seed=place, status=Status.FINISHED, answer="0")
        sample.response_ids, sample.mu = answer.response_ids[:], answer.mu[:]
        sample.spans, sample.reward = list(answer.spans), won[place % len(won)]
        group.samples.append(sample)
