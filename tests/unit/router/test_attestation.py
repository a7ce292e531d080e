"""No push that went wrong is attested (review 6): every tensor of the shipped model, in float32, bfloat16 and over
two ranks; tensors that an engine keeps in an order of its own; canaries beside rounding.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.table import entries
from rlsys.core.errors import RunError
from rlsys.core.weight_updates import Canary
from rlsys.router.attest import DEFAULT_BOUNDS, STANDARD_ERRORS, Bounds, nearness
from rlsys.router.engine_checksums import (
    MISSING_CHANGE,
    OTHER_VALUES,
    UNEXPECTED_CHANGE,
    ChecksumVerifier,
    Match,
)
from rlsys.router.push import raise_if_all_quarantined
from rlsys.trainer.checkpoints.conversion import to_hf, to_megatron
from rlsys.weights.checksums import EngineChecksums
from tests.helpers.held_weights import EngineWeights
from tests.helpers.router_rig import CANARY_IDS, A, B, Rig, check, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine, canary_logprobs, checksums

MODEL = Path(__file__).resolve().parents[3] / "configs" / "models" / "quickstart-moe"
HF = HFConfig.read(MODEL)
Tensors = dict[str, Tensor]


def weights(version: int, dtype: torch.dtype) -> Tensors:
    """The shipped model's, and after a step that moved every tensor; as the trainer's own copy of them gives them."""
    on_disk = load_file(MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for entry in entries(HF):
        parts = [on_disk[name] for name in entry.hf]
        if version > 1:
            parts = [p + 0.02 * torch.randn(p.shape, generator=generator) for p in parts]
        megatron_tensor = to_megatron(entry.rule, [p.to(dtype) for p in parts], HF)
        tensors |= dict(zip(entry.hf, to_hf(entry.rule, megatron_tensor, HF), strict=True))
    return tensors


def expected(tensors: Mapping[str, Tensor], tp: int) -> list[dict[str, str]]:
    checksums = EngineChecksums(HF, tp)
    for _ in checksums.watch(tensors.items()):
        pass
    return checksums.digests()


def faults(old: Tensors, new: Tensors) -> Iterator[tuple[str, Tensors]]:
    """What an engine gets of `new` where something went wrong on the way: every tensor is left out, or is the
    previous version's; every two experts of a layer change places, whole."""
    for name in new:
        yield f"without {name}", {n: t for n, t in new.items() if n != name}
        yield f"old {name}", {**new, name: old[name]}
    for layer in range(HF.layers):
        for a, b in itertools.combinations(range(HF.experts), 2):
            stems = [f"model.layers.{layer}.mlp.experts.{e}." for e in (a, b)]
            swapped = dict(new)
            for kind in ("gate_proj", "up_proj", "down_proj"):
                weight_a, weight_b = (f"{stem}{kind}.weight" for stem in stems)
                swapped[weight_a], swapped[weight_b] = new[weight_b], new[weight_a]
            yield f"{stems[0]} and {b} swapped", swapped


def refused(match: Match, bounds: Bounds) -> bool:
    """As the router decides where canaries have nothing to say."""
    return bool(match.wrong) or match.share_unknown > bounds.max_unknown_share


@pytest.mark.parametrize("first", [False, True], ids=["later push", "first push"])
@pytest.mark.parametrize(
    ("dtype", "tp"), [("float32", 1), ("bfloat16", 1), ("float32", 2)], ids=["fp32", "bf16", "tp 2"]
)
def test_no_faulty_push_of_the_shipped_model_is_attested(dtype: str, tp: int, first: bool) -> None:
    """`first`: of a run that goes on, whose engines come up with the folder's weights."""
    old, new = (weights(v, getattr(torch, dtype)) for v in (1, 2))
    assert all(not torch.equal(old[name], new[name]) for name in new)
    checksums_before, checksums_after = (expected(tensors, tp) for tensors in (old, new))
    base = EngineWeights(old, tp)
    assert base.report() == checksums_before
    bounds = Bounds.of(Config.model_validate({"model": {"path": MODEL, "dtype": dtype}}))
    passed, cases = [], 0
    for fault, received_tensors in [("none", new), *faults(old, new)]:
        checksums, engine_weights = ChecksumVerifier(), base.copy()
        if not first:
            assert not refused(checksums.compare("engine", checksums_before, engine_weights.report()), bounds)
            checksums.attest("engine")
        engine_weights.load(received_tensors)
        cases += 1
        if not refused(checksums.compare("engine", checksums_after, engine_weights.report()), bounds):
            passed.append(fault)
    assert passed == ["none"], f"passed {len(passed) - 1} of {cases - 1}"
    assert cases == 1 + 2 * len(new) + HF.layers * HF.experts * (HF.experts - 1) // 2


