"""The trainer on the real megatron-core: parity with transformers, packing, layouts, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.attention import Padding
from rlsys.trainer.pack import MicroBatch, pack
from rlsys.trainer.trainer import Trainer
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.tiny import TINY

pytestmark = [pytest.mark.integration, pytest.mark.gate]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_model(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


@functools.lru_cache(maxsize=1)
def transformers_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def transformers_logprobs(folder: Path, ids: list[int], temperature: float = 1.0) -> Tensor:
    model = transformers_model(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def split(values: Tensor, micro: MicroBatch) -> list[Tensor]:
    return list(values.split((micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]).tolist()))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3MoeForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "rope_theta": 1e6}),
        ("Qwen2ForCausalLM", {}),
        ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
        ("MixtralForCausalLM", {}),
        ("Glm4MoeForCausalLM", {}),
        ("Glm4MoeForCausalLM", {"use_qk_norm": False, "attention_bias": False, "tie_word_embeddings": True}),
        ("DeepseekV3ForCausalLM", {}),
        (
            "DeepseekV3ForCausalLM",
            {"q_lora_rank": None, "rope_parameters": None, "n_group": 1, "topk_group": 1},
        ),
    ],
    ids=[
        "qwen3-moe",
        "qwen3-moe-unnormalised",
        "qwen3-moe-mixed",
        "qwen3-tied",
        "qwen2",
        "llama3",
        "mixtral",
        "glm",
        "glm-air-tied",
        "deepseek",
        "deepseek-plain",
    ],
)
def test_packed_logprobs_equal_transformers(
    architecture: str, changes: dict[str, Any], tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    folder = cases.write_model(tmp_path / "model", architecture, **changes)
    trainer = start(folder)
    for micro, packed in zip(
        batch := pack(cases.samples(), 512), trainer.passes.logprobs(batch), strict=True
    ):
        for tokens, logp in zip(split(micro.tokens, micro), split(packed, micro), strict=True):
            expected = transformers_logprobs(folder, tokens.tolist())
            assert logp[0] == 0
            assert torch.allclose(logp[1:], expected, rtol=0, atol=1e-5), (logp[1:] - expected).abs().max()
    exported = {name: t.clone() for name, t in trainer.named_hf_tensors()}
    original = load_file(folder / "model.safetensors")
    original.pop("lm_head.weight", None) if trainer.hf.tied else None
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_temperature_scales_logits_but_not_canaries(model: Path, start: Callable[..., Trainer]) -> None:
    trainer = start(model, rollout={"temperature": 0.5})
    ids = [*cases.samples()[0].prompt_ids, *cases.samples()[0].response_ids]
    (hot,) = trainer.passes.logprobs([MicroBatch.of_tokens(torch.tensor(ids))])
    expected = transformers_logprobs(model, ids, 0.5)
    assert torch.allclose(hot[1:], expected, rtol=0, atol=1e-5 / 0.5)  # rounding of the logits is scaled, too
    canary = trainer.canaries([ids])[0]
    expected = transformers_logprobs(model, canary.ids)
    assert torch.allclose(torch.tensor(canary.logp), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next"])
def test_packed_equals_one_by_one(
    family: str, model: Path, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Log-probs, loss and gradient do not depend on how the samples were cut into micro-batches. Qwen3-Next's states
    pass along a sequence, and must not reach the next one."""
    folder, outcomes = model, []
    if family == "qwen3-next":
        folder = tiny.write(tmp_path / "next", TINY[family], **TINY[family].served)
    for budget in (64, 128, 4096):
        trainer = start(folder, trainer={"token_budget": budget})
        batch = pack(cases.samples(), budget)
        logps = {
            tuple(tokens.tolist()): logp
            for micro, packed in zip(batch, trainer.passes.logprobs(batch), strict=True)
            for tokens, logp in zip(split(micro.tokens, micro), split(packed, micro), strict=True)
        }
        outcomes.append((len(batch), logps, cases.steps(trainer, 2)))
    assert [n for n, _, _ in outcomes] == sorted({n for n, _, _ in outcomes}, reverse=True)
    for _, logps, steps in outcomes[1:]:
        assert all(torch.allclose(logps[k], v, rtol=0, atol=1e-5) for k, v in outcomes[0][1].items())
        assert torch.allclose(torch.tensor(steps), torch.tensor(outcomes[0][2]), rtol=1e-5)


def test_padding_is_undone() -> None:
    lengths = [9, 8, 7, 3, 3, 1, 20]
    padding = Padding.of(lengths, torch.device("cpu"))
    assert padding.rectangles == [(3, 9, 0), (2, 3, 0), (1, 1, 0), (1, 20, 0)]
    assert torch.equal(padding.to_padded[padding.to_packed], torch.arange(sum(lengths)))
    assert len(padding.to_padded) == 3 * 9 + 2 * 3 + 1 + 20


