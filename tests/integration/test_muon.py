"""Muon: torch's on the matrices of a Hugging Face folder and torch's AdamW on the rest give the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.convert.layout import to_hf
from rlsys.convert.table import entries, is_matrix
from rlsys.core.errors import RunError
from rlsys.trainer.muon import orthogonal
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]

MUON: dict[str, Any] = {"optimizer": "muon", "weight_decay": 0.01, "grad_clip": 1e9}
LR = 1e-3
DENOMINATOR = 100.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def gradients(trainer: Trainer, kind: str) -> dict[str, Tensor]:
    """Of the one rank's whole model, by Hugging Face name; only of what is (`matrix`) or is not (`rest`) Muon's."""
    parameters: dict[str, Any] = dict(trainer.named_parameters())
    hf_gradients = {}
    for entry in entries(trainer.hf):
        name = entry.megatron.format(e=entry.expert)
        if is_matrix(entry) == (kind == "matrix") and name in parameters:
            parts = to_hf(entry.rule, parameters[name].main_grad, trainer.hf)
            hf_gradients.update({n: p / DENOMINATOR for n, p in zip(entry.hf, parts, strict=True)})
    return hf_gradients


class Reference:
    """torch's two optimizers on the Hugging Face tensors."""

    def __init__(self, trainer: Trainer) -> None:
        self.weights = {
            name: t.clone() for name, t in trainer.named_hf_tensors() if "expert_bias" not in name
        }
        matrices, rest = ([self.weights[n] for n in gradients(trainer, kind)] for kind in ("matrix", "rest"))
        self.muon = torch.optim.Muon(matrices, lr=LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adam = torch.optim.AdamW(rest, lr=LR, weight_decay=0.01, betas=(0.9, 0.98))

    def step(self, trainer: Trainer) -> None:
        for kind in ("matrix", "rest"):
            for name, gradient in gradients(trainer, kind).items():
                self.weights[name].grad = gradient
        self.muon.step()
        self.adam.step()


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_three_updates_equal_torchs(
    architecture: str, tmp_path: Path, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's Newton-Schulz steps in float32, as ours are for a model in float32."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    trainer = start(cases.write_model(tmp_path / "model", architecture), trainer=MUON)
    batch = trainer.passes.pack(cases.samples())
    trainer.passes.accumulate(batch, cases.policy_loss)
    reference = Reference(trainer)
    matrix_names = gradients(trainer, "matrix").keys()
    assert {name.split(".")[-2] for name in matrix_names} >= {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not any(
        word in name
        for name in matrix_names
        for word in ("embed", "norm", "lm_head", "mlp.gate.", "expert_gate")
    )
    initial_weights = {name: t.clone() for name, t in reference.weights.items()}
    for update in range(3):
        if update:
            trainer.passes.accumulate(batch, cases.policy_loss)
        reference.step(trainer)
        trainer.update([], cases.policy_loss, LR, DENOMINATOR)
    for name, weight in trainer.named_hf_tensors():
        if name in reference.weights:
            assert torch.allclose(weight, reference.weights[name], rtol=0, atol=1e-6), name
            assert not torch.equal(weight, initial_weights[name]) or "bias" in name, name


def test_a_model_in_bfloat16_takes_torchs_own_steps(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    """Equal to one rounding of the bfloat16 weights, of which torch's Muon is given a copy in float32."""
    folder = cases.write_model(tmp_path / "model", "Qwen3ForCausalLM")
    trainer = start(folder, trainer=MUON, model={"dtype": "bfloat16"})
    trainer.passes.accumulate(batch := trainer.passes.pack(cases.samples()), cases.policy_loss)
    reference = Reference(trainer)
    reference.weights = {name: t.float() for name, t in reference.weights.items()}
    matrix_gradients = gradients(trainer, "matrix")
    muon = torch.optim.Muon(
        [reference.weights[n] for n in matrix_gradients],
        lr=LR,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    for name, gradient in matrix_gradients.items():
        reference.weights[name].grad = gradient
    muon.step()
    trainer.update([], cases.policy_loss, LR, DENOMINATOR)
    assert batch
    for name, weight in trainer.named_hf_tensors():
        if name in matrix_gradients:
            assert torch.equal(weight, reference.weights[name].bfloat16()), name


@pytest.mark.parametrize("shape", [(8, 8), (6, 40), (40, 6)])
def test_newton_schulz_leaves_directions_and_evens_their_sizes(shape: tuple[int, int]) -> None:
    """Singular vectors stay, values come near 1: the published coefficients end between 0.68 and 1.14."""
    g = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(*shape, generator=g, dtype=torch.float64), full_matrices=False)
    sizes = torch.linspace(1.0, 0.2, len(v), dtype=torch.float64)
    spectrum = u.T @ orthogonal(u * sizes @ v, torch.float64) @ v.T
    assert torch.allclose(spectrum, spectrum.diagonal().diag(), atol=1e-9)
    assert spectrum.diagonal().min() > 0.6 and spectrum.diagonal().max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(shape), torch.float32), torch.zeros(shape))


def test_offloaded_state_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"trainer.offload_optimizer = 0.5 with trainer.optimizer = muon: only AdamW"
    ):
        cases.config_of(
            tmp_path,
            tmp_path / "run",
            model={"dtype": "bfloat16"},
            trainer={**MUON, "offload_optimizer": 0.5},
        )


def test_training_resumes_bit_for_bit_from_a_checkpoint(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    folder = cases.write_model(tmp_path / "model")
    trainer = start(folder, trainer=MUON)
    cases.steps(trainer, 2)
    cases.save(trainer, 2)
    expected = cases.steps(trainer, 2), cases.weight_sums(trainer)
    trainer = start(folder, trainer=MUON)
    assert trainer.load_checkpoint() == 2
    assert (cases.steps(trainer, 2), cases.weight_sums(trainer)) == expected


def test_a_checkpoint_of_the_other_optimizer_is_refused(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """A run folder refuses another `trainer.optimizer` before that; this is who copies a checkpoint by hand."""
    folder = cases.write_model(tmp_path / "model")
    cases.save(start(folder, trainer=MUON), 1)
    with pytest.raises(RunError, match="the checkpoint cannot be loaded"):
        start(folder).load_checkpoint()
