"""Table of the built-in plug-ins, and functions that build plug-ins. A plug-in is imported when it is built."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlsys.algo.plugin import Plugin, evidence_of
from rlsys.config.algo import AlgoSection, Spec
from rlsys.config.plugins import parse_params
from rlsys.core.errors import UserError
from rlsys.core.imports import import_attribute

KINDS: dict[str, tuple[str, str]] = {
    "prompt": ("rlsys.algo.prompts:PromptChooser", "the prompt of a new group, and its wording"),
    "planner": ("rlsys.algo.planners:Planner", "the number of samples of a group, and whether it is trained"),
    "group_reward": ("rlsys.algo.group_rewards:GroupReward", "rewards from all samples of a group"),
    "shaping": ("rlsys.algo.shaping:Shaping", "rewards -> rewards, just before the advantages"),
    "advantage": ("rlsys.algo.advantages:Advantage", "rewards of groups -> advantages"),
    "selector": ("rlsys.algo.selectors:Selector", "selection and weights of samples and tokens"),
    "correction": (
        "rlsys.algo.corrections:CorrectionPlugin",
        "weights and rejections for tokens of another policy",
    ),
    "loss": ("rlsys.algo.losses:Loss", "a term of the objective, token by token"),
    "reducer": ("rlsys.algo.reducers:Reducer", "the weight of each token, and the denominator"),
    "hook": ("rlsys.algo.hooks:Hook", "learning-rate factors and weight averages around the optimizer step"),
    "imitation": (
        "rlsys.algo.sft.imitation:Imitation",
        "losses of `rlsys sft` on the tokens of answers (sft.loss)",
    ),
    "preference": (
        "rlsys.algo.sft.preferences:Preference",
        "losses of `rlsys sft` on compared answers (sft.loss)",
    ),
}
"""Kind -> (import path of its base class, its purpose), in the order in which the plug-ins act on a sample."""

TABLE: dict[str, dict[str, str]] = {
    "prompt": {
        "in_order": "rlsys.algo.prompts:InOrder",
        "pool": "rlsys.algo.prompts:Pool",
        "vade": "rlsys.algo.methods.vade:Vade",
        "prompt_augmentation": "rlsys.algo.methods.prompt_augmentation:PromptAugmentation",
    },
    "planner": {
        "fixed": "rlsys.algo.planners:Fixed",
        "dapo": "rlsys.algo.methods.dapo:Dapo",
        "mc_grpo": "rlsys.algo.methods.mc_grpo_groups:OneMore",
        "grpo_roc": "rlsys.algo.methods.grpo_roc_groups:Oversample",
        "brorl": "rlsys.algo.methods.brorl_groups:Broad",
        "dars": "rlsys.algo.methods.dars:Dars",
        "xrpo": "rlsys.algo.methods.xrpo_groups:Xrpo",
        "lens": "rlsys.algo.methods.lens_groups:Lens",
        "ttrl": "rlsys.algo.methods.ttrl_groups:Votes",
        "aoi": "rlsys.algo.methods.aoi:Aoi",
        "scope": "rlsys.algo.methods.scope:Scope",
        "explore": "rlsys.algo.methods.explore:Explore",
    },
    "group_reward": {
        "ttrl": "rlsys.algo.methods.ttrl_groups:Ttrl",
        "dare": "rlsys.algo.methods.dare:Dare",
        "fapo": "rlsys.algo.methods.fapo:Fapo",
    },
    "shaping": {
        "overlong": "rlsys.algo.shaping:Overlong",
        "kl_reward": "rlsys.algo.shaping:KlReward",
    },
    "advantage": {
        "grpo": "rlsys.algo.advantages:Grpo",
        "dr_grpo": "rlsys.algo.advantages:DrGrpo",
        "rloo": "rlsys.algo.advantages:Rloo",
        "gdpo": "rlsys.algo.methods.gdpo:Gdpo",
        "lite_ppo": "rlsys.algo.methods.lite_ppo:LitePPO",
        "maxrl": "rlsys.algo.methods.maxrl:MaxRL",
        "opo": "rlsys.algo.methods.opo:Opo",
        "grpo_passk": "rlsys.algo.methods.grpo_passk:GrpoPassK",
        "gpg": "rlsys.algo.methods.gpg:Gpg",
        "reinforce_pp": "rlsys.algo.methods.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": "rlsys.algo.methods.reinforce_pp:ReinforcePPBaseline",
        "branch_grpo": "rlsys.algo.methods.branch_grpo:BranchGrpo",
        "gae": "rlsys.algo.methods.gae:Gae",
        "mssr": "rlsys.algo.methods.mssr:Mssr",
        "mapo": "rlsys.algo.methods.mapo:Mapo",
        "ui_s1": "rlsys.algo.methods.ui_s1:UiS1",
        "vcpo": "rlsys.algo.methods.vcpo:MinimumVariance",
        "optimal_token_baseline": "rlsys.algo.methods.optimal_token_baseline:OptimalTokenBaseline",
        "gapo": "rlsys.algo.methods.gapo:Gapo",
        "mc_grpo": "rlsys.algo.methods.mc_grpo:McGrpo",
        "xrpo": "rlsys.algo.methods.xrpo:Xrpo",
        "puzzlecraft": "rlsys.algo.methods.puzzlecraft:PuzzleCraft",
        "outcome_exploration": "rlsys.algo.methods.outcome_exploration:OutcomeExploration",
    },
    "selector": {
        "d3s": "rlsys.algo.methods.d3s:D3S",
        "overlong_filter": "rlsys.algo.selectors:OverlongFilter",
        "unsure_turns": "rlsys.algo.methods.dart:UnsureTurns",
        "top_entropy": "rlsys.algo.methods.top_entropy:TopEntropy",
        "grpo_roc": "rlsys.algo.methods.grpo_roc:GrpoRoc",
        "lens": "rlsys.algo.methods.lens:Lens",
        "rorecomp": "rlsys.algo.methods.rorecomp:RoRecomp",
        "ttrl": "rlsys.algo.methods.ttrl:Thin",
    },
    "correction": {
        "tis": "rlsys.algo.methods.tis:Tis",
        "icepop": "rlsys.algo.methods.icepop:IcePop",
        "rejection": "rlsys.algo.methods.rejection:Rejection",
        "opsm": "rlsys.algo.methods.opsm:Opsm",
        "decoupled_ppo": "rlsys.algo.methods.decoupled_ppo:DecoupledPPO",
        "minpro": "rlsys.algo.methods.minpro:MinPro",
        "lens": "rlsys.algo.methods.lens:LensWeights",
    },
    "loss": {
        "clip": "rlsys.algo.losses:Clip",
        "echo_clip": "rlsys.algo.methods.echo:EchoClip",
        "dual_clip": "rlsys.algo.methods.dual_clip:DualClip",
        "gspo": "rlsys.algo.methods.gspo:Gspo",
        "cispo": "rlsys.algo.methods.cispo:Cispo",
        "luspo": "rlsys.algo.methods.luspo:Luspo",
        "gmpo": "rlsys.algo.methods.gmpo:Gmpo",
        "vespo": "rlsys.algo.methods.vespo:Vespo",
        "sapo": "rlsys.algo.methods.sapo:Sapo",
        "dppo": "rlsys.algo.methods.dppo:Dppo",
        "topr": "rlsys.algo.methods.topr:Topr",
        "dro": "rlsys.algo.methods.dro:Dro",
        "kimi": "rlsys.algo.methods.kimi:Kimi",
        "clip_cov": "rlsys.algo.methods.entropy_mechanism:ClipCov",
        "kl_cov": "rlsys.algo.methods.entropy_mechanism:KlCov",
        "reinforce": "rlsys.algo.losses:Reinforce",
        "m2po": "rlsys.algo.methods.m2po:M2PO",
        "bapo": "rlsys.algo.methods.bapo:Bapo",
        "kl": "rlsys.algo.kl:Kl",
        "adaptive_kl": "rlsys.algo.kl:AdaptiveKl",
        "entropy": "rlsys.algo.entropy:EntropyBonus",
        "adaptive_entropy": "rlsys.algo.methods.adaptive_entropy:AdaptiveEntropy",
        "value": "rlsys.algo.losses:ValueLoss",
        "distill": "rlsys.algo.methods.distill:Distill",
        "distill_pg": "rlsys.algo.methods.distill:DistillPolicyGradient",
        "positive_nll": "rlsys.algo.methods.positive_nll:PositiveNll",
    },
    "reducer": {
        "token_mean": "rlsys.algo.reducers:TokenMean",
        "sequence_mean": "rlsys.algo.reducers:SequenceMean",
        "constant": "rlsys.algo.reducers:Constant",
    },
    "hook": {
        "vcpo": "rlsys.algo.methods.vcpo:EssScaling",
        "brorl": "rlsys.algo.methods.brorl:BatchScaling",
        "ewma": "rlsys.algo.hooks:EwmaAnchor",
        "sync_ref": "rlsys.algo.methods.sync_reference:SyncReference",
    },
    "imitation": {
        "cross_entropy": "rlsys.algo.sft.imitation:CrossEntropy",
        "dft": "rlsys.algo.methods.dft:Dft",
        "otr": "rlsys.algo.methods.otr:Otr",
    },
    "preference": {
        "dpo": "rlsys.algo.sft.preferences:Dpo",
        "robust_dpo": "rlsys.algo.sft.preferences:RobustDpo",
        "dpo_norm": "rlsys.algo.sft.preferences:DpoNorm",
        "ipo": "rlsys.algo.sft.preferences:Ipo",
        "hinge": "rlsys.algo.sft.preferences:Hinge",
        "exo": "rlsys.algo.sft.preferences:Exo",
        "nca": "rlsys.algo.sft.preferences:Nca",
        "bco": "rlsys.algo.sft.preferences:Bco",
        "sppo": "rlsys.algo.sft.preferences:Sppo",
        "aot": "rlsys.algo.sft.preferences:Aot",
        "apo_zero": "rlsys.algo.sft.preferences:ApoZero",
        "apo_down": "rlsys.algo.sft.preferences:ApoDown",
        "discopop": "rlsys.algo.sft.preferences:DiscoPop",
        "simpo": "rlsys.algo.sft.more_preferences:SimPo",
        "cpo": "rlsys.algo.sft.more_preferences:Cpo",
        "orpo": "rlsys.algo.sft.more_preferences:Orpo",
        "kto": "rlsys.algo.sft.more_preferences:Kto",
        "apo_zero_labels": "rlsys.algo.sft.more_preferences:ApoZeroLabels",
        "reward_model": "rlsys.algo.sft.more_preferences:RewardModel",
    },
}
"""Kind -> short name -> import path of a built-in plug-in."""

SECTION_KINDS: Mapping[str, str] = {
    "prompt": "prompt",
    "planners": "planner",
    "group_reward": "group_reward",
    "shaping": "shaping",
    "advantage": "advantage",
    "selectors": "selector",
    "corrections": "correction",
    "loss": "loss",
    "reducer": "reducer",
    "hooks": "hook",
}
"""Field of the config section `algo` -> kind of its plug-ins."""


def build(kind: str, name: str, /, **params: Any) -> Any:
    """Return a new plug-in.

    Args:
        kind: a key of KINDS.
        name: short name, or import path `package.module:attribute`.
        params: parameters of the plug-in.

    Raises:
        UserError: the kind, the name or a parameter is invalid.
    """
    if not isinstance(name, str):
        raise UserError(f"{kind} = {name!r}: expected a short name or an import path package.module:name")
    return make(kind, kind, Spec(name=name, params=params))


def make(field: str, kind: str, spec: Spec) -> Any:
    """Return the plug-in of a config entry.

    Args:
        field: config field of the entry, for error messages.
        kind: a key of KINDS.
        spec: name and parameters of the plug-in.

    Raises:
        UserError: the kind, the name or a parameter is invalid.
    """
    if kind not in TABLE:
        raise UserError(f"unknown kind of plug-in {kind!r}; {hint(str(kind), TABLE)}")
    path = TABLE[kind].get(spec.name, spec.name)
    if ":" not in path:
        raise UserError(f"{field} = {spec.name!r}: unknown {kind}; {_unknown_name_hint(kind, spec.name)}")
    plugin = load(field, path)
    base: Any = load(field, KINDS[kind][0])
    if not isinstance(plugin, type):
        return _adapt(field, base, plugin, spec.params)
    if not issubclass(plugin, base) or plugin is base:
        raise UserError(f"{field} = {spec.name!r}: expected a subclass of {KINDS[kind][0]}, or a function")
    evidence_of(plugin)
    return parse_params(field, plugin, spec.params)


def name_of(plugin: Plugin) -> str:
    """Return the name of a plug-in: its short name in a config, or else the name of its class or function."""
    cls = type(plugin)
    return _short_names().get(f"{cls.__module__}:{cls.__name__}", cls.__name__)


@functools.cache
def _short_names() -> dict[str, str]:
    """Return import path of each built-in plug-in -> its short name."""
    return {path: name for names in TABLE.values() for name, path in names.items()}


def make_all(section: AlgoSection, fields: Collection[str] = SECTION_KINDS) -> dict[str, list[Any]]:
    """Return the plug-ins of the section `algo` by field. A field that holds a single plug-in has a list of one.

    Raises:
        UserError: a name or a parameter is invalid.
    """
    plugins = {}
    for field in fields:
        kind, value = SECTION_KINDS[field], getattr(section, field)
        specs = value if isinstance(value, list) else [] if value is None else [value]
        plugins[field] = [
            make(f"algo.{field}" + (f"[{i}]" if isinstance(value, list) else ""), kind, spec)
            for i, spec in enumerate(specs)
        ]
    return plugins


def check(section: AlgoSection) -> None:
    """Check that all plug-ins of the section `algo` can be built.

    Raises:
        UserError: a name or a parameter is invalid.
    """
    make_all(section)


def load(field: str, path: str) -> Any:
    """Return the class or function at `package.module:attribute`.

    Raises:
        UserError: the attribute cannot be imported or is not callable; the message starts with `field`.
    """
    module_name, _, attribute = path.partition(":")
    attribute_value = import_attribute(field, path)
    if not callable(attribute_value):
        raise UserError(f"{field} = {path!r}: {module_name} has no class or function {attribute!r}")
    return attribute_value


def _adapt(field: str, base: type[Plugin], function: Callable[..., Any], params: Mapping[str, Any]) -> Plugin:
    """Return a plug-in of a new subclass of `base` that calls a function.

    Args:
        field: config field, for error messages.
        base: base class of the kind.
        function: the function. Its optional attributes `needs` (a collection of names) and `evidence` become those of
            the plug-in.
        params: keyword arguments of every call.

    Raises:
        UserError: the function does not accept `params`, or its `evidence` is invalid.
    """
    try:
        inspect.signature(function).bind_partial(**params)
    except (TypeError, ValueError) as e:  # the latter: it has no signature to check
        raise UserError(f"{field}: {e}") from None
    needs = frozenset(getattr(function, "needs", ()))

    def run(_self: Plugin, *args: Any) -> Any:
        return function(*args, **params)

    members = {
        "__call__": run,
        "needs": lambda _self: needs,
        "__doc__": function.__doc__,
        "__module__": __name__,
    }
    if hasattr(function, "evidence"):
        members["evidence"] = function.evidence
    plugin_class = type(function.__name__, (base,), members)
    evidence_of(plugin_class)
    plugin: Plugin = plugin_class()
    return plugin


def _unknown_name_hint(kind: str, name: str) -> str:
    """Return a hint for a name that no plug-in of this kind has."""
    other_kinds = [k for k, names in TABLE.items() if name in names]
    if other_kinds:
        return f"{name} is of kind {' and '.join(other_kinds)}; known: {', '.join(TABLE[kind])}"
    return hint(name, TABLE[kind]) + " (or package.module:name, or path/to/file.py:name)"


def hint(name: str, names: Mapping[str, object]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    similar_names = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {similar_names[0]}?" if similar_names else f"known: {', '.join(names)}"
