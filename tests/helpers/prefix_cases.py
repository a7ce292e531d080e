"""Comparison of shared prefixes with separate computation, on batches whose sequences have common prefixes.

Under torchrun, `-m tests.helpers.prefix_cases WORKPLACE LAYOUT...` compares them in other parallel layouts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.core.spans import RouteSpan
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer, finalize_model_grads
from tests.helpers import trainer_cases as cases

BUDGET = 512
VOCAB = 96


def samples(groups: int = 3, size: int = 4) -> list[TrainSample]:
    """Return groups of samples with common prefixes.

    All prompts begin with the same tokens. In each group, two responses have a common prefix, and one sample has a
    second turn.
    """
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    template, out = ids(3), []
    for g in range(groups):
        prompt = [*template, *ids(rng.randint(9, 21))]
        responses = [ids(rng.randint(1, 40)) for _ in range(size - 1)]
        responses.append([*responses[0][: 1 + len(responses[0]) // 2], *ids(5)])
        for i, response in enumerate(responses):
            out.append(_sample(prompt, response, g * size + i, rng))
        out.append(_sample([*prompt, *responses[1], *ids(4)], ids(7), g * size + 1, rng, place=1))
    return out


def _sample(
    prompt: list[int], response: list[int], row: int, rng: random.Random, place: int = 0
) -> TrainSample:
    mu = [-abs(rng.gauss(4.5, 0.5)) for _ in response]
    return TrainSample(prompt, response, mu, [0] * len(response), row, sequence_index=place)


def with_routes(plain: list[TrainSample]) -> list[TrainSample]:
    """Add random routes. Prompt tokens after equal prefixes have equal routes."""
    out = []
    for i, s in enumerate(plain):
        tokens, rows = [*s.prompt_ids, *(int(t) for t in s.response_ids)], b""
        for n in range(1, len(s)):
            in_prompt = n <= len(s.prompt_ids)
            rng = random.Random(f"{tokens[:n]}{'' if in_prompt else i}")
            rows += bytes(e for _ in range(4) for e in rng.sample(range(8), 2))
        out.append(dataclasses.replace(s, routes=(RouteSpan(0, len(s) - 1, rows),)))
    return out


def batch_for(trainer: Trainer, shared: bool) -> list[MicroBatch]:
    plain = samples()
    if trainer.config.trainer.replay == "engine":
        plain = with_routes(plain)
    if trainer.config.rollout.top_k:
        plain = cases.with_support(plain)
    pack = trainer.passes.pack
    return (pack if shared else dataclasses.replace(pack, shared="no"))(plain)


def loss_of(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a policy loss with terms for the entropy and the values, and the metrics of the policy loss."""
    loss, sums = cases.policy_loss(scores, micro)
    if scores.entropy is not None:
        loss = loss - 0.1 * (scores.entropy * micro.mask).sum()
    if scores.values is not None:
        loss = loss + 0.1 * ((scores.values - 1.0) ** 2 * micro.mask).sum()
    return loss, sums


def by_row(trainer: Trainer, batch: list[MicroBatch], values: list[Tensor]) -> dict[str, list[float]]:
    """Gather values of all ranks per sequence, by "ROW.SEQUENCE_INDEX", without copies."""
    out = {}
    for micro, micro_values in zip(batch, values, strict=True):
        parts = micro_values.split(micro.sequence_lengths)
        for row, index, part in zip(micro.rows.tolist(), micro.sequence_index, parts, strict=True):
            if not micro.copy:
                out[f"{row}.{index}"] = part.tolist()
    return {row: part for rank_values in trainer.gather_dp(out) for row, part in rank_values.items()}


