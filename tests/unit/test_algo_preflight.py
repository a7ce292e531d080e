"""What is refused before anything starts: plug-ins that do not exist, needs that nothing serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.algo.preflight import check
from rlsys.config import load_config
from rlsys.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EARLY = ("trainer.early_backward=true", "launch.placement=disaggregated")
RECIPES = sorted((CONFIGS / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_can_be_served(path: Path) -> None:
    check(load_config(path))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algo.advantage=gpro"], "algo.advantage = 'gpro': unknown advantage; did you mean grpo?"),
        (["algo.loss=[{name: clip, low: 1}]"], r"algo.loss\[0\].low: unknown key"),
        (["algo.loss=[tis]"], "tis is of kind correction"),
        (["algo.group_reward=fapo"], "needs verdicts, .*: data.judge names none"),
        (
            ["algo.planners=[lens]"],
            r"algo.planners\[0\] \(Lens\) needs prompt_scores, .*: engine.reference names",
        ),
        (["algo.selectors=[grpo_roc]"], "needs tool_penalty, .*: rollout.generator = single_turn calls no"),
        (
            ["algo.anchor=behaviour", "launch.placement=disaggregated"],
            "algo.anchor = 'behaviour' needs behaviour, .*: launch.placement = 'disaggregated' has changed",
        ),
        (
            ["trainer.early_backward=true"],
            "trainer.early_backward = true, but launch.placement = colocated: .* use",
        ),
        ([*EARLY, "algo.selectors=[rorecomp]"], "the algorithm looks at whole steps: RoRecomp"),
        (
            [*EARLY, "algo.minibatches=2"],
            "algo.minibatches = 2: a step's groups are shuffled over them; use 1",
        ),
        ([*EARLY, "parallel.overlap=true"], "parallel.overlap = true reduces .* use false"),
        ([*EARLY, "trainer.balance_loss=0.1"], "trainer.balance_loss = 0.1 weighs .* use balance_rate"),
        ([*EARLY, "rollout.staleness_policy=wait"], "rollout.staleness_policy = wait chooses .* use drop"),
        ([*EARLY, "rollout.repeat=runs/other"], "rollout.repeat = runs/other: the record decides"),
        (
            ["algo.reducer={name: token_mean, over: active}", "algo.advantage=mssr", "rollout.group_size=1"],
            r"algo.reducer.over = 'active' counts .* algo.advantage \(Mssr\) gives each token its own: use all",
        ),
        (
            ["algo.planners=[lens]", "algo.corrections=[lens]", "engine.reference=own"],
            "algo.planners has lens, but algo.selectors has not: name it in all of planners, selectors, corrections",
        ),
        *[
            (
                [f"algo.corrections=[opsm, {name}]", "algo.anchor=mu"],
                r"algo.corrections\[1\] \(\w+\) acts on .* everywhere with algo.anchor = 'mu': use algo.anchor = old",
            )
            for name in ("tis", "icepop", "decoupled_ppo")
        ],
    ],
)
def test_a_mistake_is_one_line_that_names_field_and_reason(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        check(load_config(CONFIGS / "quickstart.yaml", overrides))
    assert "\n" not in str(caught.value)
