"""The trainer against a float64 model that is written from the formulas (tests/helpers/float64_model.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsys.segments import teacher_logprobs
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.routing import decode
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer
from tests.helpers import float64_model
from tests.helpers import trainer_cases as cases
from tests.helpers.float64_model import Float64Model

pytestmark = [pytest.mark.integration, pytest.mark.full]

LAYERS, TOPK = 4, 2
TEACHER_TOP_K = 5
LORA_SCALE = 8 / 4
"""alpha / rank of `cases.sections`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workplace = tmp_path_factory.mktemp("audits")
    return cases.write_model(workplace / "model")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def row_weight(row: int) -> float:
    return (-1) ** row * (0.5 + row / 10)


def weighed_loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum of w_row log p over response tokens."""
    weights = torch.tensor([row_weight(row) for row in micro.rows.tolist()])
    return -(micro.masked(scores.logp) * weights[micro.ids]).sum(), {}


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """What the buffers hold, under the folder's names. It cannot train any more."""
    with torch.no_grad():
        for _, parameter in trainer.named_parameters():
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    return {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}


def assert_equal_gradients(mine: dict[str, Tensor], model: Float64Model) -> None:
    """Each tensor to 1e-4 of its norm; an expert that no token took has none in either."""
    worst = ("", 0.0)
    for name, weight in model.weights.items():
        reference_gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        size = float(reference_gradient.norm())
        off = float((mine[name].double() - reference_gradient).norm())
        assert off <= 1e-4 * size + 1e-9, (name, off, size)
        worst = max(worst, (name, off / size if size else 0.0), key=lambda pair: pair[1])
    print(f"{len(model.weights)} gradients, the farthest {worst[1]:.1e} of its norm: {worst[0]}")


def test_router_gradients_with_replayed_routes(folder: Path, start: Callable[..., Trainer]) -> None:
    """Random experts, that no router would choose: their weights are softmax scores of the router, among the replayed
    ones. A sample without routes takes the router's own choice. Every gradient, those of routers among them."""
    samples = cases.with_routes(cases.samples(n=6))
    trainer = start(folder, trainer={"replay": "engine"}, engine={"return_routes": True})
    batch = trainer.passes.pack(samples)
    for module in trainer.models:
        module.zero_grad_buffer()
    trainer.passes.accumulate(batch, weighed_loss)

    model = Float64Model(folder)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = [*map(int, sample.prompt_ids), *map(int, sample.response_ids)]
        routes = decode(sample.routes, len(ids) - 1, LAYERS, TOPK) if sample.routes else None
        logp = model.token_logprobs(ids, routes)[len(sample.prompt_ids) - 1 :]
        total = total - row_weight(sample.row) * logp.sum()
    total.backward()
    gradients = gradients_of(trainer)
    assert all(gradients[f"model.layers.{i}.mlp.gate.weight"].norm() > 1e-3 for i in range(LAYERS))
    assert_equal_gradients(gradients, model)


def kl_with_rest(policy: Tensor, ids: list[int], teacher: list[float], direction: float) -> Tensor:
    """Of cells: each of the teacher's most probable tokens, and all others together. policy `[V]` log-probs."""
    p = torch.stack([policy[i].exp() for i in ids])
    p = torch.cat([p, 1 - p.sum(0, keepdim=True)])
    q = torch.tensor(teacher, dtype=torch.float64).exp()
    q = torch.cat([q, 1 - q.sum(0, keepdim=True)])
    if direction == 1:
        return (p * (p / q).log()).sum()
    if direction == 0:
        return (q * (q / p).log()).sum()
    m = direction * q + (1 - direction) * p
    return direction * (q * (q / m).log()).sum() + (1 - direction) * (p * (p / m).log()).sum()


