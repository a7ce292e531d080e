"""What is refused before anything starts: plug-ins that do not exist, needs that nothing serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.algo.no_effect import describe_passes
from rlsys.algo.planners import start_size
from rlsys.algo.preflight import check, notes
from rlsys.algo.registry import make_all
from rlsys.config import load_config
from rlsys.core.errors import UserError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EARLY = ("trainer.early_backward=true", "launch.placement=disaggregated")
ROC = "{name: grpo_roc, penalty: length}"
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
        (["algo.group_reward=fapo"], "needs verdicts, .*: data.judge is not set"),
        (
            ["algo.planners=[lens]"],
            r"algo.planners\[0\] \(lens\) needs prompt_scores, .*: engine.reference is not set",
        ),
        (["algo.selectors=[grpo_roc]"], "needs tool_penalty, .*: rollout.generator = single_turn calls no"),
        (
            ["algo.anchor=behaviour", "launch.placement=disaggregated"],
            "algo.anchor = 'behaviour' needs behaviour, .*: with launch.placement = 'disaggregated' the",
        ),
        (
            ["algo.anchor=behaviour", "router.interruption=retract"],
            "algo.anchor = 'behaviour' needs behaviour, .*: router.interruption = retract keeps the last tokens",
        ),
        (
            ["algo.anchor=behaviour", "trainer.replay=trainer"],
            "algo.anchor = 'behaviour' needs behaviour, .*: trainer.replay = 'trainer' trains a token with",
        ),
        (
            ["algo.anchor=old", "algo.loss=[bapo]"],
            r"algo.loss\[0\] \(bapo\) bounds exp\(logp - anchor\), which is 1 for every token",
        ),
        (
            ["trainer.early_backward=true"],
            "trainer.early_backward = true, but launch.placement = colocated: .* use",
        ),
        ([*EARLY, "algo.selectors=[rorecomp]"], "the algorithm needs whole steps: rorecomp"),
        (
            [*EARLY, "algo.minibatches=2"],
            "algo.minibatches = 2: a mini-batch has groups from the whole step; use 1",
        ),
        (
            [*EARLY, "algo.epochs=2"],
            "algo.epochs = 2: a second pass needs the step's samples again; use 1",
        ),
        ([*EARLY, "parallel.overlap=true"], "parallel.overlap = true would reduce .* use false"),
        ([*EARLY, "trainer.balance_loss=0.1"], "trainer.balance_loss = 0.1 needs .* use balance_rate"),
        ([*EARLY, "rollout.staleness_policy=wait"], "rollout.staleness_policy = wait chooses .* use drop"),
        (
            [*EARLY, "rollout.repeat=runs/other"],
            "rollout.repeat = runs/other: the record determines .* use null$",
        ),
        (
            ["algo.reducer={name: token_mean, over: active}", "algo.advantage=mssr", "rollout.group_size=1"],
            r"algo.reducer.over = 'active' counts .* algo.advantage \(mssr\) gives each token its own advantage",
        ),
        (
            ["algo.planners=[lens]", "algo.corrections=[lens]", "engine.reference=own"],
            "algo.planners has lens, but algo.selectors has not; name lens in all of planners, selectors",
        ),
        *[
            (
                [f"algo.corrections=[opsm, {name}]", "algo.anchor=mu"],
                r"algo.corrections\[1\] \(\w+\) acts on .* everywhere with algo.anchor = 'mu': use algo.anchor = old",
            )
            for name in ("tis", "icepop", "decoupled_ppo")
        ],
        (
            ["algo.planners=[dapo, dapo]"],
            r"algo.planners\[1\] = 'dapo' repeats algo.planners\[0\]; name each planner once",
        ),
        (
            ["algo.selectors=[rorecomp, {name: rorecomp, capacity: 3}]"],
            r"algo.selectors\[1\]: only one selector",
        ),
        *[
            (
                [f"algo.loss=[{loss}]", f"algo.reducer={name}"],
                rf"algo.loss \({loss}\) .* algo.reducer \({name}\) .* = sequence_mean",
            )
            for loss in ("gspo", "luspo", "gmpo")
            for name in ("token_mean", "constant")
        ],
        (["algo.loss=[entropy]"], r"algo.loss \(entropy\) has no term that trains on advantages"),
        (["algo.loss=[clip, value]"], r"algo.loss \(clip, value\) trains a critic, but .* use gae"),
        (
            ["algo.hooks=[sync_ref]"],
            r"algo.hooks \(sync_ref\) updates the reference model, but no .*; add kl",
        ),
        (
            ["algo.loss=[clip,kl]", "algo.hooks=[sync_ref, {name: sync_ref, interval: 8}]"],
            "update the reference model more than once",
        ),
        (
            ["algo.critic={}"],
            r"algo.critic is set, but algo.advantage \(grpo\) uses no values; use gae",
        ),
        (["algo.advantage=gae"], r"algo.advantage \(gae\) needs a critic, but .* add value"),
        (["algo.anchor=ewma"], r"algo.anchor = 'ewma' needs averaged weights, .* algo.hooks = \[ewma\]"),
        (["algo.hooks=[ewma]"], r"algo.hooks \(ewma\) averages the weights, but algo.anchor = 'mu'"),
        (
            ["algo.anchor=ewma", "algo.hooks=[ewma, {name: ewma, window: 8}]"],
            "average the weights more than once",
        ),
        *[
            (
                ["rollout.group_size=1", f"algo.advantage={name}"],
                rf"rollout.group_size = 1, but algo.advantage \({name}\) compares the samples",
            )
            for name in ("rloo", "vcpo", "reinforce_pp_baseline")
        ],
        (
            ["rollout.group_size=1", "algo.advantage=reinforce_pp", "algo.planners=[dapo]"],
            r"rollout.group_size = 1, but algo.planners\[0\] \(dapo\) drops groups of equal rewards",
        ),
        (["algo.advantage=mc_grpo"], "rollout.group_size = 8 gives groups of 8, .* needs an odd number"),
        *[
            (
                ["algo.advantage=mc_grpo", f"algo.planners=[mc_grpo, {{name: {name}, largest: 32}}]"],
                rf"algo.planners\[1\] \({name}\) lets groups of 9 grow to any size up to 32, "
                r".* an odd number",
            )
            for name in ("dars", "xrpo")
        ],
        (
            ["algo.advantage=mc_grpo", "algo.planners=[grpo_roc, mc_grpo]", f"algo.selectors=[{ROC}]"],
            r"algo.selectors\[0\] \(grpo_roc\) leaves 8 of groups of 17, .* an odd number of samples",
        ),
        (
            ["algo.planners=[dars, xrpo]"],
            r"algo.planners \(dars, xrpo\): xrpo assigns all additional samples of a group",
        ),
        (
            ["algo.hooks=[{name: brorl, samples: 128}]"],
            r"algo.hooks\[0\] \(brorl\).samples = 128 equals the samples of an update",
        ),
        (
            ["algo.planners=[{name: dars, largest: 4}]"],
            r"algo.planners\[0\] \(dars\).largest = 4: expected more than the 8",
        ),
        (
            ["algo.planners=[{name: brorl, factor: 1000}, {name: ttrl, factor: 1000}]"],
            "algo.planners: with rollout.group_size = 8 groups grow to 8000000 samples; expected at most 65536",
        ),
        (["algo.selectors=[lens]"], "algo.selectors has lens, but algo.corrections has not"),
        (["data.judge=engines"], "data.judge = 'engines' is unused: algo.group_reward is not set"),
        (
            ["algo.shaping=[{name: overlong, cap: 500}]"],
            r"algo.shaping\[0\] \(overlong\): cap = 500 minus buffer = 64: expected less than .*_tokens = 256",
        ),
        (
            ["algo.shaping=[{name: overlong, cap: 320}]"],
            r"algo.shaping\[0\] \(overlong\): cap = 320 minus buffer = 64: expected less than .*_tokens = 256",
        ),
        (
            ["algo.corrections=[{name: icepop, low: 1.5, high: 1.5}]"],
            "low = 1.5: expected less than high = 1.5; otherwise all tokens are rejected",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_field_and_reason(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        check(load_config(CONFIGS / "quickstart.yaml", overrides))
    assert "\n" not in str(caught.value)


def test_a_weight_other_than_1_for_exact_tokens_is_reported() -> None:
    """Also of a correction that looks at the whole ratio."""
    overrides = ["algo.anchor=old", "algo.minibatches=2", "algo.corrections=[{name: minpro, cap: 0.5}]"]
    messages = notes(load_config(CONFIGS / "quickstart.yaml", overrides))
    assert any(
        "(minpro) multiplies tokens on which engine and trainer agree by 0.5" in note for note in messages
    )


def test_a_rejection_only_correction_is_not_reported_as_double_weighting() -> None:
    def told(weighted: bool) -> list[str]:
        icepop = f"{{name: icepop, weighted: {str(weighted).lower()}}}"
        overrides = ["algo.anchor=old", "algo.minibatches=2", f"algo.corrections=[tis, {icepop}]"]
        return [
            n for n in notes(load_config(CONFIGS / "quickstart.yaml", overrides)) if "more than once" in n
        ]

    assert told(True) and not told(False)


def test_a_method_based_on_an_abstract_only_is_reported() -> None:
    (note,) = notes(load_config(CONFIGS / "algorithms" / "minpro.yaml"))
    assert note.startswith(
        "algo.corrections[0] (minpro) has evidence A (a reading of the abstract), so it may differ "
    )
    assert "\n" not in note
    assert notes(load_config(CONFIGS / "algorithms" / "grpo.yaml")) == []


def test_success_counting_methods_are_reported_for_non_binary_rewards() -> None:
    """The built-in rewards of weight 1 are 0 or 1: above 0.5 is a success."""
    method = "algo.loss=[clip, {name: positive_nll, correct: 0.25}]"
    assert notes(load_config(CONFIGS / "quickstart.yaml", [method, "data.reward=math"])) == []
    doubled = load_config(CONFIGS / "quickstart.yaml", [method, "data.reward=[{name: math, weight: 2}]"])
    assert notes(doubled) == [
        "algo.loss[1] (positive_nll) counts a reward above its parameter correct = 0.25 as a success; check that "
        "this fits data.reward = math"
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.planners=[grpo_roc, mc_grpo]", "algo.selectors=[{name: grpo_roc, penalty: length, keep: 0.53}]"],
        [
            "algo.planners=[mc_grpo, lens]", "algo.selectors=[lens]", "algo.corrections=[lens]",
            "engine.reference=own",
        ],
    ],
)  # fmt: skip
def test_mc_grpo_accepts_configs_that_keep_group_sizes_odd(overrides: list[str]) -> None:
    check(load_config(CONFIGS / "quickstart.yaml", ["algo.advantage=mc_grpo", *overrides]))


def test_the_recipe_of_brorl_has_more_samples_than_its_learning_rate_was_chosen_for() -> None:
    config = load_config(CONFIGS / "algorithms" / "brorl.yaml")
    plugins = make_all(config.algo)
    start = start_size(plugins["planners"], config.rollout.group_size)
    quickstart = load_config(CONFIGS / "quickstart.yaml")
    assert plugins["hooks"][0].samples == quickstart.samples_per_step == 128
    size = config.rollout.groups_per_step * start / config.algo.minibatches
    assert plugins["hooks"][0].lr_factor(None, [], size) > 1.4
    assert config.rollout.groups_per_step < quickstart.rollout.groups_per_step


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["algo.anchor=old", "algo.corrections=[tis]"],
            ["algo.loss[0] (clip): with algo.anchor = 'old' and"],
        ),
        (["algo.anchor=old", "algo.corrections=[tis]", "algo.minibatches=2"], []),
        (["algo.anchor=old", "algo.loss=[m2po]", "algo.epochs=2"], []),
        (["algo.anchor=mu"], []),
        (["algo.anchor=old", "algo.loss=[reinforce]"], ["algo.anchor = 'old' is unused: no term of"]),
        (
            ["trainer.replay=trainer"],
            ["trainer.replay = 'trainer' with algo.minibatches = 1: the scoring pass"],
        ),
    ],
    ids=str,
)
def test_settings_without_effect_are_reported(overrides: list[str], told: list[str]) -> None:
    config = load_config(CONFIGS / "quickstart.yaml", overrides)
    check(config)
    messages = notes(config)
    assert len(messages) == len(told)
    assert all(line.startswith(start) for line, start in zip(messages, told, strict=True))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ["none"]),
        (["algo.anchor=old"], ["none for `old`, which the training pass provides"]),
        (
            ["algo.anchor=old", "algo.minibatches=4"],
            ["the step's 4 mini-batches except the first, whose training pass provides `old`"],
        ),
        (
            ["algo.anchor=behaviour", "algo.loss=[m2po,kl]"],
            [
                "the interrupted tokens, before the weights that sampled them change",
                "the whole step, since m2po needs current before the loss",
                "the whole step with the reference's weights",
            ],
        ),
        (
            ["algo.anchor=old", "algo.corrections=[{name: tis, normalise: true}]"],
            ["the whole step, since tis needs a whole update before its backward pass"],
        ),
        (["trainer.replay=trainer"], ["the whole step, since trainer.replay = trainer replays its experts"]),
    ],
    ids=str,
)
def test_the_passes_of_a_step_are_described(overrides: list[str], told: list[str]) -> None:
    assert describe_passes(load_config(CONFIGS / "quickstart.yaml", overrides)) == told


def test_without_a_ratio_corrections_are_allowed_at_mu() -> None:
    check(load_config(CONFIGS / "quickstart.yaml", ["algo.loss=[reinforce]", "algo.corrections=[tis]"]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algo.anchor=old"], "none for `old`, which the training pass provides"),
        (
            ["algo.anchor=old", "algo.epochs=2"],
            "the whole step, since its samples are repeated in each of 2 epochs",
        ),
        (
            ["algo.anchor=interpolated", "algo.loss=[m2po]", "algo.epochs=3", "algo.minibatches=2"],
            "each of 5 mini-batches once more, just before its update",
        ),
    ],
)
def test_explain_names_the_passes_of_further_epochs(overrides: list[str], told: str) -> None:
    assert told in describe_passes(load_config(CONFIGS / "quickstart.yaml", overrides))


FAILING = """
from typing import Any

from rlsys.algo.planners import Planner

class Failing(Planner):
    where: str

    def size(self, group_size: int) -> Any:
        return {"size": self._fail, "no size": lambda: None}.get(self.where, lambda: group_size)()

    def limit(self, size: int) -> int:
        return self._fail() if self.where == "limit" else size

    def needs(self) -> frozenset[str]:
        return self._fail() if self.where == "needs" else frozenset()

    def _fail(self) -> Any:
        return {}["missing"]
"""


@pytest.mark.parametrize("where", ["size", "no size", "limit", "needs"])
def test_a_planner_that_raises_before_the_start_is_one_line(where: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    planner = f"algo.planners=[{{name: {tmp_path}/failing.py:Failing, where: {where}}}]"
    config = load_config(CONFIGS / "quickstart.yaml", [planner])
    error = "TypeError: " if where == "no size" else r"KeyError: 'missing' \(.*failing.py:"
    with pytest.raises(UserError, match=rf"^algo\.planners.*: {error}"):
        check(config)
