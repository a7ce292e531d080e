"""Layers for multi-token prediction, trained: against a computation of their own, and beside a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.hf import HFTensors
from rlsys.convert.table import entries
from rlsys.trainer.checkpoints.conversion import hf_to_megatron, megatron_to_hf, verify
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.chunks import EXPERT_BIAS
from rlsys.trainer.model.mtp import predicted_tokens
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.mtp_reference import Reference
from tests.helpers.tiny import TINY

pytestmark = pytest.mark.integration

PREDICTING = ("deepseek-v3", "glm-4.5", "glm-4.7-flash", "moonlight", "hy-v3")
LENGTHS = (3, 36, 4, 3, 43, 50, 57, 3)
"""Of the shortest, which have one or two tokens that two others precede, one begins and one ends the packed row."""
SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, n + 1)] for i, n in enumerate(LENGTHS, 1)]
PROMPT = 2
LOGPS, COSINE = 5e-5, 0.99999
TRAINED = {"trainer": {"mtp_loss": 1.0}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def samples_of(sequences: list[list[int]]) -> list[TrainSample]:
    """All tokens behind the first two are trained: just those that two others precede."""
    return [
        TrainSample(s[:PROMPT], s[PROMPT:], [0.0] * (len(s) - PROMPT), [0] * (len(s) - PROMPT), i)
        for i, s in enumerate(sequences)
    ]


def no_loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return (scores.logp * 0).sum(), {}


def logps_of(trainer: Trainer, batch: list[MicroBatch], monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """Of each sequence's tokens 2.., by its row; the gradient of their negative sum stays in the buffers."""
    layer_logps: list[Tensor] = []
    assert trainer._prediction is not None
    output = trainer._prediction.output
    assert output is not None
    upstream = output.logits

    def keep(states: Tensor, weight: Tensor) -> Tensor:
        result = upstream(states, weight)
        layer_logps.append(result.detach().float().log_softmax(-1))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(output, "logits", keep)
        for model in trainer.models:
            model.zero_grad_buffer()
        trainer.passes.accumulate(batch, no_loss)
    result = {}
    for micro, logps in zip(batch, layer_logps, strict=True):
        starts = micro.cu_seqlens.tolist()
        for row, first, end in zip(micro.rows.tolist(), starts, starts[1:], strict=False):
            tokens = micro.tokens[first + 2 : end]
            result[row] = logps[first : end - 2].gather(1, tokens[:, None])[:, 0]
    return result


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """What the buffers hold, under the folder's names. It cannot train any more."""
    with torch.no_grad():
        for _, parameter in trainer.named_parameters():
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    biases = {n for e in entries(trainer.hf) if e.megatron.endswith(EXPERT_BIAS) for n in e.hf}
    return {name: tensor.clone() for name, tensor in trainer.named_hf_tensors() if name not in biases}


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