def test_a_tensor_that_the_trainer_itself_forgets_is_missed() -> None:
    """One of each kind."""
    old, new = (weights(v, torch.float32) for v in (1, 2))
    checksums_before, bounds = expected(old, 1), Bounds(1e-6, 1e-4)
    for name in {re.sub(r"\d+", "#", name): name for name in new}.values():
        checksums, engine_weights = ChecksumVerifier(), EngineWeights(old)
        checksums.compare("engine", checksums_before, engine_weights.report())
        sent_tensors = {n: t for n, t in new.items() if n != name}
        engine_weights.load(sent_tensors)
        assert refused(
            checksums.compare("engine", expected(sent_tensors, 1), engine_weights.report()), bounds
        ), name


# -- orders of their own -------------------------------------------------------------------------------------


def own_order(values: Mapping[str, int], ranks: int = 1) -> list[dict[str, str]]:
    """Checksums of tensors that an engine's kernels have rearranged: they follow from the values, in no way that a
    trainer knows."""
    return [
        {f"layers.{n}.w": hashlib.sha256(f"{n} {v} {r}".encode()).hexdigest()[:16] for n, v in values.items()}
        for r in range(ranks)
    ]


def foretold(values: Mapping[str, int]) -> list[dict[str, str]]:
    return [{f"layers.{n}.w": str(v) for n, v in values.items()}]


OLD = {str(i): 0 for i in range(60)}
NEW = {**{str(i): 1 for i in range(59)}, "59": 0}
"""A step that moves all but one."""


@pytest.mark.parametrize("ranks", [1, 2], ids=["as foretold", "more ranks than foretold"])
def test_incomparable_tensors_must_change_exactly_when_the_trainer_tensors_do(ranks: int) -> None:
    """Before: a push that changed nothing was attested, with 60 of 60 tensors unknown."""

    def after(values: Mapping[str, int]) -> dict[str, str]:
        checksums = ChecksumVerifier()
        first = checksums.compare("e", foretold(OLD), own_order(OLD, ranks))
        assert (first.equal, first.wrong, first.share_unknown) == (0, {}, 1.0)
        checksums.attest("e")
        return checksums.compare("e", foretold(NEW), own_order(values, ranks)).wrong

    assert after(NEW) == {}
    assert after(OLD) == {f"layers.{i}.w": MISSING_CHANGE for i in range(59)}
    assert after({**NEW, "7": 0}) == {"layers.7.w": MISSING_CHANGE}
    assert after({**NEW, "59": 5}) == {"layers.59.w": UNEXPECTED_CHANGE}


def test_a_refused_push_is_not_the_baseline_of_the_next_one() -> None:
    checksums = ChecksumVerifier()
    checksums.compare("e", foretold(OLD), own_order(OLD))
    checksums.attest("e")
    assert set(checksums.compare("e", foretold(NEW), own_order(OLD)).wrong.values()) == {MISSING_CHANGE}
    assert checksums.compare("e", foretold(NEW), own_order(NEW)).wrong == {}
    restarted = checksums.compare("e", foretold(OLD), own_order(NEW))
    assert set(restarted.wrong.values()) == {UNEXPECTED_CHANGE}, (
        "an engine that came back holds what it should not"
    )
    assert checksums.compare("joined", foretold(NEW), own_order(OLD)).wrong == {}, (
        "nothing is known of this one"
    )


