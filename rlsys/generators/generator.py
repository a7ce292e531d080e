"""Generators: how a response is generated, by a single turn of the model or by turns with tools between them.

A generator is created by `function(config, tokenizer, generate_turn, **rollout.generator_params)` and called
with a sample and its prompt until the sample is terminal. `generate_turn(sample)` is a turn of the model
(turns.py). Tokens that a generator adds by `sample.observe` are never trained. Functions written for slime are
called with slime's interface (slime_generator.py); programs that use an OpenAI endpoint are agents (agent.py);
an environment is a separate process (environment.py).

A generator keeps no state about a sample: after a crash it is called again with the saved tokens, in the middle
of a turn or between two, and determines from them how to continue.
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
    """Return the function that `rollout.generator` names.

    Raises:
        UserError: there is none.
    """
    install()
    return resolve("rollout.generator", name, GENERATORS)


def build_generator(config: Config, tokenizer: Tokenizer | None, generate_turn: GenerateTurn) -> Generator:
    """Create the generator that `rollout.generator` names.

    Raises:
        UserError: unknown name or wrong parameters.
    """
    r = config.rollout
    factory = find_generator(r.generator)
    if is_slime_function(factory):
        if tokenizer is None:
            raise UserError(f"rollout.generator = {r.generator!r}: written for slime, it needs a tokenizer")
        ends = turn_ends(config, tokenizer)
        return SlimeGenerator(factory, config, tokenizer, generate_turn, ends, r.generator_params)
    generator: Generator = call(
        "rollout.generator_params", factory, config, tokenizer, generate_turn, **r.generator_params
    )
    field, expected = f"rollout.generator = {r.generator!r}", "an async function of (sample, prompt)"
    expect_function(field, factory, generator, "config, tokenizer, generate_turn", expected)
    return generator


async def respond(generate: Generator, sample: Sample, prompt: Prompt, name: str) -> Censored | None:
    """Generate the whole response within the boundary of a sample (censoring.py).

    Args:
        name: the sample in messages.

    Returns:
        why there is no response; None if there is one.
    """
    if prompt.refusal:
        return Censored(prompt.refusal_cause, prompt.refusal)
    with boundary(name) as item:
        await asyncio.ensure_future(generate(sample, prompt))  # in a task that user code may cancel
    return item.censored


def check_response(sample: Sample, limits: Limits, max_response_tokens: int) -> None:
    """Check what a generator made of a sample, which may be user code.

    Raises:
        GeneratorError: a trainer cannot use it.
    """
    status = sample.status
    if not isinstance(status, Status) or not status.terminal:
        raise GeneratorError(f"rollout.generator left the response {status!s:.80}")  # it would never end
    if status is Status.CENSORED:
        if sample.censor_cause is None:
            raise GeneratorError("rollout.generator left the response censored without a cause")
        return
    if status is Status.FINISHED and not any(q.sampled_tokens for q in sample.trained_sequences):
        raise GeneratorError("rollout.generator left the response finished without a token of the model")
    for q in sample.sequences:
        if len(q.mu) != q.tokens or q.tokens != (q.spans[-1].end if q.spans else 0):
            raise GeneratorError(
                f"rollout.generator left {q.tokens} tokens with {len(q.mu)} log-probs in {q.spans}"
            )
        if not math.isfinite(math.fsum(q.mu)):
            raise GeneratorError("rollout.generator left a log-prob that is not finite")
        if q.tokens > max_response_tokens and len(q.prompt_ids) + q.tokens > limits.context_length:
            raise GeneratorError(
                f"rollout.generator left a sequence of {len(q.prompt_ids) + q.tokens} tokens; expected at most "
                f"{limits.context_length}, the context"
            )
        try:
            limits.check_ids(q.prompt_ids)
            limits.check_ids(q.response_ids)
        except RefusedPrompt as e:
            raise GeneratorError(f"rollout.generator: {e}") from None
    if not all(is_reward(turn.reward) for turn in sample.turn_rewards or ()):
        raise GeneratorError(
            f"rollout.generator: turn_rewards = {sample.turn_rewards!r:.200}: expected finite numbers"
        )


@dataclass
class _Received:
    """Tokens that engines sent for a sample.

    Attributes:
        tokens: number of tokens of all sequences.
        digests: sequence -> checksums of the sampled ids and of their log-probs.
        prompt_ids: its prompt at the beginning.
        altered: whether a generator has changed the number of tokens.
    """

    tokens: int
    digests: dict[int, tuple[int, int]]
    prompt_ids: list[int]
    altered: bool


class ReceivedTokens:
    """Owns what the router added to running samples, to compare it with what a generator leaves."""

    def __init__(self) -> None:
        self._entries: dict[int, _Received] = {}

    def begin(self, sample: Sample) -> None:
        """Take the sample as it is now; does nothing if it has begun."""
        if sample.sample_id not in self._entries:
            digests = {q.sequence: _digests(q) for q in sample.sequences}
            altered = (
                bool(sample.inherited_tokens) and sample.fork is None
            )  # by `reconcile`, before a restart
            prompt_ids = list(sample.prompt_ids)
            self._entries[sample.sample_id] = _Received(_count(sample), digests, prompt_ids, altered)

    def end(self, sample: Sample) -> None:
        """Reconcile the sample, and forget it."""
        self.reconcile(sample)
        self._entries.pop(sample.sample_id, None)

    def rebase(self, sample: Sample) -> None:
        """Take the tokens of a sample that was forked or truncated as they are now."""
        if (entry := self._entries.get(sample.sample_id)) is not None:
            entry.digests = {q.sequence: _digests(q) for q in sample.sequences}

    def add(self, sequence: TokenSequence, tokens: int) -> None:
        """Add the last tokens of a sequence, which an engine sent."""
        if (entry := self._entries.get(sequence.sample_id)) is not None:
            end = len(sequence.response_ids)
            entry.tokens += tokens
            digests = entry.digests.get(sequence.sequence, (0, 0))
            entry.digests[sequence.sequence] = _extend(digests, sequence, end - tokens, end)

    def reconcile(self, sample: Sample) -> None:
        """Count tokens that a generator added or removed as inherited or discarded: no engine sent or lost them."""
        entry = self._entries.get(sample.sample_id)
        if entry is not None and (added := _count(sample) - entry.tokens):
            sample.inherited_tokens += max(0, added)
            sample.discarded += max(0, -added)
            entry.altered = True

    def check(self, sample: Sample) -> None:
        """Check a finished sample.

        Raises:
            GeneratorError: its tokens or its prompt are not those that the engines had.
        """
        self.reconcile(sample)
        entry = self._entries[sample.sample_id]
        if entry.altered or any(
            _digests(q) != entry.digests.get(q.sequence, (0, 0)) for q in sample.sequences
        ):
            raise GeneratorError(
                "rollout.generator changed sampled tokens or log-probs of the sample; "
                "expected those of generate_turn, and others by sample.observe only"
            )
        if not sample.own_prompt and sample.prompt_ids != entry.prompt_ids:
            raise GeneratorError(
                "rollout.generator changed sample.prompt_ids; expected its prompt, or own_prompt = True"
            )


def _count(sample: Sample) -> int:
    return sum(q.received_tokens for q in sample.sequences)


def _digests(sequence: TokenSequence) -> tuple[int, int]:
    digests = 0, 0
    for turn in sequence.turns():
        digests = _extend(digests, sequence, turn.start, turn.end)
    return digests


def _extend(digests: tuple[int, int], sequence: TokenSequence, start: int, end: int) -> tuple[int, int]:
    ids, mu = digests
    return zlib.crc32(sequence.response_ids[start:end], ids), zlib.crc32(sequence.mu[start:end], mu)
