"""Dry run of the rollout process before anything starts, for `rlsys explain`, `train` and `submit`.

    prompt source -> first prompt -> chat template and tokenizer -> generator -> reward -> group reward -> planners

All components are those of the run. Responses of engines and other servers are replaced by constants: a turn
of the model, a judge's verdict, the scores of a prompt. The dry run writes nothing and contacts no server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from rlsys.algo.planners import Accept, AddSamples
from rlsys.config import Config
from rlsys.config.data import EvalSet
from rlsys.config.plugins import one_line_errors
from rlsys.config.sidecar_servers import teacher_config
from rlsys.core.errors import RunError, UserError
from rlsys.core.model_folder import vocabulary_files
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, SampleGroup, Segment, Status, TokenSequence
from rlsys.data import PromptSource, Tokenizer, build_source
from rlsys.data.mixture import check_teachers, row_sources
from rlsys.data.row_check import row_counts
from rlsys.data.row_source import RowSource
from rlsys.data.source import draw_heldout
from rlsys.engine_requests import Limits, RefusedPrompt
from rlsys.evaluation.eval_sets import eval_set_config, heldout_prompts
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.censoring import exceptions_unlogged, prompt_name, train_prompt
from rlsys.generators.environment import EnvironmentGenerator
from rlsys.generators.functions import FunctionTurns
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import ToolFailed
from rlsys.generators.turns import limit_tokens
from rlsys.planning.planning import Planning
from rlsys.rewards import Rewards
from rlsys.rewards.judges import JudgeWithTimeout, build_judge
from rlsys.rewards.results import TURNS
from rlsys.rewards.service import is_url
from rlsys.worker.assembly import build_scorer, prompt_limits
from rlsys.worker.scoring import Scorer

RESPONSE = "<answer>0</answer>"
"""Response that stands in for the model's."""
VERDICT = r"\boxed{-1}"
"""Response that stands in for a judge's."""
GENERATOR_SECONDS = 90.0
"""Time limit for a generator to end a response. The dry run's model answers each turn at once."""
TRAINING_PROMPTS = 64
"""Training prompts to read."""
LONGEST_PROMPTS = 32
"""Training prompts with the longest texts, checked against the engines' limits."""
LISTED_ROWS = 3
"""Rows that one line names; it gives the number of the others."""
CHECKED_ROWS = 2000
"""Largest table of which all rows are checked before a run; larger ones are checked during its first steps."""
TRIAL_PROMPTS = 3
"""Prompts that get a response and a reward."""
PLANNER_ROUNDS = 64
"""Rounds within which the planners must accept or drop a group."""