@pytest.mark.parametrize(
    ("sections", "share"),
    [
        ({}, 0.0),
        ({"engine": {"extra_args": ["--log-level", "warning"]}}, 0.0),
        ({"model": {"path": MODEL, "dtype": "bfloat16", "fp8": "rollout"}}, 0.75),
        ({"engine": {"extra_args": ["--speculative-algorithm", "NEXTN"]}}, 0.5),
        ({"engine": {"extra_args": ["--moe-runner-backend=flashinfer_cutlass"]}}, 1.0),
        ({"engine": {"extra_args": ["--ep-size", "2"]}}, 1.0),
    ],
)
def test_how_many_tensors_may_be_unknown_follows_from_the_kernels(
    sections: dict[str, Any], share: float
) -> None:
    config = Config.model_validate({"model": {"path": MODEL}, "weights": {"uncompared": None}, **sections})
    assert Bounds.of(config).max_unknown_share == share
    with pytest.raises(ValidationError):
        Config.model_validate({"model": {"path": MODEL}, "weights": {"uncompared": 0.9}})


@pytest.mark.virtual_clock
@pytest.mark.parametrize("uncompared", [0.0, 0.5, 1.0])
async def test_more_unknown_tensors_than_stated_are_refused(uncompared: float) -> None:
    """Of the scripted engine's three tensors one is of no known kind: a share of a third."""
    sums = {"layers.0.norm": "01", "layers.1.norm": "11", "packed": "trainer's"}
    bounds = Bounds(1e-6, 1e-4, max_unknown_share=uncompared)
    async with routing(bounds=bounds) as rig:
        if uncompared:
            metrics = await rig.push(sums=sums)
            assert (metrics["push_tensors_unknown"], metrics["push_share_unknown"]) == (
                1,
                pytest.approx(1 / 3),
            )
            check(await rig.start(sample()), versions={1})
        else:
            error_pattern = (
                r"1 tensor\(s\), 33%, cannot be compared; expected at most 0% with .*; first: packed"
            )
            with pytest.raises(RunError, match=error_pattern):
                await rig.push(sums=sums)


@pytest.mark.virtual_clock
async def test_a_push_without_effect_is_refused_if_no_tensor_is_comparable() -> None:
    """Through the router: an engine says yes to every call and keeps what it has."""
    bounds = Bounds(*DEFAULT_BOUNDS["bfloat16"], exact=False, max_unknown_share=1.0)

    class Deaf(ScriptedEngine):
        holds = OLD

        def _weights_checker(self, _: dict[str, Any]) -> tuple[int, str]:
            return 200, json.dumps({"success": True, "ranks": [{"checksums": own_order(self.holds)[0]}]})

    engine = Deaf(A)
    async with routing(engine, bounds=bounds) as rig:
        await rig.push(sums=foretold(OLD)[0])
        with pytest.raises(RunError, match=r"did not change where the trainer's did in 59 tensor\(s\)"):
            await rig.push(sums=foretold(NEW)[0])


def test_comparable_tensors_are_compared_by_their_values() -> None:
    checksums = ChecksumVerifier()
    assert checksums.compare("a", foretold(OLD), foretold(OLD)).equal == 60
    match = checksums.compare("b", foretold(NEW), foretold({**NEW, "3": 0}))
    assert match.wrong == {"layers.3.w": OTHER_VALUES}
    assert match.mismatch_message() == "holds other values in 1 tensor(s), first: layers.3.w"


# -- canaries ------------------------------------------------------------------------------------------------

TOKENS = 4000


@pytest.mark.parametrize("rounding", [0.0, 1e-4, 1e-2, 3e-2])
def test_canaries_detect_a_stale_engine_despite_rounding(rounding: float) -> None:
    """One step moves log-probs by 3e-3: far less than bfloat16's bound of 2e-2, which a stale engine passes."""
    rng = np.random.default_rng(0)
    old = -rng.exponential(1.2, TOKENS)
    new = old + rng.normal(0, 3e-3, TOKENS)

    def stood_still(base: np.ndarray) -> bool:
        gain, error = nearness(list(old), list(new), list(base + rounding * rng.standard_t(2, TOKENS)))
        return gain + STANDARD_ERRORS * error < 0

    assert not any(stood_still(new) for _ in range(50))
    assert all(stood_still(old) for _ in range(50)) or rounding > 1e-3
    assert nearness(list(new), list(new), list(old)) == (1.0, 0.0), "a step that moved nothing says nothing"
    assert nearness([], [], []) == (1.0, 0.0)