@pytest.mark.parametrize("trunk", [False, True], ids=["the layer alone", "with the model below"])
@pytest.mark.parametrize("family", PREDICTING)
def test_numbers_are_those_of_the_formula(
    family: str, trunk: bool, tmp_path: Path, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed here, sequence by sequence there. Log-probs of second tokens, every gradient in direction and size."""
    folder = tiny.write(tmp_path / "model", TINY[family], mtp=True)
    reference = Reference(folder, load_file(folder / "model.safetensors"))
    expected = []
    for ids in SEQUENCES:
        logps = reference.logits(ids, trunk=trunk).log_softmax(-1)
        expected.append(logps.gather(1, torch.tensor(ids[2:])[:, None])[:, 0])
    (-torch.cat(expected).sum()).backward()

    trainer = start(folder, trainer={"mtp_loss": 1.0, "mtp_trunk": trunk})
    batch = trainer.passes.pack(samples_of(SEQUENCES))
    assert len(batch) < len(SEQUENCES)
    packed_logps = logps_of(trainer, batch, monkeypatch)
    logp_error = max(float((packed_logps[i] - logps).abs().max()) for i, logps in enumerate(expected))
    single_logps: dict[int, Tensor] = {}
    for i, sample in enumerate(samples_of(SEQUENCES)):
        single_logps |= logps_of(trainer, trainer.passes.pack([sample]), monkeypatch)
        assert float((single_logps[i] - packed_logps[i]).abs().max()) <= 1e-5
    logps_of(trainer, batch, monkeypatch)
    gradients, reference_gradients = gradients_of(trainer), reference.gradients()
    mtp_names = {n for e in entries(trainer.hf) if e.megatron.startswith("mtp.") for n in e.hf}
    cosines = {}
    for name, gradient in gradients.items():
        if name not in mtp_names and not trunk:
            assert not gradient.any(), name
        elif name in reference_gradients and (gradient.any() or reference_gradients[name].any()):
            cosines[name] = cosine(gradient, reference_gradients[name])
            assert float(gradient.norm() / reference_gradients[name].norm()) == pytest.approx(1, rel=1e-3), (
                name
            )
    worst = min(cosines, key=lambda name: cosines[name])
    print(
        f"{family}: log-probs {logp_error:.1e}, {len(cosines)} gradients, least cosine {cosines[worst]:.8f} ({worst})"
    )
    assert mtp_names - cosines.keys() <= {n for n in mtp_names if "bias" in n or ".experts." in n}
    assert logp_error <= LOGPS
    assert cosines[worst] >= COSINE, worst


def test_no_gradient_leaves_the_layer(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    """Three updates of a policy whose gradient is clipped give the bits that they give without the layer, although
    the layer's own gradient is larger; and the layer moves."""
    folder = tiny.write(tmp_path / "model", TINY["deepseek-v3"], mtp=True)
    outcomes = []
    for trained in ({}, {"mtp_loss": 30.0}):
        trainer = start(folder, trainer={**trained, "balance_rate": 0.01})
        batch = replace(trainer.passes.pack, shared="no")(cases.samples())  # as with the layer
        updates = [trainer.update(batch, cases.policy_loss, 1e-3) for _ in range(3)]
        weights = {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}
        outcomes.append(([(u.loss, u.grad_norm, u.sums["gap"].item()) for u in updates], weights))
    (plain, without), (mtp_updates, trained_weights) = outcomes
    assert mtp_updates == plain
    assert min(norm for _, norm, _ in plain) > 1 / 2, "nothing was clipped"
    assert all(torch.equal(trained_weights[name], tensor) for name, tensor in without.items())
    initial_weights = load_file(folder / "model.safetensors")
    moved = [
        n
        for n in trained_weights.keys() - without.keys()
        if not torch.equal(initial_weights[n], trained_weights[n])
    ]
    assert "model.layers.4.eh_proj.weight" in moved and len(moved) > 10


def test_training_reduces_the_loss_and_raises_the_accuracy(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Sequences that repeat themselves: the loss falls, and the second token is guessed more often."""
    folder = tiny.write(tmp_path / "model", TINY["glm-4.5"], mtp=True)
    trainer = start(folder, **TRAINED)
    batch = trainer.passes.pack(samples_of([[5, 17, 40, 61, 80, 33] * 8, [9, 2, 77] * 12]))
    predictions = [trainer.update(batch, no_loss, 5e-3).prediction for _ in range(25)]
    print([(round(s["mtp_loss"], 3), round(s["mtp_accuracy"], 3)) for s in predictions[::6]])
    assert predictions[-1]["mtp_loss"] < 0.3 * predictions[0]["mtp_loss"]
    assert predictions[-1]["mtp_accuracy"] > 0.9 > 0.2 > predictions[0]["mtp_accuracy"]


def test_the_layer_travels_with_the_model(tmp_path: Path) -> None:
    """Folder, checkpoint and export agree bit for bit, with the copies of embedding and head that folders have."""
    folder = tiny.write(tmp_path / "model", TINY["deepseek-v3"], mtp=True)
    source_weights = load_file(folder / "model.safetensors")
    hf_to_megatron(folder, tmp_path / "megatron", {"ep": 2}, lambda *_: None)
    mtp_options = {"trainer": {"mtp_loss": 1.0, "mtp_trunk": True}}
    with cases.trainer_factory(tmp_path / "run") as start:
        for name, source in (("from folder", folder), ("from checkpoint", tmp_path / "megatron")):
            start(source, **TRAINED).export_hf(tmp_path / name)
            export = load_file(tmp_path / name / "model.safetensors")
            assert export.keys() == source_weights.keys()
            assert all(torch.equal(export[key], tensor) for key, tensor in source_weights.items())

        trainer = start(folder, **mtp_options)
        batch = trainer.passes.pack(cases.samples())
        trainer.update(batch, cases.policy_loss, 1e-3)
        cases.save(trainer, 1)
        trainer.export_hf(tmp_path / "exported")
        second = trainer.update(batch, cases.policy_loss, 1e-3)

        trainer = start(folder, **mtp_options, engine={"extra_args": ["--speculative-algorithm", "NEXTN"]})
        drafting = {name for name, _ in trainer.served_tensors()}
        layer_names = {name for name in source_weights if name.startswith("model.layers.4.")}
        assert layer_names - drafting == {
            f"model.layers.4.{copy}.weight" for copy in ("embed_tokens", "shared_head.head")
        }

        trainer = start(folder, **mtp_options)
        assert {name for name, _ in trainer.served_tensors()} == drafting - layer_names
        assert trainer.load_checkpoint() == 1
        again = trainer.update(batch, cases.policy_loss, 1e-3)
        assert (again.loss, again.grad_norm, again.prediction) == (
            second.loss,
            second.grad_norm,
            second.prediction,
        )

    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: {folder}}}\n")
    megatron_to_hf(tmp_path / "run", tmp_path / "back", lambda *_: None)
    exported, back = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "back"))
    assert exported.keys() == back.keys() == source_weights.keys()
    assert all(torch.equal(exported[key], back[key]) for key in exported)
    moved = [key for key in source_weights if not torch.equal(exported[key], source_weights[key])]
    for key in ("eh_proj", "embed_tokens", "shared_head.head", "mlp.experts.0.down_proj"):
        assert f"model.layers.4.{key}.weight" in moved
    assert torch.equal(exported["model.layers.4.shared_head.head.weight"], exported["lm_head.weight"])
    model = HFTensors(folder, HFConfig.read(folder))
    assert verify(tmp_path / "run", tmp_path / "exported", lambda *_: None).tensors == len(model.names) - 2


def test_predicted_tokens_exclude_prompts_and_untrained_tokens() -> None:
    """Two sequences: none of the first two tokens of either, no prompt, nothing that is not trained."""
    micro = MicroBatch.of_tokens(torch.arange(9))
    micro.cu_seqlens = torch.tensor([0, 5, 9], dtype=torch.int32)
    micro.mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 1, 1, 1])
    assert predicted_tokens(micro).nonzero().flatten().tolist() == [2, 4, 7, 8]
