"""Over real processes, in float64: two data-parallel or two context-parallel gloo ranks give the loss, the gradients
and the metrics of one process, for every recipe and every plug-in of the trainer by itself, for several rewards, two
updates of a step and an extra one, all in one launch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.algo.batch import Batch
from rlsys.algo.reduction import single_rank
from rlsys.algo.registry import SECTION_KINDS, TABLE
from rlsys.config import read_layers
from rlsys.config.algo import AlgoSection
from rlsys.trainer.logprobs import align_to_tokens
from rlsys.trainer.model.context_parallel import Share
from tests.helpers.algo_world import Outcome, World, run, unsharded
from tests.helpers.gloo_ranks import on_gloo_ranks

RECIPES = sorted((Path(__file__).resolve().parents[3] / "configs/algorithms").glob("*.yaml"))
TRAINER_SIDE = ("shaping", "advantage", "selectors", "corrections", "loss", "reducer", "hooks")
BOUND = 1e-6
TRAINED = ("logp", "entropy", "values", "divergence")


def cases() -> dict[str, AlgoSection]:
    """Recipes by name, plug-ins with their defaults as field.name."""
    sections = {path.stem: read_layers(path).get("algo", {}) for path in RECIPES}
    for field in TRAINER_SIDE:
        for name in TABLE[SECTION_KINDS[field]]:
            is_single = field in ("advantage", "reducer")
            fields: dict[str, Any] = {"anchor": "old", field: name if is_single else [name]}
            if (field, name) == ("loss", "value"):
                fields["advantage"] = "gae"  # makes its targets
            if (field, name) == ("loss", "adaptive_entropy"):
                fields["loss"] = [{"name": name, "coefficient": 0.1}]  # starts at 0
            sections[f"{field}.{name}"] = fields
    everything = {
        "loss": ["m2po", "kl", "entropy"],
        "corrections": [{"name": "tis", "normalise": True}, "minpro"],
    }
    sections["several"] = {"anchor": "old", "selectors": ["d3s"], "hooks": ["vcpo"], **everything}
    sections["two updates"] = {"anchor": "old", "minibatches": 2, "hooks": ["brorl"], **everything}
    sections["two epochs of two updates"] = {"anchor": "old", "minibatches": 2, "epochs": 2, **everything}
    groups = {"name": "rejection", "level": "group_mean", "high": 0.1}
    sections["groups over two updates"] = {"anchor": "old", "minibatches": 2, "corrections": [groups]}
    sections["few tokens of two updates"] = {
        "minibatches": 2,
        "loss": ["kl_cov", "clip_cov"],
        "selectors": ["top_entropy"],
    }
    normalised = {"corrections": [{"name": "tis", "normalise": True}]}
    sections["two updates between mu and current"] = {
        "anchor": "interpolated",
        "minibatches": 2,
        **normalised,
    }
    sections[EXTRA] = {"selectors": [{"name": "rorecomp", "alpha": 0.5, "capacity": 4}], "minibatches": 2}
    sections[NAMED] = {"advantage": "gdpo"}
    return {name: AlgoSection.model_validate(fields) for name, fields in sections.items()}


EXTRA, NAMED = "an extra update on what was put off", "two rewards"


def world(case: str) -> World:
    """Log-ratios large enough that every bound acts on some tokens; groups of odd size, as mc_grpo wants them."""
    return World(groups=4, size=5, scale=0.5, kinds=2 if case == NAMED else 1, graded="grpo_passk" in case)


def added_up(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total


def through_the_trainers_share(part: Batch, values: Tensor) -> Tensor:
    """What the trainer does under context parallelism: a rank computes the tokens behind those of its chunks."""
    assert dist.group.WORLD is not None
    packed: Any = SimpleNamespace(
        tokens=part.tokens,
        cu_seqlens=part.cu_seqlens,
        computed_lengths=part.cu_seqlens.diff().tolist(),
        prefixes=[],
        targets=None,
        support_at=None,
        support_ids=None,
        teacher_ids=None,
        teacher_logp=None,
    )
    share = Share.of(packed, 1, dist.group.WORLD, torch.device("cpu"))
    behind = values.roll(-1)[share.source.clamp(min=0)]
    return align_to_tokens(share, torch.where(share.source >= 0, behind, torch.zeros_like(behind)))


def whole(rows: list[int]) -> list[list[int]]:
    return [rows]


def one_part_each(rank: int, rows: list[int]) -> list[list[int]]:
    return [[r] for r in rows[rank::2]]


def on_rank(ranks: int, rank: int) -> dict[str, dict[str, Outcome]]:
    outcomes = {}
    for name, algo in cases().items():
        dp = run(world(name), algo, partial(one_part_each, rank), added_up)
        cp = run(world(name), algo, whole, single_rank, through_the_trainers_share)
        outcomes[name] = {"dp2": dp, "cp2": cp}
    return outcomes


def together(ranks: list[Outcome], rows: list[int]) -> dict[int, Tensor]:
    """The gradient of each row, added over the ranks that have any of it."""
    return {r: sum(o.gradients[r] for o in ranks if r in o.gradients) for r in rows}  # type: ignore[misc]


def gaps(one: Outcome, ranks: list[Outcome]) -> dict[str, float]:
    """Largest difference of each figure; a metric that is missing on a rank is as far off as it can be."""
    differences = {"loss": 0.0, "lr_factor": 0.0, "gradients": 0.0}
    for outcome in ranks:
        differences["loss"] = max(differences["loss"], abs(outcome.loss - one.loss))
        differences["lr_factor"] = max(differences["lr_factor"], abs(outcome.lr_factor - one.lr_factor))
        for name in one.metrics.keys() | outcome.metrics.keys():
            values = one.metrics.get(name, torch.inf), outcome.metrics.get(name, torch.inf)
            differences[name] = max(differences.get(name, 0.0), abs(values[0] - values[1]))
    summed = together(ranks, one.rows)
    assert set().union(*(o.gradients for o in ranks)) == set(one.rows)
    for row in one.rows:
        differences["gradients"] = max(
            differences["gradients"], float((summed[row] - one.gradients[row]).abs().max())
        )
    return differences


@pytest.mark.gate  # the cuts of a step in one process: test_algo_objective.py
def test_every_recipe_and_plug_in_is_the_same_on_one_process_dp2_and_cp2(tmp_path: Path) -> None:
    loaded = on_gloo_ranks(2, on_rank, tmp_path)
    wrong, moved = {}, 0
    for name, algo in cases().items():
        reference = run(world(name), algo, whole, share=unsharded)
        moved += any(g.abs().sum() > 0 for g in reference.gradients.values())
        for layout in ("dp2", "cp2"):
            differences = gaps(reference, [rank[name][layout] for rank in loaded])
            if far := {
                figure: difference for figure, difference in differences.items() if not difference <= BOUND
            }:
                wrong[f"{name} on {layout}"] = far
    assert not wrong
    assert moved == len(cases())
