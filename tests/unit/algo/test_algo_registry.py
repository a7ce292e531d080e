"""Plug-ins by name: what `build` makes, what it says about mistakes, and that catalogue, docs and recipes agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlsys.algo import build, check
from rlsys.algo.advantages import Advantage, Grpo, dr_grpo
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.catalogue import OTHER_STAGES, entries, recipes, render_list, render_show
from rlsys.algo.handbook import render_docs
from rlsys.algo.plugin import EVIDENCE, NEEDS, evidence_of
from rlsys.algo.registry import KINDS, SECTION_KINDS, TABLE, load
from rlsys.config import load_config, read_layers
from rlsys.config.algo import AlgoSection
from rlsys.core.errors import UserError
from tests.helpers.algo_world import table

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "configs/algorithms").glob("*.yaml"))
NAMES = [
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "gae", "dapo", "gspo", "cispo", "sapo", "dual_clip", "tis",
    "icepop", "opsm", "decoupled_ppo", "m2po", "bapo", "vcpo", "minpro", "gdpo", "gapo", "mc_grpo", "mssr",
    "d3s", "vade", "xrpo", "dars", "brorl", "rorecomp", "prompt_augmentation", "puzzlecraft", "fapo",
    "outcome_exploration", "ttrl", "dare", "grpo_roc", "lens",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_method_of_the_issue_has_a_plugin_and_a_recipe(name: str) -> None:
    assert any(name in names for names in TABLE.values())
    assert (ROOT / "configs/algorithms" / f"{name}.yaml").is_file()


@pytest.mark.parametrize(
    ("kind", "name", "params", "message"),
    [
        ("loss", "clipp", {}, "loss = 'clipp': unknown loss; did you mean clip?"),
        ("loss", "grpo", {}, "loss = 'grpo': unknown loss; grpo is of kind advantage; known: clip"),
        ("loss", "clip", {"clip_hgh": 1}, "loss.clip_hgh: unknown key; did you mean clip_high?"),
        ("loss", "clip", {"clip_low": 2}, "loss.clip_low = 2: expected less than 1"),
        (
            "preference",
            "simpo",
            {"margin": -0.5},
            "preference.margin = -0.5: expected at least 0",
        ),
        ("lossy", "clip", {}, "unknown kind of plug-in 'lossy'; did you mean loss?"),
        ("loss", "no.such:thing", {}, "loss = 'no.such:thing': cannot import no.such"),
        ("loss", "rlsys.core.types:thing", {}, "rlsys.core.types has no class or function 'thing'"),
    ],
)
def test_mistakes_are_one_clear_line(kind: str, name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as e:
        build(kind, name, **params)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_a_mistake_in_a_config_names_its_field() -> None:
    with pytest.raises(
        UserError, match=r"^algo\.corrections\[1\] = 'tsi': unknown correction; did you mean tis\?"
    ):
        check(AlgoSection.model_validate({"corrections": ["tis", "tsi"]}))
    with pytest.raises(UserError, match=r"^algo\.advantage\.eps = -1"):
        check(AlgoSection.model_validate({"advantage": {"name": "grpo", "eps": -1}}))


def signs(samples: Samples, scale: float = 1.0) -> torch.Tensor:
    """An estimator of somebody else's."""
    return scale * (2 * samples.reward - 1)


class Halves(Advantage):
    """A class of somebody else's."""

    def __call__(self, samples: Samples) -> torch.Tensor:
        return samples.reward / 2


def test_a_function_or_class_by_import_path_is_a_plugin() -> None:
    samples = table([1, 0], [0, 0])
    plain = build("advantage", f"{__name__}:signs", scale=3.0)
    assert plain(samples).tolist() == [3, -3]
    assert plain.needs() == frozenset()
    assert not plain.changes_tokens()
    assert build("advantage", f"{__name__}:Halves")(samples).tolist() == [0.5, 0]