@pytest.mark.virtual_clock
async def test_an_engine_that_stood_still_is_refused_by_its_canaries() -> None:
    """Nothing is known of its tensors, and it is within bfloat16's bounds."""
    bounds = Bounds(3.0, 6.0, exact=False, max_unknown_share=1.0)

    class Deaf(ScriptedEngine):
        def load(self, weights: int) -> None:
            super().load(min(weights, 1))

    async with routing(Deaf(A), bounds=bounds) as rig:
        await rig.push()
        with pytest.raises(
            RunError, match="nearer to those before the trainer's step than to those after it"
        ):
            await rig.push()
    async with routing(bounds=bounds) as rig:
        for _ in range(3):
            await rig.push()


# -- rounding of deep models ---------------------------------------------------------------------------------

SMOLLM2 = {"num_hidden_layers": 30, "vocab_size": 49152}


def bounds_of(
    folder: Path, dtype: str = "float32", fields: dict[str, Any] = SMOLLM2, **weights: Any
) -> Bounds:
    (folder / "config.json").write_text(json.dumps(fields))
    sections = {"model": {"path": folder, "dtype": dtype}, "weights": weights}
    return Bounds.of(Config.model_validate(sections))


async def push(rig: Rig, gap: float, holds: int | None = None) -> dict[str, float]:
    """With canaries that differ by `gap` in the mean. `holds`: another version's checksums."""
    version = rig.version + 1
    logps = np.abs(canary_logprobs(CANARY_IDS, version))
    off = gap / float((1 / np.maximum(1.0, logps)).mean())
    return await rig.push(sums=checksums(holds or version), off=-off)


def test_bounds_of_a_first_comparison_grow_with_depth_and_vocabulary(tmp_path: Path) -> None:
    """SmolLM2-135M was seen 4.8e-6 off in float32 and 0.019 in bfloat16; another constant in a norm is 4e-5 off, a
    wrong rotary embedding above 0.1."""
    deep, wide = (
        bounds_of(tmp_path),
        bounds_of(tmp_path, fields={"num_hidden_layers": 2, "vocab_size": 49152}),
    )
    small = bounds_of(tmp_path, fields={"num_hidden_layers": 2, "vocab_size": 128})
    assert small.mean < wide.mean < deep.mean
    assert 1e-5 < deep.mean < 1e-3 and 1e-4 < deep.p999 < 1e-1
    half = bounds_of(tmp_path, "bfloat16")
    assert 0.03 < half.mean < 0.1
    text = {"text_config": SMOLLM2, "model_type": "qwen3_vl_moe"}
    assert bounds_of(tmp_path, fields=text) == deep
    assert bounds_of(tmp_path, canary_mean=3e-5).mean == 3e-5


async def test_a_deep_model_is_attested_and_a_wrong_engine_is_not(tmp_path: Path) -> None:
    """At the first push: what thirty layers round, and what a wrong computation makes of the same tensors."""
    bounds = bounds_of(tmp_path)
    async with routing(bounds=bounds) as rig:
        metrics = await push(rig, 4.8e-6)
        assert 3e-6 < metrics["push_canary_mean"] < 5e-6 and not metrics["push_canary_warnings"]
        await push(rig, 9e-6)
    async with routing(bounds=bounds) as rig:
        with pytest.raises(RunError, match=r"canary log-probs differ .*weights\.canary_mean"):
            await push(rig, 1e-2)
    async with routing(bounds=bounds) as rig:
        with pytest.raises(RunError, match=r"tensor"):
            await push(rig, 4.8e-6, holds=7)


