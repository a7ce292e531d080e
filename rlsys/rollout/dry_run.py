"""Dry run of the rollout process before anything starts, for `rlsys explain`, `train` and `submit`.

    prompt source -> first prompt -> chat template and tokenizer -> generator -> reward -> group reward -> planners

All components are those of the run. Constants replace the responses of engines and other servers: a turn of the
model, a judge's verdict, the scores of a prompt. The dry run writes nothing and contacts no server.
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
"""The model's response in a dry run."""
VERDICT = r"\boxed{-1}"
"""A judge's response in a dry run."""
GENERATOR_SECONDS = 90.0
"""Time limit for a generator to end a response. The dry run's model answers each turn at once."""
TRAINING_PROMPTS = 64
"""Number of first training prompts that are checked."""
LONGEST_PROMPTS = 32
"""Number of longest training prompts that are checked, too."""
LISTED_ROWS = 3
"""Largest number of rows that a line lists; it only counts the others."""
CHECKED_ROWS = 2000
"""Largest number of rows of a table that are all checked before the run, not during its first steps."""
TRIAL_PROMPTS = 3
"""Number of prompts that get a response and a reward."""
PLANNER_ROUNDS = 64
"""Number of rounds within which the planners must accept or drop a group."""


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
        UserError: a component would stop the run at its first prompt; the message is one line and names the field.
    """
    inputs = build_inputs(config)
    if inputs is None:
        return DryRunResult(None)
    with exceptions_unlogged():
        return asyncio.run(_run(config, *inputs))


def build_inputs(config: Config) -> tuple[Tokenizer, PromptSource] | None:
    """Create the tokenizer and the prompt source; None if the model folder has no tokenizer.

    Raises:
        UserError: the source is invalid, or has fewer held-out prompts than the config needs.
    """
    if not vocabulary_files(config.model.path):
        _build_without_tokenizer(config)
        return None
    tokenizer = Tokenizer.of(config)
    with one_line_errors(f"data.source = {config.data.source!r}"):
        source = build_source(config, tokenizer)
        check_teachers(config, source)
        draw_heldout(source, config.eval.prompts)  # raises an error if there are too few
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
    """Return the result of the first prompt that succeeds, and one line for each prompt that failed before it.

    Raises:
        UserError: all prompts failed; the error is that of the first prompt.
    """
    errors: list[UserError] = []
    for prompt in prompts:
        try:
            result = await attempt(prompt)
        except UserError as e:
            errors.append(e)
        else:
            return result, [f"{prompt_name(p)}: {e}" for p, e in zip(prompts, errors, strict=False)]
    raise errors[0]


def _check_prompts(config: Config, tokenizer: Tokenizer, source: PromptSource) -> list[str]:
    """Check the training and held-out prompts.

    Returns:
        Remarks for the user, one line each: prompts too long for the teacher, counts of rows, missing held-out rows,
        unusable prompts, and characters without a token.

    Raises:
        UserError: the source is invalid, or all checked training prompts or all held-out prompts are unusable.
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
    if None in counts:
        rows = sum(len(table.rows) for table in tables)
        lines.append(
            f"{rows:,} rows: all are checked during the first steps (rollout.log, rows_* of metrics.jsonl)"
        )
    bad_training = _unusable(config, "training prompts", [*train, *longest], limits)
    bad_heldout = _unusable(config, "held-out prompts", heldout, limits)
    all_rows_checked = bool(counts) and None not in counts
    if bad_training and not all_rows_checked:
        lines.append(
            f"{len(bad_training)} training prompts of the first {TRAINING_PROMPTS} and the longest "
            f"{LONGEST_PROMPTS} cannot be used, and their samples will be censored: {_summarize(bad_training)}"
        )
    if bad_heldout and not all_rows_checked:
        lines.append(
            f"{len(bad_heldout)} held-out prompts cannot be used, and evaluations leave them out: "
            f"{_summarize(bad_heldout)}"
        )
    return [*lines, *_unreadable_characters(tokenizer, [*train, *heldout])]


def _unusable(config: Config, kind: str, prompts: Sequence[Prompt], limits: Limits) -> list[str]:
    """Return the reasons why prompts are unusable, one for each different prompt.

    Args:
        kind: name of the prompts in the error.

    Raises:
        UserError: all prompts are unusable.
    """
    reasons = {prompt_name(p): reason for p in prompts if (reason := unusable_reason(p, limits)) is not None}
    if prompts and all(prompt_name(p) in reasons for p in prompts):
        raise UserError(
            f"data.source = {config.data.source!r}: none of {len(reasons)} {kind} can be used; "
            f"{_summarize([*reasons.values()])}"
        )
    return [*reasons.values()]


