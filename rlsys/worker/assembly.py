"""Creates scorer, router and engine clients from a config, for every process that uses engines."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from aiohttp import ClientSession

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.identity import Identity
from rlsys.core.model_folder import read_fields
from rlsys.data import Tokenizer
from rlsys.engine.client import EngineClient
from rlsys.engine.launch_args import uses_peer_weights
from rlsys.engine.weight_calls import ADAPTER
from rlsys.engine.wire import Limits
from rlsys.engine_requests import Limits as PromptLimits
from rlsys.rewards import Rewards
from rlsys.rewards.answer import canonical_answer, form_of
from rlsys.router.attest import Bounds
from rlsys.router.engines import Engines
from rlsys.router.router import Router
from rlsys.router.turn_ends import stop_ids
from rlsys.worker.scoring import Scorer


def build_scorer(config: Config, rewards: Rewards, tokenizer: Tokenizer) -> Scorer:
    """Create the scorer of a config."""
    return Scorer(
        rewards.open,
        tokenizer.decode,
        timeout=config.rollout.reward_timeout,
        answer=lambda prompt, response: canonical_answer(response, form_of(prompt)),
        concurrency=config.rollout.reward_concurrency,
        stop_ids=stop_ids(config, tokenizer),
    )


class ClientMaker(Protocol):
    """Creates the client of an engine. The arguments are those of EngineClient; `owner` is its `identity`."""

    def __call__(
        self,
        url: str,
        owner: Identity,
        *,
        tp: int = 1,
        index: int | None = None,
        adapter: str | None = ...,
        pool: str | None = None,
    ) -> EngineClient: ...


def client_maker(config: Config, session: ClientSession) -> ClientMaker:
    """Return a factory for clients of a run's engines. The default of `adapter` is the run's own adapter, if any."""
    limits = Limits(config.answer_seconds, config.work_seconds)
    own_adapter = ADAPTER if config.weights.method == "adapter" else None

    def client(
        url: str,
        owner: Identity,
        *,
        tp: int = 1,
        index: int | None = None,
        adapter: str | None = own_adapter,
        pool: str | None = None,
    ) -> EngineClient:
        return EngineClient(
            url, session, tp=tp, index=index, identity=owner, limits=limits, adapter=adapter, pool=pool
        )

    return client


def build_router(
    config: Config,
    engines: list[EngineClient],
    tokenizer: Tokenizer,
    *,
    skip_attestation: bool = False,
) -> Router:
    """Create the router of a config.

    Args:
        skip_attestation: the engines serve the weights that they start with, and get no push.

    Raises:
        UserError: rollout.stop_ids has an id outside the vocabulary.
    """
    vocab_size, context_length = _sizes(config)
    if unknown_ids := [i for i in config.rollout.stop_ids if i >= vocab_size]:
        raise UserError(
            f"rollout.stop_ids has {unknown_ids[0]}; expected ids below {vocab_size}, the size of the vocabulary of "
            f"{config.model.path}"
        )
    return Router(
        engines,
        vocab_size=vocab_size,
        context_length=context_length,
        stop_ids=stop_ids(config, tokenizer),
        stop_texts=config.rollout.stop,
        ignores_eos=config.rollout.ignore_eos,
        decode=tokenizer.decode,
        bounds=Bounds.of(config),
        routes=config.engine.return_routes,
        strategy=config.router.strategy,
        interruption=config.router.interruption,
        recompute_prefix=config.rollout.keep_budget is not None,
        push_timeout_s=config.start_seconds,
        skip_attestation=skip_attestation,
        peers=uses_peer_weights(config),
        slots=config.max_running_requests,
        engine_config=config.engine,
    )


def prompt_limits(config: Config) -> PromptLimits:
    """Return the limits of every prompt that is sent to an engine of the run, see Router.limits."""
    return PromptLimits(*_sizes(config))


def _sizes(config: Config) -> tuple[int, int]:
    """Return the vocabulary size and the largest number of tokens of a sample in an engine."""
    vocab_size, context_length = read_model_limits(config.model.path)
    return vocab_size, min(context_length, config.fixed_pool_tokens or context_length)


async def ask_engines(router: Engines, tokenizer: Tokenizer, max_new_tokens: int, question: str) -> str:
    """Return the greedy response of the run's own model to a question.

    The response is not in the ledger, and continues after interruptions.
    """
    ids = tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": question}]))
    return tokenizer.decode((await router.greedy(ids, max_new_tokens)).ids)


def read_model_limits(path: Path) -> tuple[int, int]:
    """Return the vocabulary size and the context length of the config.json in a model folder.

    The tokenizer may have fewer ids than the model.

    Raises:
        UserError: the file is unreadable, or lacks one of the two numbers.
    """
    file = path / "config.json"
    try:
        hf = read_fields(path)
        return int(hf["vocab_size"]), int(hf["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{file}: cannot read vocab_size and max_position_embeddings: {type(e).__name__}: {e}"
        ) from None
