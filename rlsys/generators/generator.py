"""Generators: functions that generate a response, by one turn of the model or several turns with tools in between.

    create(config, tokenizer, generate_turn, **rollout.generator_params) -> generator
    await generator(sample, prompt)     generate the response: the sample's status becomes terminal
    await generate_turn(sample)         generate a turn of the model (turns.py)
    sample.observe(ids)                 add tokens that are not trained, such as the result of a tool

A generator has no state about a sample. After a crash it is called again with the saved tokens, which may end within
a turn or between two turns, and determines from them how to continue.

Functions for slime have slime's interface (slime_generator.py). Programs that query the model over HTTP are agents
(agent.py). An environment is a separate process (environment.py).
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlsys.config import Config
from rlsys.config.plugins import call, expect_function
from rlsys.core.errors import GeneratorError, UserError
from rlsys.core.imports import resolve
from rlsys.core.types import Prompt, Sample, Status, TokenSequence, is_reward
from rlsys.data import Tokenizer
from rlsys.engine_requests import Limits, RefusedPrompt
from rlsys.generators.agent import agent
from rlsys.generators.censoring import Censored, boundary
from rlsys.generators.echo import echo
from rlsys.generators.environment import environment
from rlsys.generators.functions import functions
from rlsys.generators.latr import latr
from rlsys.generators.slime_generator import SlimeGenerator, is_slime_function
from rlsys.generators.tools import calculator
from rlsys.generators.trajectory import replayed
from rlsys.generators.turns import GenerateTurn
from rlsys.rewards.slime_names import install
from rlsys.router.turn_ends import turn_ends

Generator = Callable[[Sample, Prompt], Awaitable[None]]


def single_turn(config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn) -> Generator:
    """Create the generator of `rollout.generator: single_turn`."""

    async def generate(sample: Sample, prompt: Prompt) -> None:
        await generate_turn(sample)

    return generate


GENERATORS: dict[str, Callable[..., Generator]] = {
    "single_turn": single_turn,
    "calculator": calculator,
    "functions": functions,
    "agent": agent,
    "environment": environment,
    "replayed": replayed,
    "latr": latr,
    "echo": echo,
}


def find_generator(name: str) -> Callable[..., Any]:
    """Return the function that `rollout.generator` names, which creates a generator or has slime's interface.

    Raises:
        UserError: the function does not exist.
    """
    install()
    return resolve("rollout.generator", name, GENERATORS)


def build_generator(config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn) -> Generator:
    """Create the generator that `rollout.generator` names.

    Raises:
        UserError: the name is unknown, a parameter is invalid, or a function for slime has no tokenizer.
    """
    r = config.rollout
    factory = find_generator(r.generator)
    if is_slime_function(factory):
        if tokenizer is None:
            raise UserError(f"rollout.generator = {r.generator!r} requires a tokenizer")
        ends = turn_ends(config, tokenizer)
        return SlimeGenerator(factory, config, tokenizer, generate_turn, ends, r.generator_params)
    generator: Generator = call(
        "rollout.generator_params", factory, config, tokenizer, generate_turn, **r.generator_params
    )
    field, expected = f"rollout.generator = {r.generator!r}", "an async function of (sample, prompt)"
    expect_function(field, factory, generator, "config, tokenizer, generate_turn", expected)
    return generator


async def respond(generate: Generator, sample: Sample, prompt: Prompt, name: str) -> Censored | None:
    """Generate the whole response within the error boundary of a sample (censoring.py).

    Args:
        generate: the generator.
        sample: the sample.
        prompt: prompt of the sample.
        name: name of the sample in reasons.

    Returns:
        Cause and reason if the sample must be censored, otherwise None.
    """
    if prompt.refusal:
        return Censored(prompt.refusal_cause, prompt.refusal)
    with boundary(name) as item:
        await asyncio.ensure_future(generate(sample, prompt))  # in a task that user code may cancel
    return item.censored


def check_response(sample: Sample, limits: Limits, max_response_tokens: int) -> None:
    """Check the response of a generator, which may be user code.

    Args:
        sample: the sample with the response.
        limits: limits of the engines.
        max_response_tokens: rollout.max_response_tokens.

    Raises:
        GeneratorError: the trainer cannot use the sample.
    """
    status = sample.status
    if not isinstance(status, Status) or not status.terminal:
        raise GeneratorError(
            f"rollout.generator returned a sample with status {status!s:.80}; expected a terminal status"
        )
    if status is Status.CENSORED:
        if sample.censor_cause is None:
            raise GeneratorError("rollout.generator returned a censored sample without censor_cause")
        return
    if status is Status.FINISHED and not any(q.sampled_tokens for q in sample.trained_sequences):
        raise GeneratorError("rollout.generator returned a finished sample without a token of the model")
    for sequence in sample.sequences:
        _check_sequence(sequence, limits, max_response_tokens)
    if not all(is_reward(turn.reward) for turn in sample.turn_rewards or ()):
        raise GeneratorError(
            f"rollout.generator returned turn_rewards = {sample.turn_rewards!r:.200}; expected finite numbers"
        )


def _check_sequence(q: TokenSequence, limits: Limits, max_response_tokens: int) -> None:
    """Check a sequence of a response. Raises as `check_response`."""
    if len(q.mu) != q.tokens or q.tokens != (q.spans[-1].end if q.spans else 0):
        raise GeneratorError(
            f"rollout.generator returned {q.tokens} tokens with {len(q.mu)} log-probs and version spans "
            f"{q.spans}; expected equal numbers"
        )
    if not all(map(math.isfinite, q.mu)):
        i = next(i for i, logp in enumerate(q.mu) if not math.isfinite(logp))
        raise GeneratorError(
            f"rollout.generator returned log-prob {q.mu[i]} for token {i} of sequence {q.sequence}; expected a "
            "finite number"
        )
    if q.tokens > max_response_tokens and len(q.prompt_ids) + q.tokens > limits.context_length:
        raise GeneratorError(
            f"rollout.generator returned a sequence of {len(q.prompt_ids) + q.tokens} tokens; expected at most "
            f"{limits.context_length}, the context length"
        )
    try:
        limits.check_ids(q.prompt_ids)
        limits.check_ids(q.response_ids)
    except RefusedPrompt as e:
        raise GeneratorError(f"rollout.generator returned a sequence with invalid ids: {e}") from None


@dataclass
class _Received:
    """The tokens that engines sent for a sample.

    Attributes:
        tokens: number of tokens of all sequences.
        digests: number of a sequence -> checksums of its sampled ids and of their log-probs.
        prompt_ids: prompt of the sample when tracking began.
        altered: whether a generator has changed the number of tokens.
    """

    tokens: int
    digests: dict[int, tuple[int, int]]
    prompt_ids: list[int]
    altered: bool


class ReceivedTokens:
    """Detects changes of sampled tokens by generators. Owns counts and checksums of the tokens that engines sent."""

    def __init__(self) -> None:
        self._entries: dict[int, _Received] = {}

    def begin(self, sample: Sample) -> None:
        """Start to track a sample with its current tokens. Does nothing if it is tracked already."""
        if sample.sample_id not in self._entries:
            digests = {q.sequence: _digests(q) for q in sample.sequences}
            # Inherited tokens of a sample that is no fork: `reconcile` counted them before a restart.
            altered = bool(sample.inherited_tokens) and sample.fork is None
            prompt_ids = list(sample.prompt_ids)
            self._entries[sample.sample_id] = _Received(_count(sample), digests, prompt_ids, altered)

    def end(self, sample: Sample) -> None:
        """Count the tokens that a generator has added or removed, and stop tracking the sample."""
        self.reconcile(sample)
        self._entries.pop(sample.sample_id, None)

    def rebase(self, sample: Sample) -> None:
        """Take the current tokens of a sample, which was forked or truncated, as those of the engines."""
        if (entry := self._entries.get(sample.sample_id)) is not None:
            entry.digests = {q.sequence: _digests(q) for q in sample.sequences}

    def add(self, sequence: TokenSequence, tokens: int) -> None:
        """Add tokens that an engine sent. `tokens`: number of these tokens, at the end of the sequence."""
        if (entry := self._entries.get(sequence.sample_id)) is not None:
            end = len(sequence.response_ids)
            entry.tokens += tokens
            digests = entry.digests.get(sequence.sequence, (0, 0))
            entry.digests[sequence.sequence] = _extend(digests, sequence, end - tokens, end)

    def reconcile(self, sample: Sample) -> None:
        """Count the tokens that a generator added as inherited, and those that it removed as discarded."""
        entry = self._entries.get(sample.sample_id)
        if entry is not None and (added := _count(sample) - entry.tokens):
            sample.inherited_tokens += max(0, added)
            sample.discarded += max(0, -added)
            entry.altered = True

    def check(self, sample: Sample) -> None:
        """Check a finished sample.

        Raises:
            GeneratorError: a generator has changed the prompt, sampled tokens or their log-probs.
        """
        self.reconcile(sample)
        entry = self._entries[sample.sample_id]
        if entry.altered or any(
            _digests(q) != entry.digests.get(q.sequence, (0, 0)) for q in sample.sequences
        ):
            raise GeneratorError(
                "rollout.generator changed sampled tokens or log-probs of the sample; expected the tokens of "
                "generate_turn, and other tokens only by sample.observe"
            )
        if not sample.own_prompt and sample.prompt_ids != entry.prompt_ids:
            raise GeneratorError(
                "rollout.generator changed sample.prompt_ids; expected the original prompt, or "
                "sample.own_prompt = True"
            )


def _count(sample: Sample) -> int:
    return sum(q.received_tokens for q in sample.sequences)


def _digests(sequence: TokenSequence) -> tuple[int, int]:
    """Return checksums of the sampled ids of a sequence, and of their log-probs."""
    digests = 0, 0
    for turn in sequence.turns():
        digests = _extend(digests, sequence, turn.start, turn.end)
    return digests


def _extend(digests: tuple[int, int], sequence: TokenSequence, start: int, end: int) -> tuple[int, int]:
    """Add tokens [start, end) to the checksums."""
    ids, mu = digests
    return zlib.crc32(sequence.response_ids[start:end], ids), zlib.crc32(sequence.mu[start:end], mu)
