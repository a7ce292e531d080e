"""Adapters: trained alone, merged as they act, saved as PEFT's, and the model under them as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.config import dump_config
from rlsys.convert.hf import write_hf
from rlsys.convert.torch_dist import DistReader
from rlsys.core.errors import RunError
from rlsys.trainer.checkpoints.conversion import megatron_to_hf
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]

STATES = ("exp_avg", "exp_avg_sq", "param")
LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}}


class Products(TorchDispatchMode):
    """Counts the elements that matrix products read: of a weight that is repeated for each token, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.repeated: set[str] = set()
        """Products with an operand that is repeated in memory or not, instead of one product of all tokens."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            operands = [a for a in args if isinstance(a, Tensor)]
            self.elements += sum(a.numel() for a in operands)
            if any(
                n > 1 and not stride for a in operands for n, stride in zip(a.shape, a.stride(), strict=True)
            ):
                self.repeated.add(" x ".join(str(tuple(a.shape)) for a in operands))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def logps_of(model: Any) -> list[float]:
    """transformers' log-probs of the canaries."""
    with torch.no_grad():
        rows = [(ids, model(torch.tensor([ids])).logits[0].log_softmax(-1)) for ids in cases.SEQUENCES]
    return [float(lp[i, ids[i + 1]]) for ids, lp in rows for i in range(len(ids) - 1)]