@pytest.mark.parametrize(
    ("kind", "name", "params", "told"),
    [
        ("advantage", "rlsys.algo.losses:Clip", {}, "expected a subclass of rlsys.algo.advantages:Advantage"),
        ("advantage", "rlsys.algo.advantages:Advantage", {}, "expected a subclass"),
        ("loss", "builtins:int", {}, "expected a subclass of rlsys.algo.losses:Loss, or a function"),
        ("advantage", f"{__name__}:signs", {"scael": 2.0}, "unexpected keyword argument 'scael'"),
        ("loss", 3, {}, "loss = 3: expected a short name"),
        (None, "clip", {}, "unknown kind of plug-in None"),
        ("loss", "CLIP", {}, "did you mean clip"),
        ("correction", "icepop", {"low": 3}, r"low = 3.0: expected less than high = 2.0"),
        ("loss", "bapo", {"low_min": 0.95}, r"low_min = 0.95: expected at most low_max = 0.9"),
        ("loss", "bapo", {"step": 1e-9}, r"step = 1e-09 gives 2.1e\+09 bounds to compare; expected at most 10000"),
        ("advantage", "mssr", {"eta_max": 0.5}, "eta_min = 0.875: expected at most eta_max = 0.5"),
        ("shaping", "overlong", {"cap": 9}, "buffer = 64: expected at most cap = 9"),
        ("planner", "brorl", {"factor": 1e300}, r"planner.factor = 1e\+300: expected at most 1024"),
        ("prompt", "vade", {"pool": 10**12}, "prompt.pool = 1000000000000: expected at most"),
        ("selector", "ttrl", {"seed": 10**20}, "selector.seed = 100000000000000000000: expected less than"),
        ("prompt", "prompt_augmentation", {"templates": [{"usr": ""}]}, r"prompt.templates.0.usr: unknown key; did"),
        ("prompt", "prompt_augmentation", {"templates": [{"user": "?"}]}, "prompt.templates.0.user = .*question"),
        ("group_reward", "fapo", {"question": "Right?"}, "group_reward.question = 'Right.': .*response"),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_work_is_refused(
    kind: Any, name: Any, params: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        build(kind, name, **params)
    assert "\n" not in str(caught.value)


def test_rewards_that_are_no_numbers_with_a_fraction_are_refused() -> None:
    """A mean of integers is cut to a whole number: every advantage would be the reward itself."""
    ids = torch.tensor([0, 0])
    for rewards in (torch.tensor([1, 0]), torch.tensor([True, False])):
        with pytest.raises(ValueError, match="expected a floating-point type"):
            Samples(rewards=rewards, group_ids=ids, lengths=ids)
        with pytest.raises(ValueError, match=r"rewards has type torch.*; expected a floating-point type"):
            dr_grpo(rewards, ids)
    with pytest.raises(ValueError, match=r"mu has type torch\.int64; expected a floating-point type"):
        Batch(tokens=ids, cu_seqlens=torch.tensor([0, 2]), rows=ids[:1], mask=ids, mu=ids, versions=ids)
    with pytest.raises(ValueError, match=r"expected a tensor of shape"):
        Samples(rewards=torch.zeros(2, 1, 1), group_ids=ids, lengths=ids)
    with pytest.raises(ValueError, match=r"group_ids has shape \(2, 1\)"):
        Samples(rewards=torch.zeros(2), group_ids=ids[:, None], lengths=ids)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in TABLE.items() for name in names])
def test_every_default_value_is_accepted(kind: str, name: str) -> None:
    plugin = load(kind, TABLE[kind][name])
    defaults = {
        key: f.default
        for key, f in plugin.model_fields.items()
        if not f.is_required() and not f.default_factory
    }
    build(kind, name, **defaults)


@pytest.mark.parametrize(
    ("kind", "name", "published"),
    [
        ("loss", "gmpo", {"clip_low": 0.4, "clip_high": 0.4}),
        ("loss", "bapo", {"low_min": 0.6, "low_max": 0.9, "high_min": 1.2, "high_max": 3.0}),
        ("loss", "kimi", {"tau": 0.1}), ("loss", "dppo", {"low": 0.15, "high": 0.15, "cap": 20.0}),
        ("advantage", "gdpo", {"eps": 1e-6}), ("advantage", "outcome_exploration", {"c": 0.1, "b0": 0.5}),
        ("preference", "aot", {"beta": 0.1, "wrong": 0.0}),
    ],
)  # fmt: skip
def test_defaults_are_the_published_ones(kind: str, name: str, published: dict[str, float]) -> None:
    plugin = build(kind, name)
    assert {key: getattr(plugin, key) for key in published} == published


def test_show_names_types_as_they_are_written() -> None:
    assert "floor_low (float | None, at least 0, below 1, default None)" in render_show("m2po")
    assert "weights (list[float] | None, default None)" in render_show("gdpo")


def test_a_spec_reads_in_each_form_and_survives_a_dump() -> None:
    section = AlgoSection.model_validate({"loss": ["clip", {"name": "kl", "beta": 0.1}]})
    assert section.loss[1].params == {"beta": 0.1}
    assert AlgoSection.model_validate(section.model_dump(mode="json")) == section


@pytest.mark.parametrize("kind", list(TABLE))
def test_every_plugin_has_the_fields_of_the_catalogue(kind: str) -> None:
    for entry in (e for e in entries() if e.kind == kind):
        assert entry.summary.endswith((".", ":")) or entry.doc.count("\n"), entry
        assert "evidence" in vars(load(kind, TABLE[kind][entry.name])), f"{entry.name} states no evidence"
        assert entry.evidence in EVIDENCE
        assert entry.paper or entry.evidence == "own", entry.name
        assert set(entry.needs) <= set(NEEDS)
        assert all(text for _, _, _, text in entry.fields), entry.name
        if entry.evidence == "A":
            assert "reading of the abstract" in entry.doc.replace("\n", " "), entry.name


class Changed(Grpo):
    """GRPO as its authors do not have it."""


class Mistaken(Grpo):
    """Claims what is no kind of evidence."""

    evidence = "read"


def halves(samples: Samples) -> torch.Tensor:
    """A plug-in of one's own."""
    return samples.reward / 2


def test_evidence_has_no_default_and_is_not_inherited() -> None:
    assert evidence_of(Grpo) == "R"
    assert not hasattr(Advantage, "evidence")
    assert evidence_of(Changed) == "own"
    assert evidence_of(type(build("advantage", f"{__name__}:Changed"))) == "own"
    assert evidence_of(type(build("advantage", f"{__name__}:halves"))) == "own"
    with pytest.raises(UserError, match=r"Mistaken\.evidence = 'read': expected one of R, F, P, N, A, own"):
        build("advantage", f"{__name__}:Mistaken")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_are_a_base_and_a_few_lines(path: Path) -> None:
    """The section builds; the rest of the file is a valid config of the quickstart's."""
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 16
    data = read_layers(path)
    check(AlgoSection.model_validate(data.pop("algo")))
    assert data["model"]["path"]
    assert load_config(path.parent.parent / "quickstart.yaml")


def test_list_and_show() -> None:
    text = render_list()
    assert all(name in text for names in TABLE.values() for name in names)
    for entry in entries():
        assert all(f" {name}=" in text for name, _, _, _ in entry.fields), entry.name
    details = render_show("vcpo")
    assert "hook: vcpo" in details and "advantage: vcpo" in details and "rho0 (" in details
    assert "a reading of the abstract" in render_show("minpro")
    with pytest.raises(UserError, match=r"unknown algorithm 'grpoo'; did you mean grpo\?"):
        render_show("grpoo")


def test_defaults_that_are_sections_are_counted_and_shown_as_a_config_takes_them() -> None:
    """Before: `[TemplateParams(system='', ...), ...]`, fifteen lines of it."""
    assert "templates=8 templates, seed=0" in render_list()
    assert "Params(" not in render_list()
    details = render_show("prompt_augmentation")
    assert "templates (list[TemplateParams], default 8 templates)" in details
    params = yaml.safe_load(details.partition("the default of ")[2])
    plugin = build("prompt", "prompt_augmentation", templates=params["templates"])
    assert plugin == build("prompt", "prompt_augmentation")


def test_each_plugin_of_a_method_has_a_stage_and_a_recipe() -> None:
    """What has none: defaults, and the parts that recipes leave out."""
    recipe_paths = recipes()
    assert recipe_paths["advantage", "gae"] == recipe_paths["loss", "value"] == "algorithms/gae"
    assert recipe_paths["preference", "dpo"] == "preferences/dpo"
    assert set(OTHER_STAGES) <= {(e.kind, e.name) for e in entries()}
    without = {(e.kind, e.name) for e in entries()} - set(recipe_paths)
    assert without == {("prompt", "in_order"), ("planner", "fixed")}


def test_the_docs_match_the_plugins() -> None:
    """`python -m rlsys.algo.handbook > docs/algorithms.md` makes them again."""
    assert (ROOT / "docs/algorithms.md").read_text(encoding="utf-8") == render_docs()


def test_the_registry_names_existing_classes_of_their_kind() -> None:
    for kind in SECTION_KINDS.values():
        base = load(kind, KINDS[kind][0])
        assert all(issubclass(load(kind, path), base) for path in TABLE[kind].values())
