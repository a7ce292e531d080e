"""Metamorphic fuzz test of objectives: random valid objectives on edge-case batches, and RULES that hold for them.

Each rule transforms a case in a way that must not change its loss and gradients. A case is a function of its number.
`violations` runs a case unchanged and after the transformation of each rule that applies to it. EXEMPT lists the
methods for which a rule does not hold, with the reason; tests/unit/algo/test_objective_fuzz.py checks these
exemptions against values computed by hand.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.preflight import check
from rlsys.config import Config, read_layers
from rlsys.config.algo import AlgoSection
from rlsys.core.errors import UserError
from tests.helpers.algo_world import DOUBLE, Outcome, World, on_ranks, run

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
SEEDS = 20261126
BOUND = 1e-7
"""Largest relative difference of losses and gradients, as a share of the largest gradient."""

LOSSES = (
    "clip", "dual_clip", "gspo", "luspo", "gmpo", "cispo", "sapo", "reinforce", "m2po",
    {"name": "m2po", "form": "mask"}, "bapo", "dppo", "dro", "topr", {"name": "topr", "level": "token"}, "vespo",
    "clip_cov", "kl_cov", "echo_clip",
)  # fmt: skip
EXTRA = (
    "kimi", "kl", {"name": "kl", "gradient": "ratio"}, {"name": "kl", "kind": "k2"}, "adaptive_kl", "entropy",
    {"name": "adaptive_entropy", "coefficient": 0.1}, "positive_nll", "value",
)  # fmt: skip
ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "gdpo", "lite_ppo", "maxrl", "opo", "grpo_passk", "gpg",
    {"name": "gpg", "counts": "rewarded"}, "reinforce_pp", {"name": "reinforce_pp", "beta": 0.1},
    "reinforce_pp_baseline", "branch_grpo", "gae", {"name": "gae", "whiten": False}, {"name": "gae", "alpha": 1.0},
    "mssr", "mapo", "ui_s1", "vcpo", "optimal_token_baseline", "gapo", "mc_grpo", "xrpo", "puzzlecraft",
    "outcome_exploration",
)  # fmt: skip
CORRECTIONS = (
    "tis", {"name": "tis", "level": "sequence", "cap": 8.0}, {"name": "tis", "normalise": True}, "icepop",
    {"name": "icepop", "level": "geometric", "low": 0.9, "high": 1.1, "weighted": False},
    {"name": "icepop", "veto": 0.3}, {"name": "icepop", "normalise": True}, "opsm",
    {"name": "decoupled_ppo", "above": "clamp"}, "minpro",
    {"name": "rejection", "kind": "k1", "level": "token", "low": -0.5, "high": 0.5},
    {"name": "rejection", "kind": "k3", "level": "sequence_mean", "high": 0.1},
    {"name": "rejection", "kind": "k2", "level": "group_max", "high": 0.5},
    {"name": "rejection", "kind": "k3", "level": "group_mean", "high": 0.1},
)  # fmt: skip
SELECTORS = (
    "d3s", {"name": "d3s", "denominator": "all"}, {"name": "d3s", "tokens_start": 1.0}, "overlong_filter",
    {"name": "overlong_filter", "denominator": "kept"}, "top_entropy", "unsure_turns", "ttrl",
    {"name": "grpo_roc", "penalty": "length"}, {"name": "rorecomp", "capacity": 4, "alpha": 0.5},
)  # fmt: skip
SHAPING = ({"name": "overlong", "cap": 9, "buffer": 4}, "kl_reward", {"name": "kl_reward", "kind": "k3"})
BATCHES = (
    "plain", "graded", "all filtered", "few left", "group of one", "equal rewards", "rounded rewards", "holes",
    "several sequences", "two groups alike",
)  # fmt: skip


def name_of(spec: Any) -> str:
    return spec if isinstance(spec, str) else str(spec["name"])


@dataclass
class Case:
    """An objective (`algo`), the kind of its batch and the batch itself (`world`)."""

    number: int
    algo: dict[str, Any]
    batch: str
    world: World
    section: AlgoSection = field(init=False)

    def __post_init__(self) -> None:
        self.section = AlgoSection.model_validate(self.algo)

    @property
    def methods(self) -> set[str]:
        """Names of all plug-ins, and `NAME PARAMETER VALUE` of each parameter, for exemptions."""
        names = set()
        for entry in self.algo.values():
            for spec in entry if isinstance(entry, list) else [entry]:
                if isinstance(spec, str):
                    names.add(spec)
                elif isinstance(spec, dict):
                    names.add(spec["name"])
                    names |= {f"{spec['name']} {k} {v}" for k, v in spec.items() if k != "name"}
        return names

    def __str__(self) -> str:
        return f"case {self.number}, {self.batch}: {self.algo}"


@cache
def _base() -> dict[str, Any]:
    return read_layers(QUICKSTART)


def draw_case(number: int) -> Case:
    """Draw objectives and batches with this number as the seed until the objective is valid."""
    r = random.Random(SEEDS * 1_000_003 + number)
    while True:
        algo = _algo(r)
        batch = r.choice(BATCHES)
        try:
            check(_config(algo))
        except UserError:
            continue
        except ValueError:  # pydantic refuses the config
            continue
        return Case(number, algo, batch, _world(batch, algo, r))


def _algo(r: random.Random) -> dict[str, Any]:
    def some(entries: Sequence[Any], counts: Sequence[int]) -> list[Any]:
        return copy.deepcopy(r.sample(list(entries), r.choice(counts)))

    loss, advantage = some(LOSSES, [1] * 9 + [2]), copy.deepcopy(r.choice(ADVANTAGES))
    loss += some(EXTRA, [0, 0, 0, 1, 1, 2])
    if name_of(advantage) == "gae" and "value" not in loss:
        loss.append("value")
    reducer: Any = {
        "name": r.choice(["token_mean", "sequence_mean", "constant"]),
        "over": r.choice(["all", "all", "active"]),
    }
    if {name_of(x) for x in loss} & {"gspo", "luspo", "gmpo"}:
        reducer["name"] = "sequence_mean"
    anchor = r.choice(["mu", "old", "old", "behaviour", "interpolated", "ewma"])
    hooks = (
        ["ewma"]
        if anchor == "ewma"
        else r.choice([[], [], [], ["vcpo"], [{"name": "brorl", "samples": 100}]])
    )
    algo = {
        "loss": loss, "advantage": advantage, "reducer": reducer, "anchor": anchor, "hooks": hooks,
        "corrections": some(CORRECTIONS, [0, 0, 1, 1, 2]), "selectors": some(SELECTORS, [0, 0, 1, 1, 2]),
        "shaping": some(SHAPING, [0, 0, 0, 1]),
        "minibatches": r.choice([1, 1, 1, 2]), "epochs": r.choice([1, 1, 1, 2]),
    }  # fmt: skip
    if name_of(advantage) == "mc_grpo":
        algo["planners"] = ["mc_grpo"]
    return algo


def _config(algo: dict[str, Any]) -> Config:
    data = copy.deepcopy(_base())
    data["algo"] = {**data.get("algo", {}), **algo}
    name = name_of(algo["advantage"])
    if name == "branch_grpo":
        data["rollout"]["generator"] = "latr"
    if name in ("mapo", "ui_s1"):
        connector = "rlsys.environments.connectors.second_try:SecondTry"
        data["rollout"]["generator"] = "environment"
        data["rollout"]["generator_params"] = {"connector": connector, "max_turns": 2}
        data["data"]["reward"] = "environment"
    return Config.model_validate(data)


# -- batches ------------------------------------------------------------------------------------------------


def _world(batch: str, algo: dict[str, Any], r: random.Random) -> World:
    size = 1 if batch == "group of one" else 5
    graded = batch == "graded" or "grpo_passk" in name_of(algo["advantage"])
    world = World(seed=r.randrange(10**6), groups=4, size=size, scale=0.5, graded=graded)
    n = len(world.samples)
    changes: dict[str, Tensor] = {"sample_ids": torch.tensor(r.sample(range(10**6), n))}
    if batch == "all filtered":
        changes["truncated"] = torch.ones(n, dtype=torch.bool)
    if batch == "few left":
        changes["truncated"] = torch.arange(n) % size > 0
    if batch == "equal rewards":
        changes["rewards"] = torch.full((n,), 0.7, dtype=DOUBLE)
    if batch == "rounded rewards":
        changes["rewards"] = 0.7 + 1e-9 * torch.arange(n, dtype=DOUBLE)
    if batch == "two groups alike":
        rewards = world.samples.rewards.clone()
        rewards[size : 2 * size] = rewards[:size]
        changes["rewards"] = rewards
    world.samples = replace(world.samples, **changes)  # type: ignore[arg-type]
    if batch == "holes":
        world = with_holes(world, r)
    return split(world, [r.choice([1, 2, 3]) for _ in range(n)]) if batch == "several sequences" else world


def with_holes(world: World, r: random.Random) -> World:
    """Mask some response tokens, as observations of tools and tokens above the staleness limit are."""
    out = _copy(world)
    for sequence in out.sequences:
        trained = (sequence["mask"] > 0).nonzero().flatten().tolist()
        for position in trained:
            if len(trained) > 1 and r.random() < 0.2 and sequence["mask"].sum() > 1:
                sequence["mask"][position] = 0
    lengths = torch.tensor([int(s["mask"].sum()) for s in out.sequences])
    out.samples = replace(out.samples, lengths=lengths)
    return out


def split(world: World, pieces: Sequence[int]) -> World:
    """Split each sample into at most `pieces[row]` sequences, each with the sample's two prompt tokens."""
    out = _copy(world)
    for row, piece_count in enumerate(pieces):
        sequence, length = out.sequences[row], len(out.sequences[row]["mask"])
        count = min(piece_count, length - 2)
        cuts = [2 + (length - 2) * k // count for k in range(count + 1)]
        prompt = {k: v[:2] for k, v in sequence.items()}
        parts = [{k: torch.cat([prompt[k], v[a:b]]) for k, v in sequence.items()} for a, b in pairwise(cuts)]
        out.sequences[row] = {k: torch.cat([p[k] for p in parts]) for k in sequence}
        out.spans[row] = [len(p["mask"]) for p in parts]
    return out


def _copy(world: World) -> World:
    out = copy.copy(world)
    out.sequences = [{k: v.clone() for k, v in s.items()} for s in world.sequences]
    out.spans = [list(s) for s in world.spans]
    return out


def _take(world: World, rows: Sequence[int]) -> World:
    out = copy.copy(world)
    out.sequences = [world.sequences[i] for i in rows]
    out.spans = [world.spans[i] for i in rows]
    out.samples = world.samples.take(torch.tensor(list(rows)))
    return out


# -- rules --------------------------------------------------------------------------------------------------


def one_micro_batch(rows: list[int]) -> list[list[int]]:
    return [rows]


def micro_batches(k: int, rows: list[int]) -> list[list[int]]:
    cuts = [len(rows) * i // k for i in range(k + 1)]
    return [rows[a:b] for a, b in pairwise(cuts) if b > a]


def singles(rows: list[int]) -> list[list[int]]:
    return [[r] for r in rows]


def differences(
    one: Outcome, other: Outcome, rows: Callable[[int], int] = lambda r: r, bound: float = BOUND
) -> str:
    """Return where the losses or the gradients of trained tokens differ, or "" if they are equal within the bound.

    Args:
        one: The outcome of the unchanged case.
        other: The outcome after a transformation.
        rows: Map a row of `one` to its row in `other`.
        bound: Largest relative difference.
    """
    scale = max((float(g.abs().max()) for g in one.gradients.values()), default=0.0) or 1.0
    if abs(one.loss - other.loss) > bound * max(1.0, abs(one.loss), scale):
        return f"loss {one.loss:.10g}, {other.loss:.10g}"
    of_other = {row: g[:, g.abs().sum(0) != 0] for row, g in other.gradients.items()}
    moved = {rows(row): g[:, g.abs().sum(0) != 0] for row, g in one.gradients.items()}
    for row in sorted({*moved, *of_other}):
        a, b = (gradients.get(row, torch.zeros(4, 0, dtype=DOUBLE)) for gradients in (moved, of_other))
        if a.shape != b.shape:
            return f"row {row}: {a.shape[1]} tokens have a gradient, {b.shape[1]}"
        if a.numel() and float((a - b).abs().max()) > bound * scale:
            return f"row {row}: gradient differs by {float((a - b).abs().max()) / scale:.2e} of the largest"
    return ""


def with_algo(case: Case, **changes: Any) -> AlgoSection | None:
    """Return the objective with these changes, or None if the changed objective is invalid."""
    algo = {**case.algo, **changes}
    try:
        check(_config(algo))
    except (UserError, ValueError):
        return None
    return AlgoSection.model_validate(algo)


def other_micro_batches(case: Case, one: Outcome) -> str:
    cut = (partial(micro_batches, 2), partial(micro_batches, 5), singles)[case.number % 3]
    return differences(one, run(case.world, case.section, cut))


def uneven_ranks(case: Case, one: Outcome) -> str:
    if len(one.rows) < 3 * case.section.minibatches or "rorecomp" in case.methods:
        return ""

    def rows_of(rank: int, rows: list[int]) -> list[list[int]]:
        rank_rows = [r for i, r in enumerate(rows) if (i % 3 != 2) == (rank == 0)]
        return singles(rank_rows) or [[]]

    ranks = on_ranks(2, lambda rank, reduce: run(case.world, case.section, partial(rows_of, rank), reduce))
    combined_outcome = copy.copy(ranks[0])
    combined_outcome.gradients = ranks[0].gradients | ranks[1].gradients
    return differences(one, combined_outcome)


def permuted_rows(case: Case, one: Outcome) -> str:
    r, size = random.Random(case.number), case.world.size
    groups = list(range(case.world.groups))
    r.shuffle(groups)
    order = []
    for g in groups:
        members = list(range(g * size, (g + 1) * size))
        if "branch_grpo" not in case.methods:
            r.shuffle(members)
        order += members
    back = {old: new for new, old in enumerate(order)}
    return differences(one, run(_take(case.world, order), case.section, one_micro_batch), back.__getitem__)


def term_of_weight_0(case: Case, one: Outcome) -> str:
    terms = (
        {"name": "kl", "beta": 0.0}, {"name": "kimi", "tau": 0.0}, {"name": "positive_nll", "coefficient": 0.0},
        {"name": "entropy", "coefficient": 0.0},
    )  # fmt: skip
    term = terms[case.number % len(terms)]
    if term["name"] in {name_of(x) for x in case.algo["loss"]}:
        return ""
    algo = with_algo(case, loss=[*case.algo["loss"], term])
    return "" if algo is None else differences(one, run(case.world, algo, one_micro_batch))


def selector_without_effect(case: Case, one: Outcome) -> str:
    selector = {"name": ("top_entropy", "unsure_turns")[case.number % 2], "share": 1.0}
    if selector["name"] in {name_of(x) for x in case.algo["selectors"]}:
        return ""
    algo = with_algo(case, selectors=[*case.algo["selectors"], selector])
    return "" if algo is None else differences(one, run(case.world, algo, one_micro_batch))


def kl_reward_of_weight_0(case: Case, one: Outcome) -> str:
    """A KL reward of weight 0 needs a signal that arrives late, and changes nothing."""
    algo = with_algo(case, shaping=[*case.algo["shaping"], {"name": "kl_reward", "beta": 0.0}])
    return "" if algo is None else differences(one, run(case.world, algo, one_micro_batch))


def duplicated_batch(case: Case, one: Outcome) -> str:
    """The batch twice has the same mean loss, and each copy has half of the gradient."""
    n = len(case.world.samples)
    world = _take(case.world, [*range(n), *range(n)])
    groups, ids = world.samples.group_ids.clone(), world.samples.sample_ids
    groups[n:] += case.world.groups
    assert ids is not None
    world.samples = replace(world.samples, group_ids=groups, sample_ids=torch.cat([ids[:n], ids[:n] + 10**7]))
    world.groups = 2 * case.world.groups
    outcome = run(world, case.section, one_micro_batch)
    outcome.gradients = {row: 2 * g for row, g in outcome.gradients.items() if row < n}
    return differences(one, outcome)


def scaled_rewards(case: Case, one: Outcome) -> str:
    """Four times the rewards give four times the gradient, or the same gradient if the advantage is normalised by a
    standard deviation, except for its eps."""
    world = _take(case.world, range(len(case.world.samples)))
    world.samples = replace(world.samples, rewards=4 * world.samples.rewards)
    outcome = run(world, case.section, one_micro_batch)
    linear = name_of(case.algo["advantage"]) in LINEAR
    factor = 4.0 if linear else 1.0
    outcome.loss /= factor
    outcome.gradients = {row: g / factor for row, g in outcome.gradients.items()}
    return differences(one, outcome, bound=BOUND if linear else BESIDE_EPS)


def split_samples(case: Case, one: Outcome) -> str:
    if case.batch == "several sequences":
        return ""
    r = random.Random(case.number)
    pieces = [r.choice([1, 2, 3]) for _ in case.world.sequences]
    return differences(one, run(split(case.world, pieces), case.section, one_micro_batch))


LINEAR = ("dr_grpo", "rloo", "opo", "gpg", "optimal_token_baseline")
BESIDE_EPS = 1e-3
RULES: dict[str, Callable[[Case, Outcome], str]] = {
    "cut": other_micro_batches,
    "ranks": uneven_ranks,
    "permutation": permuted_rows,
    "weight 0": term_of_weight_0,
    "drops nothing": selector_without_effect,
    "late": kl_reward_of_weight_0,
    "duplicate": duplicated_batch,
    "scale": scaled_rewards,
    "split": split_samples,
}

_N_MINUS_1 = "its standard deviation divides by n - 1 samples or tokens of the step"
_COUNT = "it selects a number of samples or tokens, which is rounded"
_SUCCESS = "a success is a reward above its parameter `correct`"
_APART = "its loss has a term without the advantage"
_SEQUENCE = "it compares engine and trainer on one sequence"
_PACKED = "additional packed rows change the assignment to mini-batches"
EXEMPT: dict[str, dict[str, str]] = {
    "permutation": {"minibatches": "the order of rows, which is random, assigns them to mini-batches"},
    "weight 0": {"minibatches": _PACKED},
    "drops nothing": {"minibatches": _PACKED},
    "late": {"minibatches": _PACKED},
    "duplicate": {
        "minibatches": "the order of rows assigns them to mini-batches",
        "gae": _N_MINUS_1, "reinforce_pp": _N_MINUS_1, "reinforce_pp_baseline": _N_MINUS_1, "lite_ppo": _N_MINUS_1,
        "mssr": _N_MINUS_1, "mapo": _N_MINUS_1,
        "d3s": _COUNT, "top_entropy": _COUNT, "rorecomp": _COUNT, "clip_cov": _COUNT, "kl_cov": _COUNT,
        "ttrl": "it is random", "grpo_roc": "it is random",
        "m2po": "it finds the threshold to 1e-9 of the range, among twice as many tokens",
        "outcome_exploration": "its bonus depends on the number of answers to a prompt so far",
    },
    "scale": {
        **dict.fromkeys(("mapo", "ui_s1"), "it uses the rewards of turns"),
        **dict.fromkeys(("gae", "mssr"), "it subtracts a value that does not scale with rewards"),
        "mc_grpo": "it adds an eps of 1 to the deviation",
        "puzzlecraft": "its weight is a polynomial of the mean reward",
        "outcome_exploration": "its bonus does not scale with rewards",
        **dict.fromkeys(("positive_nll", "xrpo", "rorecomp", "grpo_roc"), _SUCCESS),
        **dict.fromkeys(("overlong", "kl_reward"), "it adds a penalty that does not scale with rewards"),
        "reinforce_pp beta 0.1": "it adds a penalty that does not scale with rewards",
        **dict.fromkeys(("dro", "kimi", "kl", "adaptive_kl", "entropy", "adaptive_entropy", "value"), _APART),
        **dict.fromkeys(("kl_cov", "clip_cov"), "it compares the covariance with fixed thresholds"),
    },
    "split": {
        "gae": "each sequence is an episode", "branch_grpo": "forks are positions in one sequence",
        "tis level sequence": _SEQUENCE, "icepop level geometric": _SEQUENCE, "icepop veto 0.3": _SEQUENCE,
        "rejection level sequence_mean": _SEQUENCE, "opsm": _SEQUENCE,
        "echo_clip": "it depends on the last generated tokens of a sequence",
        "clip_cov": "its random choice depends on the position in the sequence",
        "kl_cov": "its random choice depends on the position in the sequence",
    },
}  # fmt: skip


def applies(rule: str, case: Case) -> bool:
    exempt = EXEMPT.get(rule, {})
    if "minibatches" in exempt and case.section.minibatches > 1:
        return False
    return not (case.methods & exempt.keys())


def violations(number: int) -> list[str]:
    """Return one message per rule that this case violates."""
    case = draw_case(number)
    try:
        outcome = run(case.world, case.section, one_micro_batch)
        numbers = [outcome.loss, *(float(g.abs().max()) for g in outcome.gradients.values() if g.numel())]
        if not all(map(math.isfinite, numbers)):
            return [f"{case}: the loss {outcome.loss} or a gradient is not finite"]
        return [f"{case}\n  {rule}: {difference}" for rule, check_rule in RULES.items()
                if applies(rule, case) and (difference := check_rule(case, outcome))]  # fmt: skip
    except Exception as e:
        raise AssertionError(f"{case}: {type(e).__name__}: {e}") from e


def sample_table(rewards: Sequence[float], groups: Sequence[int]) -> Samples:
    return Samples(
        rewards=torch.tensor(rewards, dtype=DOUBLE),
        group_ids=torch.tensor(groups),
        lengths=torch.ones(len(rewards)).long(),
    )