def _check_teacher_context(config: Config, limits: Limits, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if a sample may be too long for the context of the teacher's engine."""
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
    """Return why no engine accepts the prompt, with the prompt's name; None: the prompt is usable."""
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

    Raises:
        UserError: no prompt is usable, or the reward fails for all trial prompts.
    """
    set_config, limits = eval_set_config(config, eval_set), prompt_limits(config)
    with one_line_errors(f"eval.sets {eval_set.name}"):
        prompts = heldout_prompts(set_config, eval_set, tokenizer)
    bad = {p.index: reason for p in prompts if (reason := unusable_reason(p, limits)) is not None}
    try:
        if len(bad) == len(prompts):
            raise UserError(f"none of {len(bad)} prompts can be used; {_summarize([*bad.values()])}")
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
        the prompts of these groups, without those before the first one to which the generator responds.

    Raises:
        UserError: a component fails, or cannot restore its own state.
    """

    async def prompt_scores(ids: list[int]) -> tuple[list[float], list[bool]]:
        return [float(i) for i in range(len(ids))], [i in tokenizer.special_ids for i in ids]

    judge = _build_judge(config)
    planning = Planning(config, source, tokenizer, judge, prompt_scores)
    prompts = first_prompts(config, planning)
    response, failures = await _first_success(
        [*prompts.values()], lambda prompt: _respond(config, tokenizer, prompt)
    )
    for (group_id, prompt), rewards in zip(prompts.items(), ((1.0, 0.0), (1.0,), (0.0,)), strict=True):
        await _conclude(planning, prompt, response, rewards, group_id)
    with one_line_errors("algo: the state of prompt, planners or group_reward"):
        try:
            Planning(config, source, tokenizer, judge, prompt_scores).restore(planning.state())
        except RunError as e:
            raise UserError(str(e)) from None
    return [*prompts.values()][len(failures) :]


def _build_judge(config: Config) -> JudgeWithTimeout | None:
    """Create the run's judge with VERDICT as the response of its model or server."""

    async def verdict(question: str) -> str:
        return VERDICT

    with one_line_errors(f"data.judge = {config.data.judge!r}"):
        if config.data.judge is not None and "://" in config.data.judge:
            return JudgeWithTimeout(verdict, config.data.judge_timeout)
        return build_judge(config, verdict)


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
                f"{field}: prompt {group_id} is a {type(prompt).__name__}; expected a rlsys.core.types.Prompt"
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
        remaining = limit_tokens(config.rollout.max_response_tokens, max_tokens) - sample.tokens
        ids = response_ids[: max(remaining, 0)]
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
                f"{field}: no response within {GENERATOR_SECONDS:g} s; expected one earlier, because the dry run's "
                "model answers each turn at once"
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
    """Score RESPONSE to the prompt.

    Returns:
        the names of the reward's parts, empty for a plain number; None if the reward is a service, which is not
            contacted.

    Raises:
        UserError: the response gets no reward.
    """
    if any(is_url(spec.name) for spec in config.data.reward):
        return None
    turn_rewards = any(spec.name == "agent" for spec in config.data.reward)
    if turn_rewards or config.rollout.generator in ("environment", "replayed"):
        prompt = replace(prompt, entry={**prompt.entry, TURNS: [0.0]})
    response = Sample(0, 0, 0, list(prompt.ids), seed=0, status=Status.FINISHED)
    response.response_ids.extend([*tokenizer.encode(RESPONSE), tokenizer.turn_end_id])
    verdict = await scorer.score(prompt, response)
    if verdict.reward is None:
        raise UserError(
            f"data.reward = {config.data.reward_name!r}: no reward for the response {RESPONSE} to "
            f"{prompt_name(prompt)}: {verdict.reason}"
        )
    return tuple(verdict.parts or ())


async def _conclude(
    planning: Planning, prompt: Prompt, response: Sample, rewards: Sequence[float], group_id: int
) -> None:
    """Run a group until the planners accept or drop it.

    Args:
        response: every sample gets its tokens.
        rewards: sample i gets rewards[i % len(rewards)].

    Raises:
        UserError: the group gets no rewards, or the planners fail or do not decide.
    """
    group = SampleGroup(group_id, prompt.index, [])
    _grow(group, prompt.ids, response, rewards, planning.size)
    for _ in range(PLANNER_ROUNDS):
        with one_line_errors("algo.group_reward"):
            if reason := await planning.reward(prompt, group):
                raise UserError(f"algo.group_reward: the dry run's group gets no rewards: {reason}")
        with one_line_errors("algo.planners"):
            await planning.score_prompt(group)
            decision = planning.decide(group)
        if not isinstance(decision, AddSamples):
            break
        _grow(group, list(decision.prompt_ids or prompt.ids), response, rewards, decision.samples)
        if len(group.samples) > planning.largest:
            raise UserError(
                f"algo.planners: a group grew to {len(group.samples)} samples; expected at most the planners' own "
                f"limit of {planning.largest}"
            )
    else:
        raise UserError(
            f"algo.planners: {PLANNER_ROUNDS} rounds without a decision on a group; expected that the planners "
            "accept or drop it"
        )
    with one_line_errors("algo.prompt"):
        planning.close(group, rewarded=isinstance(decision, Accept))


def _grow(group: SampleGroup, ids: list[int], response: Sample, rewards: Sequence[float], count: int) -> None:
    """Add `count` samples with the prompt `ids` and the tokens of `response` to the group."""
    for index in range(len(group.samples), len(group.samples) + count):
        sample = Sample(index, group.group_id, index, ids, seed=index, status=Status.FINISHED, answer="0")
        sample.response_ids = response.response_ids[:]
        sample.mu = response.mu[:]
        sample.spans = list(response.spans)
        sample.reward = rewards[index % len(rewards)]
        group.samples.append(sample)