async def test_later_pushes_are_bounded_by_the_rounding_of_the_first(tmp_path: Path) -> None:
    bounds = bounds_of(tmp_path)
    async with routing(bounds=bounds) as rig:
        await push(rig, 2e-6)
        await push(rig, 5e-6)
        with pytest.raises(RunError, match=r"canary log-probs differ .*bound 6e-06"):
            await push(rig, 3e-5)
    async with routing(bounds=bounds) as rig:  # the smallest bound is that of four layers
        await push(rig, 0.0)
        await push(rig, 2.5e-6)
        with pytest.raises(RunError, match=r"bound 3e-06"):
            await push(rig, 9e-6)


async def test_half_precision_warns_relative_to_the_rounding_of_the_first_push(tmp_path: Path) -> None:
    async with routing(bounds=bounds_of(tmp_path, "bfloat16")) as rig:
        for difference, warned in ((0.017, 0), (0.03, 0), (0.09, 1)):
            metrics = await push(rig, difference)
            assert metrics["push_canary_warnings"] == warned
        with pytest.raises(RunError, match=r"canary log-probs differ"):
            await push(rig, 0.6)


async def test_a_restarted_router_measures_again(tmp_path: Path) -> None:
    """After a resume, engines hold the folder's weights and get the checkpoint's: a comparison of equal tensors."""
    for first in (2e-6, 2e-5):
        async with routing(bounds=bounds_of(tmp_path)) as rig:
            await push(rig, first)
            await push(rig, 2 * first)


async def test_an_engine_that_joins_is_measured_by_itself(tmp_path: Path) -> None:
    """Its kernels may round otherwise than those of the others."""
    async with routing(ScriptedEngine(A), bounds=bounds_of(tmp_path)) as rig:
        await push(rig, 0.0)
        rig.engine.restart()
        rig.join(ScriptedEngine(B))
        with pytest.raises(RunError, match=rf"{A} quarantined: canary log-probs differ"):
            await push(rig, 1e-5)
            raise RunError(f"{A} {rig.router.engine_states()[A]}; {B} {rig.router.engine_states()[B]}")
        assert rig.router.engine_states()[B] == "version 2"


async def test_a_configured_bound_applies_unchanged(tmp_path: Path) -> None:
    async with routing(bounds=bounds_of(tmp_path, canary_mean=1e-5)) as rig:
        await push(rig, 0.0)
        await push(rig, 9e-6)
        with pytest.raises(RunError, match=r"bound 1e-05: weights\.canary_mean"):
            await push(rig, 2e-5)


# -- experts that score nearly the same ----------------------------------------------------------------------

ROUTED = {**SMOLLM2, "num_experts": 128}


async def push_tokens(rig: Rig, gaps: list[float]) -> dict[str, float]:
    """One canary of tokens that differ by so much."""
    version = rig.version = rig.version + 1
    await rig.router.begin_push(version)
    for engine in rig.engines:
        engine.load(version)
    ids = [1] * (len(gaps) + 1)
    logps = [
        lp * (1 + difference) for lp, difference in zip(canary_logprobs(ids, version), gaps, strict=True)
    ]
    metrics = await rig.router.end_push(version, [Canary(ids, logps)], [checksums(version)], {})
    raise_if_all_quarantined(rig.router, version)
    rig.router.resume()
    return metrics


async def test_float32_warns_of_a_few_tokens_that_other_experts_compute(tmp_path: Path) -> None:
    """In a deep model with many experts some always score the same but for rounding. The other tokens show that the
    engine computes the same model."""
    few, most = [1e-6] * 195 + [0.02] * 5, [1e-3] * 195 + [0.02] * 5
    async with routing(bounds=bounds_of(tmp_path, fields=ROUTED)) as rig:
        assert (await push_tokens(rig, few))["push_canary_warnings"] == 1
        assert rig.router.engine_states() == {A: "version 1"}
        with pytest.raises(RunError, match=r"canary log-probs differ"):
            await push_tokens(rig, most)
    async with routing(bounds=bounds_of(tmp_path)) as rig:  # no experts
        with pytest.raises(RunError, match=r"canary log-probs differ"):
            await push_tokens(rig, few)
    async with routing(bounds=bounds_of(tmp_path, fields=ROUTED)) as rig:
        with pytest.raises(RunError, match=r"canary log-probs differ"):
            await push_tokens(rig, [1e-6] * 180 + [2.0] * 20)