def from_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def near(a: list[float], b: list[float]) -> bool:
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM"],
)
def test_the_exported_model_has_the_adapters_in_it(
    architecture: str, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """What engines get in a push is the same; so is what transformers computes of it."""
    folder = cases.write_model(tmp_path / "model", architecture)
    trainer = start(folder, trainer=LORA)
    initial_logps = cases.canary_logps(trainer)
    assert near(initial_logps, logps_of(from_folder(folder))), "B begins with zeros"
    cases.randomize_adapters(trainer)
    stirred = cases.canary_logps(trainer)
    assert not near(initial_logps, stirred)
    trainer.export_hf(tmp_path / "merged")
    assert near(stirred, logps_of(from_folder(tmp_path / "merged")))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_peft_loads_them_with_equal_logits(
    architecture: str, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    peft = pytest.importorskip("peft")
    folder = cases.write_model(tmp_path / "model", architecture)
    trainer = start(folder, trainer=LORA)
    cases.randomize_adapters(trainer)
    trainer.export_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(from_folder(folder), tmp_path / "adapter").eval()
    assert near(cases.canary_logps(trainer), logps_of(loaded))


def test_the_folder_is_pefts(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    """Read by hand: W + alpha / rank * B A is what an engine gets."""
    trainer = start(cases.write_model(tmp_path / "model"), trainer=LORA)
    plain = {name: t.clone() for name, t in trainer.named_hf_tensors()}
    cases.randomize_adapters(trainer)
    trainer.export_adapter(tmp_path / "adapter")
    adapter_weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = dict(trainer.named_hf_tensors())
    for name in ("model.layers.1.self_attn.k_proj", "model.layers.3.mlp.experts.5.up_proj"):
        a, b = (adapter_weights[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        assert torch.allclose(merged[f"{name}.weight"], plain[f"{name}.weight"] + 2 * b @ a, atol=1e-6)
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(merged[router], plain[router])


def base_of(trainer: Trainer) -> dict[str, Tensor]:
    return {
        name: weight.detach().clone()
        for name, weight in trainer._chunks.named_weights()
        if not name.startswith("adapters.")
    }


def test_only_adapters_are_trained_saved_and_used_as_reference(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    trainer = start(cases.write_model(tmp_path / "model"), trainer=LORA)
    base_before, plain = base_of(trainer), cases.canary_logps(trainer)
    first = {name: p.detach().clone() for name, p in trainer.named_parameters()}
    assert all(name.startswith("adapters.") for name in first)
    losses = [step[0] for step in cases.steps(trainer, 4, 1e-2)]
    assert losses == sorted(losses, reverse=True), "it learns"
    base_after = base_of(trainer)
    assert all(torch.equal(base_before[name], base_after[name]) for name in base_before), "bit for bit"
    with trainer.with_weights(first):
        assert cases.canary_logps(trainer) == plain, "the first adapters are the model itself"
    assert cases.canary_logps(trainer) != plain
    cases.save(trainer, 4)
    saved_shapes = DistReader(tmp_path / "run/checkpoints/step-000004").shapes
    assert {key.split("adapters.")[0] for key in saved_shapes} <= {
        "",
        *(f"optimizer.state.{x}." for x in STATES),
    }
    assert sum(prod(shape) for key, shape in saved_shapes.items() if key.startswith("adapters.")) == sum(
        p.numel() for p in first.values()
    )


def test_training_resumes_bit_for_bit_from_a_checkpoint(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    folder = cases.write_model(tmp_path / "model")
    trainer = start(folder, trainer=LORA)
    cases.steps(trainer, 2)
    cases.save(trainer, 2)
    expected = cases.steps(trainer, 2), cases.weight_sums(trainer)
    trainer = start(folder, trainer=LORA)
    assert trainer.load_checkpoint() == 2
    assert (cases.steps(trainer, 2), cases.weight_sums(trainer)) == expected


def test_a_model_that_changed_under_its_adapters_is_noticed(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """By one bit: before a checkpoint is written, and when one is loaded beside another model."""
    folder = cases.write_model(tmp_path / "model")
    trainer = start(folder, trainer=LORA)
    tensors = {name: t.clone() for name, t in trainer.named_hf_tensors()}
    cases.steps(trainer, 1)
    cases.save(trainer, 1)
    weight = dict(trainer._chunks.named_weights())["decoder.layers.2.mlp.router.weight"].detach().view(-1)
    weight[5:6].view(torch.int32).bitwise_xor_(1)
    with pytest.raises(RunError, match=r"trainer.lora: frozen weights have changed"):
        cases.save(trainer, 2)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"][1, 2].view(torch.int32).bitwise_xor_(1)
    write_hf(tmp_path / "other", folder, tensors.items())
    with pytest.raises(RunError, match=r"its adapters were trained with another base model than model.path"):
        start(tmp_path / "other", trainer=LORA).load_checkpoint()


def test_a_checkpoint_without_adapters_is_refused(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    """A run folder refuses another `trainer.lora` before that; this is who copies a checkpoint by hand."""
    folder = cases.write_model(tmp_path / "model")
    cases.save(start(folder), 1)
    with pytest.raises(RunError, match="the checkpoint cannot be loaded"):
        start(folder, trainer=LORA).load_checkpoint()


def test_a_runs_checkpoint_converts_to_the_merged_model(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    trainer = start(cases.write_model(tmp_path / "model"), trainer=LORA)
    cases.randomize_adapters(trainer)
    cases.save(trainer, 1)
    (tmp_path / "run/config.yaml").write_text(dump_config(trainer.config))
    trainer.export_hf(tmp_path / "expected")
    trainer.close()
    megatron_to_hf(tmp_path / "run", tmp_path / "made", lambda done, total: None)
    expected, converted_weights = (
        load_file(tmp_path / x / "model.safetensors") for x in ("expected", "made")
    )
    assert expected.keys() == converted_weights.keys()
    assert all(torch.equal(expected[name], converted_weights[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_adapters_reads_no_more_than_a_whole_one(
    dtype: str, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Thirty layers and a real vocabulary. One product for all tokens, also where a weight is frozen."""
    sizes = {"num_hidden_layers": 30, "vocab_size": 50_000, "initializer_range": 0.05}
    folder = cases.write_model(tmp_path / "model", "LlamaForCausalLM", **sizes)
    read: dict[str, int] = {}
    for name, section in (("whole", {}), ("adapters", LORA)):
        trainer = start(folder, model={"path": folder, "dtype": dtype}, trainer=section)
        batch = trainer.passes.pack(cases.samples(50_000, 3))
        with Products() as products:
            cases.canary_logps(trainer)
            trainer.update(batch, cases.policy_loss, 1e-3)
        assert not products.repeated, name
        read[name] = products.elements
    assert read["adapters"] <= read["whole"]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_no_frozen_weight_is_multiplied_token_by_token(
    architecture: str, tied: bool, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Under adapters, and where nothing at all is trained: a reference, a teacher, a reward model."""
    folder = cases.write_model(tmp_path / "model", architecture, tie_word_embeddings=tied)
    for section in (LORA, {}):
        trainer = start(folder, trainer=section)
        batch = trainer.passes.pack(cases.samples())
        with Products() as products:
            cases.canary_logps(trainer)
            trainer.update(batch, cases.policy_loss, 1e-3)
            for _, weight in trainer.named_parameters():
                weight.requires_grad_(False)
            cases.canary_logps(trainer)
        assert not products.repeated, architecture
