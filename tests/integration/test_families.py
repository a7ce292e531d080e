"""Every family against transformers, on a tiny random model: the trainer's log-probs and gradients, and its folder.

tests/integration/test_real_models.py compares the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.hf import HFTensors, write_hf
from rlsys.convert.table import entries
from rlsys.trainer.checkpoints.conversion import hf_to_megatron, megatron_to_hf, verify
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.chunks import EXPERT_BIAS
from rlsys.trainer.model.topk_routing import topk_biased, topk_in_groups
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.tiny import TINY

pytestmark = pytest.mark.integration

SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 60)] for i in range(1, 5)]
LOGPS = 5e-5
"""Largest gap of a log-prob. Trainer and transformers add up in other orders."""
COSINE = 0.99999
"""Least cosine of a parameter's two gradients."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def reference(folder: Path, gradients: Path) -> Tensor:
    """Log-probs of SEQUENCES by transformers; the gradients of their negative sum become a model folder."""
    model = tiny.load(folder)
    logps = []
    for ids in SEQUENCES:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        logps.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    logprobs = torch.cat(logps)
    (-logprobs.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    tiny.save(model, gradients)
    return logprobs.detach()


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """The same of the trainer, under the folder's names. It cannot train any more."""
    samples = [TrainSample(s[:1], s[1:], [0.0] * 58, [0] * 58, i) for i, s in enumerate(SEQUENCES)]

    def loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -(scores.logp * micro.mask).sum(), {}

    for model in trainer.models:
        model.zero_grad_buffer()
    trainer.passes.accumulate(trainer.passes.pack(samples), loss, 1.0)
    with torch.no_grad():
        for _, parameter in trainer.named_parameters():
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}


def cosine(a: Tensor, b: Tensor) -> float:
    """1 where both are zero: an expert to which nobody was sent."""
    x, y = a.double().flatten(), b.double().flatten()
    if not x.any() and not y.any():
        return 1.0
    return float(torch.nn.functional.cosine_similarity(x, y, 0))


@pytest.mark.parametrize("family", TINY)
def test_log_probs_and_gradients_are_those_of_transformers(
    family: str, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Gradients of every parameter, in direction and size, and the folder's own tensors come back."""
    folder = tiny.write(tmp_path / "model", TINY[family])
    expected = reference(folder, tmp_path / "gradients")
    trainer = start(folder)
    logprobs = torch.tensor([logp for canary in trainer.canaries(SEQUENCES) for logp in canary.logp])
    logprob_error = float((logprobs - expected).abs().max())
    trainer.export_hf(tmp_path / "exported")
    files = [HFTensors(tmp_path / name, trainer.hf) for name in ("model", "exported", "gradients")]
    original, exported, gradients = files
    gradient_folder = tmp_path / "mine"
    write_hf(gradient_folder, folder, gradients_of(trainer).items())
    computed = HFTensors(gradient_folder, trainer.hf)
    cosines, sizes = {}, {}
    for entry in entries(trainer.hf):
        for name in entry.hf:
            assert torch.equal(original.read(name), exported.read(name)), name
            if entry.megatron.endswith(EXPERT_BIAS):  # no gradient reaches it
                continue
            hf_gradient, trainer_gradient = gradients.read(name), computed.read(name)
            cosines[name] = cosine(trainer_gradient, hf_gradient)
            sizes[name] = float(trainer_gradient.norm() / hf_gradient.norm()) if hf_gradient.any() else 1.0
    worst = min(cosines, key=lambda name: cosines[name])
    print(
        f"{family}: log-probs {logprob_error:.1e}, {len(cosines)} gradients, "
        f"least cosine {cosines[worst]:.7f} ({worst})"
    )
    assert logprob_error <= LOGPS
    assert cosines[worst] >= COSINE, worst
    assert all(size == pytest.approx(1, rel=1e-3) for size in sizes.values()), sizes


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", TINY)
def test_a_folder_survives_a_checkpoint_round_trip_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Through a checkpoint for two tensor-parallel ranks, under the names that the folder had."""
    folder = tiny.write(tmp_path / "model", TINY[family])
    layout = {"tp": 2, "ep": 2, "etp": 1} if HFConfig.read(folder).experts else {"tp": 2}
    hf_to_megatron(folder, tmp_path / "megatron", layout, lambda *_: None)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", lambda *_: None)
    assert verify(folder, tmp_path / "back", lambda *_: None).tensors
    tensors_before, tensors_after = tensors_of(folder), tensors_of(tmp_path / "back")
    assert tensors_before.keys() == tensors_after.keys()
    assert all(torch.equal(tensors_before[name], tensors_after[name]) for name in tensors_before)


def test_multi_token_prediction_layers_survive_conversion_and_export(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Through a checkpoint and back, and from a run that began with either."""
    folder = tiny.write(tmp_path / "model", TINY["deepseek-v3"])
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))
    tensors = tensors_of(folder)
    mtp_tensors = {
        "model.layers.4.eh_proj.weight": torch.randn(64, 128),
        "model.layers.4.enorm.weight": torch.ones(64),
    }
    save_file(tensors | mtp_tensors, folder / "model.safetensors")
    megatron_folder = tmp_path / "megatron"
    result = hf_to_megatron(folder, megatron_folder, {"ep": 2}, lambda *_: None)
    assert (result.tensors, result.carried) == (len(tensors), 2)
    megatron_to_hf(megatron_folder, tmp_path / "back", lambda *_: None)
    for name, source in (("folder", folder), ("checkpoint", megatron_folder)):
        start(source).export_hf(tmp_path / name)
    for name in ("back", "folder", "checkpoint"):
        exported_tensors = tensors_of(tmp_path / name)
        assert exported_tensors.keys() == (tensors | mtp_tensors).keys()
        assert all(
            torch.equal(exported_tensors[key], tensor) for key, tensor in (tensors | mtp_tensors).items()
        )


def test_a_group_is_worth_its_best_experts() -> None:
    """Two groups of three: 5 + 4 beat 6 + 0, 6 alone beats 5 alone; the rest of the chosen group may be poor."""
    scores = torch.tensor([[6.0, 0.0, -1.0, 5.0, 4.0, -2.0]])
    of_two = topk_in_groups(scores, 3, groups=2, top_groups=1, worth=2)
    of_one = topk_in_groups(scores, 3, groups=2, top_groups=1, worth=1)
    assert (sorted(of_two[0].tolist()), sorted(of_one[0].tolist())) == ([3, 4, 5], [0, 1, 2])


def test_a_bias_decides_between_softmax_scores() -> None:
    """Scores 1/6, 2/6, 3/6; the bias lifts the first one over the others."""
    router = SimpleNamespace(expert_bias=torch.tensor([[0.4, 0.0, 0.0]]))
    logits = torch.tensor([[1.0, 2.0, 3.0]]).log()
    assert topk_biased(router, logits, 2)[0].tolist() == [0, 2]