@dataclass(frozen=True)
class DryRunResult:
    """Result of a dry run."""

    rewards: tuple[str, ...] | None
    """Names of the reward's parts; empty for a plain number; None: unknown."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""


T = TypeVar("T")


class TokenizerMissing(UserError):
    """Raised when a component needs the tokenizer of a folder without one."""


class _NoTokenizer:
    """Placeholder for a tokenizer; any use raises TokenizerMissing."""

    def __getattr__(self, name: str) -> object:
        raise TokenizerMissing(f"the model folder has no tokenizer, but Tokenizer.{name} is needed")


def dry_run(config: Config) -> DryRunResult:
    """Run every component once.

    Raises:
        UserError: one line with the field that would stop the run at its first prompt.
    """
    inputs = build_inputs(config)
    if inputs is None:
        return DryRunResult(None)
    with exceptions_unlogged():
        return asyncio.run(_run(config, *inputs))


def build_inputs(config: Config) -> tuple[Tokenizer, PromptSource] | None:
    """Create tokenizer and prompt source with enough held-out prompts; None if the folder has no tokenizer."""
    if not vocabulary_files(config.model.path):
        _build_without_tokenizer(config)
        return None
    tokenizer = Tokenizer.of(config)
    with one_line_errors(f"data.source = {config.data.source!r}"):
        source = build_source(config, tokenizer)
        check_teachers(config, source)
        draw_heldout(source, config.eval.prompts)  # too few of them would end the run
    return tokenizer, source


def _build_without_tokenizer(config: Config) -> None:
    """Check the parameters of the prompt source as far as possible without a tokenizer."""
    with one_line_errors(f"data.source = {config.data.source!r}"):
        try:
            build_source(config, cast(Tokenizer, _NoTokenizer()))
        except TokenizerMissing:
            return  # the source needs a tokenizer in its constructor: its parameters cannot be checked


async def _run(config: Config, tokenizer: Tokenizer, source: PromptSource) -> DryRunResult:
    prompts = await conclude_groups(config, tokenizer, source)
    rewards = Rewards(config)
    try:
        scorer = build_scorer(config, rewards, tokenizer)
        reward_parts, notes = await _first_success(
            prompts, lambda prompt: _score(config, scorer, prompt, tokenizer)
        )
    finally:
        await rewards.close()
    for eval_set in config.eval.sets:
        notes += await _check_eval_set(config, eval_set, tokenizer)
    notes += _check_prompts(config, tokenizer, source)
    return DryRunResult(reward_parts, tuple(dict.fromkeys(notes)))


async def _first_success(
    prompts: Sequence[Prompt], attempt: Callable[[Prompt], Awaitable[T]]
) -> tuple[T, list[str]]:
    """Return the first successful result, and one line for each prompt that failed before it.

    Raises:
        UserError: all prompts failed; the error is that of the first prompt.
    """
    errors: list[UserError] = []
    for prompt in prompts:
        try:
            return await attempt(prompt), [
                f"{prompt_name(p)}: {e}" for p, e in zip(prompts, errors, strict=False)
            ]
        except UserError as e:
            errors.append(e)
    raise errors[0]


def _check_prompts(config: Config, tokenizer: Tokenizer, source: PromptSource) -> list[str]:
    """Return lines about unusable prompts, and about characters that the model cannot read.

    Raises:
        UserError: no prompt of a kind is usable.
    """
    limits = prompt_limits(config)
    with one_line_errors(f"data.source = {config.data.source!r}"):
        train = [train_prompt(source, i) for i in range(TRAINING_PROMPTS)]
        heldout = draw_heldout(source, config.eval.prompts)
        tables = row_sources(source)
        longest = source.longest(LONGEST_PROMPTS) if isinstance(source, RowSource) else []
        counts = [row_counts(table, limits, max_rows=CHECKED_ROWS) for table in tables]
    lines = list(_check_teacher_context(config, limits, [*train, *longest]))
    lines += [line for table_counts in counts if table_counts is not None for line in table_counts.lines()]
    if any(table.held_is_trained for table in tables):
        lines.append("too few different prompts to hold any out: evaluations use the training prompts")
    all_checked = bool(counts) and None not in counts
    if None in counts:
        rows = sum(len(table.rows) for table in tables)
        lines.append(
            f"{rows:,} rows: all are checked during the first steps (rollout.log, rows_* of metrics.jsonl)"
        )
    for kind, prompts, consequence in (
        ("training prompts", [*train, *longest], "their samples will be censored"),
        ("held-out prompts", heldout, "evaluations leave them out"),
    ):
        bad = {prompt_name(p): reason for p in prompts if (reason := unusable_reason(p, limits)) is not None}
        if prompts and all(prompt_name(p) in bad for p in prompts):
            raise UserError(
                f"data.source = {config.data.source!r}: none of {len(bad)} {kind} can be used; "
                f"{_summarize([*bad.values()])}"
            )
        unreported = [] if all_checked else [*bad.values()]
        if unreported:
            scope = (
                ""
                if kind != "training prompts"
                else f" of the first {TRAINING_PROMPTS} and the longest {LONGEST_PROMPTS}"
            )
            lines.append(
                f"{len(unreported)} {kind}{scope} cannot be used, and {consequence}: {_summarize(unreported)}"
            )
    return [*lines, *_unreadable_characters(tokenizer, [*train, *heldout])]


def _check_teacher_context(config: Config, limits: Limits, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if the context of the teacher's engine is shorter than the longest possible sample."""
    if config.algo.teacher is None or config.algo.teacher.engine is None:
        return
    teacher_limits = prompt_limits(teacher_config(config))
    fitting = [len(p.ids) for p in prompts if limits.fits(p.ids)]
    longest = min(max(fitting, default=0) + config.rollout.max_response_tokens, limits.max_tokens)
    if longest >= teacher_limits.max_tokens:
        yield (
            f"algo.teacher: the context of its engine is {teacher_limits.context_length} tokens, but a prompt with "
            f"its response may have {longest}; samples of {teacher_limits.max_tokens} tokens or more will be censored"
        )


def unusable_reason(prompt: Prompt, limits: Limits) -> str | None:
    """Return the reason, with the prompt's location, if no engine accepts the prompt; None: it is usable."""
    if prompt.refusal:
        return prompt.refusal
    try:
        limits.check_prompt(prompt.ids)
    except RefusedPrompt as e:
        return f"{prompt_name(prompt)}: {e}"
    return None


def _summarize(lines: Sequence[str]) -> str:
    """Join the first LISTED_ROWS lines, and count the others."""
    remaining = len(lines) - LISTED_ROWS
    return "; ".join(lines[:LISTED_ROWS]) + (f"; and {remaining} more" if remaining > 0 else "")