def test_the_denominator_scales_loss_and_gradient(model: Path, start: Callable[..., Trainer]) -> None:
    results = []
    for denominator in (None, 10.0):
        trainer = start(model, trainer={"grad_clip": 1e9})
        batch = pack(cases.samples(), cases.BUDGET)
        tokens = sum(m.response_tokens for m in batch)
        results.append(trainer.update(batch, cases.policy_loss, 1e-3, denominator))
    assert results[1].loss == pytest.approx(results[0].loss * tokens / 10)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm * tokens / 10, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_skipped_and_stops_the_run_in_the_end(
    model: Path, start: Callable[..., Trainer]
) -> None:
    def broken(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return scores.logp.sum() * torch.inf, {}

    trainer = start(model, trainer={"nonfinite_limit": 1})
    initial_sums, batch = cases.weight_sums(trainer), trainer.passes.pack(cases.samples())
    assert trainer.update(batch, broken, 1e-2).skipped
    assert not trainer.update(batch, cases.policy_loss, 0.0).skipped  # the row is broken
    assert trainer.update(batch, broken, 1e-2).skipped
    with pytest.raises(
        RunError, match=r"not finite in 2 updates in a row; expected at most trainer.nonfinite_limit = 1"
    ):
        trainer.update(batch, broken, 1e-2)
    assert cases.weight_sums(trainer) == initial_sums


@pytest.mark.parametrize("recompute", [["layer"], ["moe", "layernorm"], ["core_attn"]], ids=str)
def test_recompute_changes_no_number(
    recompute: list[str], model: Path, start: Callable[..., Trainer]
) -> None:
    again, reference = (
        cases.steps(start(model, trainer={"recompute": recompute}), 2),
        cases.steps(start(model), 2),
    )
    assert torch.allclose(torch.tensor(again), torch.tensor(reference), rtol=1e-6)


def test_the_balance_loss_has_its_weight_whatever_divides_the_objective(
    model: Path, start: Callable[..., Trainer]
) -> None:
    """With no other gradient, what reaches the routers is the same for every denominator."""

    def nothing(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return scores.logp.sum() * 0, {}

    norms = []
    for weight, denominator in ((0.1, 7.0), (0.1, 70.0), (0.2, 7.0)):
        trainer = start(model, trainer={"balance_loss": weight})
        norms.append(
            trainer.update(trainer.passes.pack(cases.samples()), nothing, 0.0, denominator).grad_norm
        )
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[2] == pytest.approx(2 * norms[0], rel=1e-5)


def test_settings_that_the_model_does_not_support_are_rejected(
    model: Path, start: Callable[..., Trainer]
) -> None:
    for overrides, message in (
        (
            {"balance_rate": 0.001},
            r"balance_rate = 0.001: expected 0, because the routers of .* have no bias",
        ),
        (
            {"recompute": ["mla_up_proj"]},
            r"recompute contains mla_up_proj; expected only modules that .* has",
        ),
    ):
        with pytest.raises(UserError, match=message):
            start(model, trainer=overrides)


def test_bfloat16_trains_close_to_float32(model: Path, start: Callable[..., Trainer]) -> None:
    exact = cases.steps(start(model), 1)[0]
    trainer = start(model, model={"dtype": "bfloat16"})
    rough = cases.steps(trainer, 1)[0]
    assert rough == pytest.approx(exact, rel=0.2)
    assert {t.dtype for _, t in trainer.named_hf_tensors()} == {torch.bfloat16}


def test_a_resumed_run_continues_bit_for_bit(model: Path, start: Callable[..., Trainer]) -> None:
    unbroken = start(model)
    assert unbroken.load_checkpoint() == 0
    cases.steps(unbroken, 2)
    cases.save(unbroken, 2)
    expected = cases.steps(unbroken, 3)
    weights = {name: t.clone() for name, t in unbroken.named_hf_tensors()}

    resumed = start(model)
    assert resumed.load_checkpoint() == 2
    assert cases.steps(resumed, 3) == expected
    assert all(torch.equal(t, weights[name]) for name, t in resumed.named_hf_tensors())


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"ep": 2}, "parallel needs 2 ranks, but 1 were started"),
        ({"dp": 4}, r"parallel needs 4 ranks, but 1 were started"),
    ],
)
def test_too_few_ranks_are_refused(
    parallel: dict[str, int], message: str, model: Path, start: Callable[..., Trainer]
) -> None:
    with pytest.raises(UserError, match=message):
        start(model, parallel=parallel)


def test_an_illegal_layout_is_refused_with_both_numbers(model: Path, tmp_path: Path) -> None:
    from rlsys.convert.config import HFConfig
    from rlsys.convert.fit import check_layout

    def config(**parallel: int) -> Config:
        return cases.config_of(model, tmp_path, parallel=parallel)

    hf = HFConfig.read(model)
    for wrong, message in (
        (config(ep=16), r"parallel.ep = 16 does not divide experts = 8 of"),
        (config(tp=4), r"parallel.tp = 4 does not divide key-value heads = 2 of"),
        (
            config(pp=3),
            r"parallel.pp = 3 does not divide layers = 4 of .*, the last stage would have 0",
        ),
        (config(pp=2, vpp=4), r"parallel.pp \* vpp = 8 does not divide layers = 4 of"),
    ):
        with pytest.raises(UserError, match=message):
            check_layout(wrong, hf)
    dense = dataclasses.replace(hf, experts=0)
    with pytest.raises(UserError, match=r"parallel.ep = 2: expected 1, because .* has no experts"):
        check_layout(config(ep=2), dense)
