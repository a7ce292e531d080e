"""An engine on a GPU makes the calls of a push and of a rollout before it is ready (rlsys/engine/warm_up.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlsys.core.errors import RunError
from rlsys.engine import warm_up
from rlsys.weights.hashes import compile_hash


class Manager:
    """SGLang's TokenizerManager, as far as a warm-up goes."""

    def __init__(self, context: int, pool: int | None, success: bool = True) -> None:
        self.model_config = SimpleNamespace(vocab_size=100)
        self.context_len, self.max_req_input_len = context, pool
        self.calls: list[str] = []
        self.lengths: list[int] = []
        self._success = success

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        self.calls.append("canary" if request.logprob_start_len == 0 else "sample")
        assert max(request.input_ids) < 100 and request.return_logprob
        self.lengths.append(len(request.input_ids) + request.sampling_params["max_new_tokens"])
        yield {}

    async def check_weights(self, request: Any) -> tuple[bool, str, None, None]:
        self.calls.append(request.action)
        return self._success, "no kernel", None, None

    async def flush_cache(self) -> None:
        self.calls.append("flush")


@pytest.fixture(autouse=True)
def structures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of SGLang take seconds to import."""

    def request(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"logprob_start_len": None, **fields})

    module = SimpleNamespace(GenerateReqInput=request, CheckWeightsReqInput=request)
    monkeypatch.setattr(warm_up.importlib, "import_module", lambda _: module)


def test_warm_up_runs_canaries_samples_and_checksums() -> None:
    manager = Manager(context=1000, pool=None)
    asyncio.run(warm_up.warm_up("null", manager))
    assert {"canary", "sample", "checksum"} <= set(manager.calls)
    assert manager.calls[-2:] == ["checksum", "flush"], "prefixes of a warm-up are nobody's"
    assert "warm-up" in str(warm_up.start_times)


@pytest.mark.parametrize(("context", "pool"), [(40, None), (1000, 40), (3, None)])
def test_prompts_fit_the_engine(context: int, pool: int | None) -> None:
    manager = Manager(context, pool)
    asyncio.run(warm_up.warm_up("null", manager))
    assert all(length < 40 for length in manager.lengths)


def test_an_engine_without_checksums_does_not_start() -> None:
    with pytest.raises(RunError, match="no kernel"):
        asyncio.run(warm_up.warm_up("null", Manager(1000, None, success=False)))


def test_the_trainers_hash_is_compiled_by_the_call_that_a_push_makes() -> None:
    compile_hash(torch.device("cpu"))