def _unreadable_characters(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning about characters of the prompts for which the tokenizer has no token."""
    unread = tokenizer.unread("".join(p.text for p in prompts))
    if unread:
        prompt = next(p for p in prompts if unread[0] in p.text)
        yield (
            f"the model's tokenizer has no token for {' '.join(unread[:20])}, so it cannot read these in prompts; "
            f"the first is in {prompt.location or 'the prompt ' + repr(prompt.text[:60])}"
        )


async def _check_eval_set(config: Config, eval_set: EvalSet, tokenizer: Tokenizer) -> list[str]:
    """Check that the set has usable prompts, and that its reward accepts a response.

    Returns:
        remarks for the user, one line each.
    """
    set_config, limits = eval_set_config(config, eval_set), prompt_limits(config)
    with one_line_errors(f"eval.sets {eval_set.name}"):
        prompts = heldout_prompts(set_config, eval_set, tokenizer)
    bad = {p.index: reason for p in prompts if (reason := unusable_reason(p, limits)) is not None}
    try:
        if len(bad) == len(prompts):
            raise UserError(f"none of its prompts can be used; {_summarize([*bad.values()])}")
        rewards = Rewards(set_config)
        try:
            scorer = build_scorer(set_config, rewards, tokenizer)
            usable = [p for p in prompts if p.index not in bad]
            _, notes = await _first_success(
                usable[:TRIAL_PROMPTS], lambda prompt: _score(set_config, scorer, prompt, tokenizer)
            )
        finally:
            await rewards.close()
        if bad:
            notes.append(
                f"{len(bad)} prompts cannot be used, and evaluations leave them out: {_summarize([*bad.values()])}"
            )
        return [f"eval.sets {eval_set.name}: {note}" for note in notes]
    except UserError as e:
        raise UserError(f"eval.sets {eval_set.name}: {e}") from None


async def conclude_groups(config: Config, tokenizer: Tokenizer, source: PromptSource) -> list[Prompt]:
    """Run three groups from the prompt to the planners' decision: with mixed rewards, all 1, and all 0.

    Returns:
        their prompts, beginning with the first prompt to which the generator generated a response.
    """

    async def verdict(question: str) -> str:
        return VERDICT

    async def prompt_scores(ids: list[int]) -> tuple[list[float], list[bool]]:
        return [float(i) for i in range(len(ids))], [i in tokenizer.special_ids for i in ids]

    with one_line_errors(f"data.judge = {config.data.judge!r}"):
        is_local = config.data.judge is None or "://" not in config.data.judge
        judge = (
            build_judge(config, verdict) if is_local else JudgeWithTimeout(verdict, config.data.judge_timeout)
        )
    planning = Planning(config, source, tokenizer, judge, prompt_scores)
    prompts = first_prompts(config, planning)
    answer, notes = await _first_success(
        [*prompts.values()], lambda prompt: _respond(config, tokenizer, prompt)
    )
    for (group_id, prompt), rewards in zip(prompts.items(), ((1.0, 0.0), (1.0,), (0.0,)), strict=True):
        await _conclude(planning, prompt, answer, rewards, group_id)
    with one_line_errors("algo: the state of prompt, planners or group_reward"):
        try:
            Planning(config, source, tokenizer, judge, prompt_scores).restore(planning.state())
        except RunError as e:
            raise UserError(str(e)) from None
    return [*prompts.values()][len(notes) :]


def first_prompts(config: Config, planning: Planning) -> dict[int, Prompt]:
    """Return the first TRIAL_PROMPTS usable prompts of a run, by group id.

    Raises:
        UserError: too few of the first TRAINING_PROMPTS prompts are usable.
    """
    field, limits = f"data.source = {config.data.source!r}", prompt_limits(config)
    prompts: dict[int, Prompt] = {}
    reason = ""
    for group_id in range(TRAINING_PROMPTS):
        with one_line_errors(field):
            prompt = planning.prompt(group_id)
        if not isinstance(prompt, Prompt):
            raise UserError(
                f"{field}: prompt {group_id} is a {type(prompt).__name__}, expected rlsys.core.types.Prompt"
            )
        unusable = unusable_reason(prompt, limits)
        if unusable is None:
            prompts[group_id] = prompt
            if len(prompts) == TRIAL_PROMPTS:
                return prompts
        else:
            reason = reason or (unusable if prompt.refusal else f"no engine accepts {unusable}")
    if not prompts:
        raise UserError(f"{field}: {reason}")
    raise UserError(
        f"{field}: {len(prompts)} of the first {TRAINING_PROMPTS} prompts are usable; expected at least "
        f"{TRIAL_PROMPTS}; first unusable prompt: {reason}"
    )


async def _respond(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> Sample:
    """Generate one response with the run's generator and a model that says RESPONSE at each turn."""
    response_ids = [*tokenizer.encode(RESPONSE), tokenizer.turn_end_id]

    async def generate_turn(
        sample: TokenSequence, *, max_tokens: int | None = None, stop_texts: Sequence[str] = ()
    ) -> None:
        room = limit_tokens(config.rollout.max_response_tokens, max_tokens) - sample.tokens
        ids = response_ids[: max(room, 0)]
        sample.append(Segment(ids, [-0.5] * len(ids), [VersionSpan(0, 0, len(ids))]))
        sample.status = Status.FINISHED if ids == response_ids else Status.TRUNCATED

    field = f"rollout.generator = {config.rollout.generator!r}"
    sample = Sample(0, 0, 0, list(prompt.ids), seed=0)
    with one_line_errors(field):
        generate = build_generator(config, tokenizer, generate_turn)
        try:
            async with asyncio.timeout(GENERATOR_SECONDS):
                if isinstance(generate, AgentGenerator) and generate.remote:
                    await generate_turn(sample)  # no server is asked
                else:
                    await generate(sample, prompt)
        except TimeoutError:
            raise UserError(
                f"{field}: it did not end a response within {GENERATOR_SECONDS:g} s, although the dry run's model "
                "answers each turn at once"
            ) from None
        except ToolFailed as e:
            raise UserError(f"{field}: {e}") from None
        finally:
            if isinstance(generate, AgentGenerator | EnvironmentGenerator | FunctionTurns):
                await generate.close()
    if not sample.status.terminal:
        raise UserError(
            f"{field}: the status of its first response is {sample.status}; expected finished, truncated or "
            "censored"
        )
    return sample


async def _score(
    config: Config, scorer: Scorer, prompt: Prompt, tokenizer: Tokenizer
) -> tuple[str, ...] | None:
    """Return the names of the reward's parts; None if the reward is a service, which is not contacted."""
    if any(is_url(spec.name) for spec in config.data.reward):
        return None
    turn_rewards = any(spec.name == "agent" for spec in config.data.reward)
    if turn_rewards or config.rollout.generator in ("environment", "replayed"):
        prompt = replace(prompt, entry={**prompt.entry, TURNS: [0.0]})
    answer = Sample(0, 0, 0, list(prompt.ids), seed=0, status=Status.FINISHED)
    answer.response_ids.extend([*tokenizer.encode(RESPONSE), tokenizer.turn_end_id])
    verdict = await scorer.score(prompt, answer)
    if verdict.reward is None:
        raise UserError(
            f"data.reward = {config.data.reward_name!r}: no reward for the response {RESPONSE} to the first "
            f"prompt: {verdict.reason}"
        )
    return tuple(verdict.parts or ())


async def _conclude(
    planning: Planning, prompt: Prompt, answer: Sample, rewards: Sequence[float], group_id: int
) -> None:
    """Run a group until the planners accept or drop it. Its samples get `rewards` in turn."""
    group = SampleGroup(group_id, prompt.index, [])
    _grow(group, prompt.ids, answer, rewards, planning.size)
    for _ in range(PLANNER_ROUNDS):
        with one_line_errors("algo.group_reward"):
            if reason := await planning.reward(prompt, group):
                raise UserError(f"algo.group_reward: the dry run's group gets no rewards: {reason}")
        with one_line_errors("algo.planners"):
            await planning.score_prompt(group)
            decision = planning.decide(group)
        if not isinstance(decision, AddSamples):
            break
        _grow(group, list(decision.prompt_ids or prompt.ids), answer, rewards, decision.samples)
        if len(group.samples) > planning.largest:
            raise UserError(
                f"algo.planners: a group grew to {len(group.samples)} samples; expected at most the planners' own "
                f"limit of {planning.largest}"
            )
    else:
        raise UserError(f"algo.planners: a group was neither accepted nor dropped in {PLANNER_ROUNDS} rounds")
    with one_line_errors("algo.prompt"):
        planning.close(group, rewarded=isinstance(decision, Accept))


def _grow(group: SampleGroup, ids: list[int], answer: Sample, rewards: Sequence[float], count: int) -> None:
    """Add `count` samples with the tokens of `answer` to the group."""
    for index in range(len(group.samples), len(group.samples) + count):
        sample = Sample(index, group.group_id, index, ids, seed=index, status=Status.FINISHED, answer="0")
        sample.response_ids, sample.mu = answer.response_ids[:], answer.mu[:]
        sample.spans, sample.reward = list(answer.spans), rewards[index % len(rewards)]
        group.samples.append(sample)