def run_passes(trainer: Trainer, shared: bool) -> dict[str, Any]:
    """Return the results of a scoring pass and a backward pass, with the gradients of this rank's optimizers."""
    batch = batch_for(trainer, shared)
    scores = trainer.passes.score(batch)
    out: dict[str, Any] = {"logp": by_row(trainer, batch, [s.logp for s in scores])}
    if scores[0].entropy is not None:
        out["entropy"] = by_row(trainer, batch, [s.entropy for s in scores if s.entropy is not None])
    biases_before = [bias.clone() for bias in trainer._expert_biases]
    trainer.passes.accumulate(batch, loss_of)
    finalize_model_grads(trainer.models, None)
    out["biases"] = [bias.tolist() for bias in trainer._expert_biases]
    for bias, value in zip(trainer._expert_biases, biases_before, strict=True):
        bias.copy_(value)
    trainer.optimizer.prepare_grads()
    optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    groups = [g for o in optimizers if not o.is_stub_optimizer for g in o.optimizer.param_groups]
    out["gradients"] = [p.grad.clone() for g in groups for p in g["params"]]
    totals = trainer.passes.take_accumulated()
    out["loss"] = float(totals.sums["loss_sum"])
    out["shared_share"] = totals.shared_share
    out["routing"] = trainer._routing.metrics(trainer._device)
    trainer.optimizer.zero_grad()
    return out


def gaps(trainer: Trainer) -> dict[str, Any]:
    """Return the differences between passes with shared prefixes and passes without."""
    cases.randomize_adapters(trainer)
    return compare(run_passes(trainer, False), run_passes(trainer, True))


def compare(alone: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the largest differences between two results of `run_passes`."""
    differences: dict[str, Any] = {}
    for name in ("logp", "entropy"):
        if name in alone:
            assert alone[name].keys() == shared[name].keys()
            differences[name] = max(
                (torch.tensor(a) - torch.tensor(shared[name][row])).abs().max().item()
                for row, a in alone[name].items()
            )
    differences["gradient"] = max(
        ((a - b).abs().max() / a.abs().max().clamp(min=1.0)).item()
        for a, b in zip(alone["gradients"], shared["gradients"], strict=True)
        if a.numel()
    )
    differences["largest gradient"] = max(float(a.abs().max()) for a in alone["gradients"] if a.numel())
    differences["loss"] = abs(alone["loss"] - shared["loss"]) / max(1.0, abs(alone["loss"]))
    differences["biases"] = alone["biases"] == shared["biases"]
    differences["routing"] = alone["routing"], shared["routing"]
    return differences | {"share": shared["shared_share"], "without": alone["shared_share"]}


def check(layout: str, gaps: dict[str, Any]) -> None:
    """Assert that the passes share prefixes and differ only by rounding errors."""
    assert gaps["share"] > 0.2, layout
    assert gaps["without"] == 0
    check_rounding(layout, gaps)


def check_rounding(layout: str, gaps: dict[str, Any]) -> None:
    assert gaps["largest gradient"] > 1e-2, layout
    for name in ("logp", "entropy", "loss", "gradient"):
        assert gaps[name] < 1e-5, (layout, name, gaps)
    assert gaps["biases"], layout
    unshared, shared = gaps["routing"]
    assert shared.keys() == unshared.keys(), layout
    assert all(math.isclose(shared[name], unshared[name], rel_tol=1e-6) for name in unshared), layout


def trainer_of(workplace: Path, layout: str) -> Trainer:
    sections = cases.sections(layout)
    sections["trainer"]["token_budget"] = BUDGET
    kind = next((k for k in MODELS if k in layout), None)
    folder = workplace / (kind or cases.model_name(layout))
    return Trainer(cases.config_of(folder, workplace / "run-prefixes", **sections), ("entropy",))


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "Qwen3ForCausalLM"},
    "windows": {"architecture": "GptOssForCausalLM"},
}


def main(workplace: Path, layouts: list[str]) -> None:
    for layout in layouts:
        trainer = trainer_of(workplace, layout)
        rank_gaps = trainer.gather_dp(gaps(trainer))
        if trainer.is_main:
            with (workplace / "gaps.jsonl").open("a") as file:
                file.write(json.dumps([layout, rank_gaps]) + "\n")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
