"""Who gives weights to whom: places of trainer ranks and of engines' ranks, over all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.planner.layout import lay_out, push_plan
from rlsys.weights.push_plan import DeviceLocation, PushPlan, check_group, plan_push

EXPERIMENTS = sorted(
    p for p in (Path(__file__).parents[3] / "configs/experiments").glob("*.yaml") if p.stem != "base"
)


def places(*numbers: int, per_node: int = 8) -> list[DeviceLocation]:
    return [DeviceLocation(*divmod(n, per_node)) for n in numbers]


def test_each_engine_rank_gets_its_weights_from_the_trainer_rank_on_its_gpu() -> None:
    trainer = places(*range(16))
    engines = [places(*range(4 * i, 4 * i + 4)) for i in range(4)]
    for method in ("auto", "broadcast"):
        plan = plan_push(trainer, engines, method, gpus=True)
        assert plan.memory == {i: tuple(range(4 * i, 4 * i + 4)) for i in range(4)}
    assert plan.owners(2, 4) == (8, 9, 10, 11)


def test_engines_with_other_gpus_are_reached_by_a_group_without_shared_gpus() -> None:
    trainer = places(0, 1, 2, 3)
    engines = [places(0, 1), places(2, 3), places(4, 5), places(3, 6)]
    plan = plan_push(trainer, engines, "broadcast", gpus=True)
    assert plan.memory == {0: (0, 1), 1: (2, 3)}
    assert plan.owners(2, 2) is plan.owners(None, 2) is None
    assert plan.sender == 0
    swapped = plan_push(places(3, 1), [places(3, 6)], "broadcast", gpus=True)
    assert swapped == PushPlan({}, group=True, sender=1), "rank 0 shares GPU 3 with the engine"


def test_invalid_nccl_groups_are_refused_before_the_start() -> None:
    with pytest.raises(
        UserError, match=r"every trainer rank, for example on GPU 0 of node 0, shares its GPU"
    ):
        plan_push(places(0), [places(0, 1)], "broadcast", gpus=True)
    with pytest.raises(UserError, match=r"two ranks of one NCCL group are on GPU 3 of node 1"):
        check_group([DeviceLocation(1, 3), DeviceLocation(0, 3), DeviceLocation(1, 3)])


def test_a_sharded_push_uses_groups_and_shares_no_gpu() -> None:
    trainer = places(0, 1)
    assert plan_push(trainer, [places(2, 3)], "sharded", gpus=True) == PushPlan({}, group=True)
    with pytest.raises(UserError, match=r"sharded: the trainer and engine-1 both use GPU 1 of node 0"):
        plan_push(trainer, [places(2, 3), places(4, 1)], "sharded", gpus=True)
    assert plan_push(trainer, [places(0, 1)], "sharded", gpus=False) == PushPlan({}, group=True)


def test_without_gpus_the_ranks_of_a_host_take_turns() -> None:
    trainer = [DeviceLocation(0, 0), DeviceLocation(0, 1), DeviceLocation(1, 0)]
    engines = [
        [DeviceLocation(0, 0), DeviceLocation(0, 1)],
        [DeviceLocation(1, 0), DeviceLocation(1, 1)],
        [DeviceLocation(0, 2)],
    ]
    assert plan_push(trainer, engines, "auto", gpus=False) == PushPlan(
        {0: (0, 1), 1: (2, 2), 2: (0,)}, group=False
    )
    spread = [*engines, [DeviceLocation(2, 0)]]
    assert plan_push(trainer, spread, "auto", gpus=False) == PushPlan(
        {0: (0, 1), 1: (2, 2), 2: (0,)}, group=True
    ), "the engine on another machine gets its weights from a process group"
    assert plan_push(trainer, engines, "broadcast", gpus=False) == PushPlan({}, group=True)
    assert plan_push(trainer, engines, "disk", gpus=False) == PushPlan({}, group=False)


@given(st.integers(1, 24), st.lists(st.integers(1, 8), max_size=6), st.integers(0, 24), st.integers(1, 8))
def test_no_group_ever_holds_two_ranks_of_one_gpu(
    world: int, sizes: list[int], start: int, per_node: int
) -> None:
    trainer, engines, first_rank = places(*range(world), per_node=per_node), [], start
    for size in sizes:
        engines.append(places(*range(first_rank, first_rank + size), per_node=per_node))
        first_rank += size
    try:
        plan = plan_push(trainer, engines, "broadcast", gpus=True)
    except UserError:
        return
    group_members = [device for i, e in enumerate(engines) if plan.owners(i, len(e)) is None for device in e]
    check_group([trainer[plan.sender], *group_members])
    for index, owners in plan.memory.items():
        assert [trainer[rank] for rank in owners] == engines[index]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_experiment_can_push(path: Path) -> None:
    config = load_config(path)
    plan = push_plan(config, lay_out(config))
    colocated = config.launch.placement == "colocated"
    assert set(plan.memory) == (set(range(config.engine.count)) if colocated else set())
    if colocated:  # every rank serves as many engine ranks as it has room for: one
        served = [rank for owners in plan.memory.values() for rank in owners]
        assert len(served) == len(set(served)) == config.engine.count * config.engine.tp