def divergences(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    assert scores.divergence is not None
    return micro.masked(scores.divergence).sum(), {}


@pytest.mark.parametrize("direction", [0.0, 0.3, 1.0])
def test_the_rest_behind_an_engine_teachers_most_probable_tokens(
    direction: float, folder: Path, start: Callable[..., Trainer]
) -> None:
    """The teacher's answers are made up: ids in the order of their probability, whose rest is 2 to 60 %."""
    generator = torch.Generator().manual_seed(5)
    plain, taught, teacher_answers = cases.samples(n=6), [], []
    for sample in plain:
        n = len(sample.response_ids)
        logits = torch.randn(n, 96, generator=generator, dtype=torch.float64) * 2.5
        logp, ids = logits.log_softmax(-1).topk(TEACHER_TOP_K)
        encoded_logprobs = teacher_logprobs.encode(
            ids.numpy().astype(np.int32), logp.numpy().astype(np.float32)
        )
        taught.append(
            TrainSample(
                sample.prompt_ids,
                sample.response_ids,
                sample.mu,
                [0] * n,
                sample.row,
                teacher_logprobs=encoded_logprobs,
            )
        )
        teacher_answers.append((ids.tolist(), logp.float().tolist()))
    teacher = {
        "path": folder,
        "engine": "http://127.0.0.1:1",
        "top_k": TEACHER_TOP_K,
        "direction": direction,
    }
    trainer = start(folder, algo={"loss": ["distill"], "teacher": teacher})
    batch = trainer.passes.pack(taught)
    for module in trainer.models:
        module.zero_grad_buffer()
    trainer.passes.accumulate(batch, divergences)

    model = Float64Model(folder)
    total, rests = torch.zeros((), dtype=torch.float64), []
    for sample, (best, chances) in zip(plain, teacher_answers, strict=True):
        everything = [*map(int, sample.prompt_ids), *map(int, sample.response_ids)]
        table = model.logprobs(everything)[len(sample.prompt_ids) - 1 : -1]
        for row, top_ids, top_logprobs in zip(table, best, chances, strict=True):
            total = total + kl_with_rest(row, top_ids, top_logprobs, direction)
            rests.append(1 - float(np.exp(top_logprobs).sum()))
    assert min(rests) < 0.05 and max(rests) > 0.5
    total.backward()
    assert_equal_gradients(gradients_of(trainer), model)


LAYOUTS = ("tp=2,lora", "ep=2,lora", "tp=2,ep=2,etp=1,lora")


def test_adapters_merged_from_tensor_and_expert_parallel_ranks(folder: Path) -> None:
    """Each merged tensor is W + alpha / rank B A; the float64 model of the merged folder has the ranks' log-probs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command += ["-m", float64_model.__name__, str(folder.parent), *LAYOUTS]
    subprocess.run(command, check=True, env=env)
    plain = load_file(folder / "model.safetensors")
    for layout in LAYOUTS:
        merged: dict[str, Tensor] = {}
        for part in sorted((folder.parent / f"merged-{layout}").glob("*.safetensors")):
            merged |= load_file(part)
        adapter_tensors = load_file(folder.parent / f"adapter-{layout}" / "adapter_model.safetensors")
        expected: dict[str, Tensor] = {}
        adapted = 0
        for name, weight in plain.items():
            factors = [
                adapter_tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight")
                for x in "AB"
            ]
            expected[name] = weight.double()
            if factors[0] is not None and factors[1] is not None:
                adapted += 1
                expected[name] = expected[name] + LORA_SCALE * factors[1].double() @ factors[0].double()
            assert float((merged[name].double() - expected[name]).abs().max()) <= 1e-6, (layout, name)
        assert adapted == len(adapter_tensors) // 2 and adapted >= LAYERS * (4 + 3 * 8)
        model = Float64Model(folder, expected)
        with torch.no_grad():
            logps = [x for ids in cases.SEQUENCES for x in model.token_logprobs(ids).tolist()]
        rank_logps = json.loads((folder.parent / f"logps-{layout}.json").read_text())
        assert rank_logps == pytest.approx(logps, abs=1e-5), layout
