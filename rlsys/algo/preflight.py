"""Checks of an algorithm before a run starts: unknown plug-ins, unavailable signals and contradictory fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.algo import no_effect
from rlsys.algo.anchors import ANCHOR_NEEDS
from rlsys.algo.hooks import Hook
from rlsys.algo.losses import Loss
from rlsys.algo.methods.brorl import BatchScaling
from rlsys.algo.methods.dapo import Dapo
from rlsys.algo.methods.dars import Dars
from rlsys.algo.methods.explore import Explore
from rlsys.algo.methods.lens_groups import Lens
from rlsys.algo.methods.mc_grpo import McGrpo
from rlsys.algo.methods.xrpo_groups import Xrpo
from rlsys.algo.objective import Objective
from rlsys.algo.planners import MAX_GROUP, Planner, largest_size, start_size
from rlsys.algo.plugin import EVIDENCE, NEEDS, evidence_of
from rlsys.algo.reducers import Constant, TokenMean
from rlsys.algo.registry import SECTION_KINDS, make_all, name_of
from rlsys.algo.selectors import Selector
from rlsys.algo.shaping import Overlong
from rlsys.config import Config
from rlsys.config.algo import AlgoSection, TeacherSection
from rlsys.config.plugins import one_line_errors
from rlsys.config.rollout import TREES, RolloutConfig
from rlsys.core.errors import UserError


def check(config: Config) -> None:
    """Check the section `algo` of a config, alone and with the other sections.

    Raises:
        UserError: a name or parameter is unknown, the run cannot provide a signal that a plug-in needs, or fields
            contradict each other.
    """
    plugins = make_all(config.algo)
    objective = Objective(config.algo)
    needs_of = {f"algo.anchor = {config.algo.anchor!r}": ANCHOR_NEEDS[objective.anchor]}
    for field, field_plugins in plugins.items():
        for i, plugin in enumerate(field_plugins):
            name = f"algo.{field}[{i}] ({name_of(plugin)})"
            with one_line_errors(f"{name}: needs"):
                needs_of[name] = plugin.needs()
    for field, needs in needs_of.items():
        for need in sorted(needs):
            if reason := _why_unavailable(need, config):
                raise UserError(f"{field} needs {need}, {NEEDS[need]}: {reason}")
    if config.engine.explorers and not any("probes" in needs for needs in needs_of.values()):
        raise UserError(
            "engine.pools: role = explore, but no planner uses such engines; name explore in algo.planners"
        )
    _check_teacher(config, plugins)
    _check_reducer(plugins)
    _check_anchor(objective.anchor, plugins)
    no_effect.check(config, plugins)
    _check_lens(config.algo)
    _check_duplicates(config.algo)
    deferring = [i for i, selector in enumerate(plugins["selectors"]) if selector.defers]
    if len(deferring) > 1:
        raise UserError(f"algo.selectors[{deferring[1]}]: only one selector can defer samples; name one")
    _check_loss(plugins)
    _check_critic(plugins, config.algo.critic is not None)
    _check_sequence_ratio(plugins)
    _check_average(config.algo.anchor, plugins)
    _check_reference(plugins)
    _check_groups(config, plugins)
    _check_batch_scaling(config, plugins)
    _check_judge(config)
    _check_overlong(config, plugins)
    if config.trainer.early_backward and (reason := _why_not_early(config)):
        raise UserError(f"trainer.early_backward = true, but {reason}")


def notes(config: Config) -> list[str]:
    """Return notes on a valid algorithm, one line each.

    Raises:
        UserError: a plug-in is unknown or has invalid parameters.
    """
    plugins = make_all(config.algo)
    reward_notes = no_effect.reward_scale_notes(config, plugins)
    return [*_weak_evidence(plugins), *no_effect.warnings(config, plugins), *reward_notes]


def _weak_evidence(plugins: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return a line for each plug-in whose source is neither code nor the formulas of a paper."""
    return [
        f"algo.{field}[{i}] ({name_of(plugin)}) has evidence {evidence} ({EVIDENCE[evidence]}), so it may "
        f"differ from the authors' implementation of {plugin.paper or 'the method'}"
        for field, field_plugins in plugins.items()
        for i, plugin in enumerate(field_plugins)
        if (evidence := evidence_of(type(plugin))) in ("A", "N")
    ]


def _why_not_early(config: Config) -> str:
    """Return the reason why finished groups cannot have early backward passes; empty if they can."""
    whole_step = Objective(config.algo).requirements.needs_whole_step
    reasons = {
        "launch.placement = colocated: engines pause while the trainer works; use disaggregated": (
            config.launch.placement == "colocated"
        ),
        f"the algorithm needs whole steps: {', '.join(whole_step)}": bool(whole_step),
        f"algo.minibatches = {config.algo.minibatches}: a mini-batch has groups from the whole step; use 1": (
            config.algo.minibatches > 1
        ),
        f"algo.epochs = {config.algo.epochs}: a second pass needs the step's samples again; use 1": (
            config.algo.epochs > 1
        ),
        "parallel.overlap = true would reduce gradients in every early backward pass; use false": (
            config.parallel.overlap
        ),
        f"trainer.balance_loss = {config.trainer.balance_loss} needs all tokens of a step; use balance_rate": (
            config.trainer.balance_loss > 0
        ),
        "rollout.staleness_policy = wait chooses among all groups that are ready; use drop or mask": (
            config.rollout.staleness_policy == "wait"
        ),
        f"rollout.repeat = {config.rollout.repeat}: the record determines the groups of a step; use null": (
            config.rollout.repeat is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


_COMPARED_TOKENS = {
    "distill": "the most probable tokens; expected 1 or more, or null",
    "distill_pg": "the sampled token; expected 0",
}
"""Loss term -> tokens whose teacher log-probs it reads, and the values of algo.teacher.top_k that provide them."""


def _check_teacher(config: Config, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that the teacher provides the tokens that the loss terms compare."""
    teacher = config.algo.teacher
    if teacher is None:
        return
    for spec in config.algo.loss:
        if spec.name in _COMPARED_TOKENS and (teacher.top_k == 0) != (spec.name == "distill_pg"):
            raise UserError(
                f"algo.teacher.top_k = {teacher.top_k}: algo.loss {spec.name} compares {_COMPARED_TOKENS[spec.name]}"
            )
    if teacher.engine is not None:
        _check_teacher_engine(teacher, config.rollout, plugins["loss"])


def _check_teacher_engine(teacher: TeacherSection, rollout: RolloutConfig, losses: Sequence[Loss]) -> None:
    """Check that a loss term uses the teacher's engine, and that the engine supports the settings of the rollout."""
    if not any("divergence" in term.needs() for term in losses):
        raise UserError(
            f"algo.teacher.engine = {teacher.engine} is unused: no term of algo.loss compares the policy "
            "with a teacher; add distill"
        )
    reasons = {
        "algo.teacher.top_k = null: an engine returns only its most probable ids; use a number": teacher.top_k
        is None,
        "algo.teacher.by_source names additional teachers; expected one": bool(teacher.by_source),
        f"rollout.workers = {rollout.workers}: only one rollout process can use it; use 1": rollout.workers
        > 1,
        f"rollout.temperature = {rollout.temperature:g}: SGLang returns prompt log-probs at 1 only; use 1": (
            rollout.temperature != 1
        ),
        f"rollout.top_k = {rollout.top_k}: an engine does not restrict log-probs to a sampling mask; use null": (
            rollout.top_k is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"algo.teacher.engine = {teacher.engine}, but {reason}")


def _check_reducer(plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that `over: active` is not used with advantages of tokens, for which no sample is active or inactive."""
    (advantage,), (reducer,) = plugins["advantage"], plugins["reducer"]
    if reducer.over == "active" and advantage.changes_tokens():
        raise UserError(
            "algo.reducer.over = 'active' counts samples whose advantage is not 0, but algo.advantage "
            f"({name_of(advantage)}) gives each token its own advantage; use all"
        )


def _check_anchor(anchor: str, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that no correction acts only on a rho of 1, which anchor mu gives to every term with a ratio."""
    ratios = frozenset[bool]().union(*(term.ratios() for term in plugins["loss"]))
    for i, correction in enumerate(plugins["corrections"]):
        if anchor == "mu" and correction.of_anchor and ratios == {True}:
            raise UserError(
                f"algo.corrections[{i}] ({name_of(correction)}) acts on exp(anchor - mu), which is 1 "
                "everywhere with algo.anchor = 'mu': use algo.anchor = old, behaviour, interpolated or ewma"
            )


def _check_lens(algo: AlgoSection) -> None:
    """Check that a config has all three plug-ins of LENS: planner, selector and correction, or none of them."""
    fields = {"planners": algo.planners, "selectors": algo.selectors, "corrections": algo.corrections}
    lens_fields = [field for field, specs in fields.items() if "lens" in {spec.name for spec in specs}]
    if lens_fields and (missing := sorted(set(fields) - set(lens_fields))):
        raise UserError(
            f"algo.{lens_fields[0]} has lens, but algo.{missing[0]} has not; name lens in all of {', '.join(fields)}"
        )


def _check_duplicates(algo: AlgoSection) -> None:
    """Check that no field names a plug-in twice with the same parameters."""
    for field, kind in SECTION_KINDS.items():
        specs = getattr(algo, field)
        for i, spec in enumerate(specs if isinstance(specs, list) else []):
            if spec in specs[:i]:
                first = f"algo.{field}[{specs.index(spec)}]"
                raise UserError(f"algo.{field}[{i}] = {spec.name!r} repeats {first}; name each {kind} once")


def _check_loss(plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that a loss term trains the policy."""
    if not any(term.policy or term.trains_policy for term in plugins["loss"]):
        names = ", ".join(name_of(term) for term in plugins["loss"])
        raise UserError(
            f"algo.loss ({names}) has no term that trains on advantages; add one, for example clip"
        )


def _check_critic(plugins: Mapping[str, Sequence[Any]], own_critic: bool) -> None:
    """Check that a critic has both a loss that trains it and an advantage that uses its values.

    Args:
        plugins: plug-ins of the config by field of the section `algo`.
        own_critic: whether the critic is a separate model.
    """
    (advantage,), losses = plugins["advantage"], plugins["loss"]
    names = ", ".join(name_of(term) for term in losses)
    needs_values = "values" in advantage.needs()
    trained = any("values" in term.needs() for term in losses)
    if trained and not needs_values:
        raise UserError(
            f"algo.loss ({names}) trains a critic, but algo.advantage ({name_of(advantage)}) computes no "
            "returns for it; use gae"
        )
    if own_critic and not needs_values:
        raise UserError(
            f"algo.critic is set, but algo.advantage ({name_of(advantage)}) uses no values; use gae, or "
            "algo.critic = null"
        )
    if needs_values and not trained:
        raise UserError(
            f"algo.advantage ({name_of(advantage)}) needs a critic, but algo.loss ({names}) trains none; add "
            "value"
        )


def _check_sequence_ratio(plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that a loss with one ratio per response has a reducer that gives all responses the same weight."""
    (reducer,) = plugins["reducer"]
    names = [name_of(term) for term in plugins["loss"] if term.per_sequence]
    if names and isinstance(reducer, TokenMean | Constant):
        raise UserError(
            f"algo.loss ({names[0]}) has one ratio per response, but algo.reducer ({name_of(reducer)}) gives "
            "long responses more weight; use algo.reducer = sequence_mean"
        )


def _check_average(anchor: str, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that one hook averages the weights if the anchor or a plug-in uses the average, and none otherwise."""
    averaging = [name_of(hook) for hook in plugins["hooks"] if type(hook).average is not Hook.average]
    is_needed = "ewma" in ANCHOR_NEEDS[anchor].union(
        *(p.needs() for field_plugins in plugins.values() for p in field_plugins)
    )
    if is_needed and not averaging:
        raise UserError(
            f"algo.anchor = {anchor!r} needs averaged weights, but no hook computes them; use algo.hooks = [ewma]"
        )
    if averaging and not is_needed:
        raise UserError(
            f"algo.hooks ({averaging[0]}) averages the weights, but algo.anchor = {anchor!r} does not use the "
            "average; use algo.anchor = ewma"
        )
    if len(averaging) > 1:
        raise UserError(f"algo.hooks ({', '.join(averaging)}) average the weights more than once; name one")


def _check_reference(plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that at most one hook updates the reference model, and that a plug-in then uses the model."""
    updating = [name_of(hook) for hook in plugins["hooks"] if type(hook).reference is not Hook.reference]
    if updating and "ref" not in frozenset().union(
        *(p.needs() for field_plugins in plugins.values() for p in field_plugins)
    ):
        raise UserError(
            f"algo.hooks ({updating[0]}) updates the reference model, but no plug-in uses it; add kl to algo.loss"
        )
    if len(updating) > 1:
        raise UserError(
            f"algo.hooks ({', '.join(updating)}) update the reference model more than once; name one"
        )


def _check_groups(config: Config, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that groups have the sizes that their planners and their estimator require."""
    planners, size = plugins["planners"], config.rollout.group_size
    with one_line_errors("algo.planners: size or limit"):
        start, largest = start_size(planners, size), largest_size(planners, size)
    size_text = f"rollout.group_size = {size}"
    if largest > MAX_GROUP:
        raise UserError(
            f"algo.planners: with {size_text} groups grow to {largest} samples; expected at most {MAX_GROUP}"
        )
    if largest == 1:
        _check_single_samples(size_text, plugins)
    if isinstance(plugins["advantage"][0], McGrpo):
        _check_odd(start, size_text, planners, plugins["selectors"])
    _check_growth(start, size, planners)


def _check_single_samples(size_text: str, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that no plug-in compares the samples of a group, because groups have one sample.

    Args:
        size_text: the setting of the group size, for messages.
        plugins: plug-ins of the config by field of the section `algo`.
    """
    (advantage,) = plugins["advantage"]
    if advantage.compares and any(term.policy for term in plugins["loss"]):
        raise UserError(
            f"{size_text}, but algo.advantage ({name_of(advantage)}) compares the samples of a group; use "
            "group_size >= 2"
        )
    for i, planner in enumerate(plugins["planners"]):
        if isinstance(planner, Dapo):
            raise UserError(
                f"{size_text}, but algo.planners[{i}] (dapo) drops groups of equal rewards; use group_size >= 2"
            )


def _check_growth(start: int, size: int, planners: Sequence[Planner]) -> None:
    """Check the planners that add samples to a group.

    Args:
        start: number of samples that groups start with.
        size: rollout.group_size.
        planners: planners of the config.
    """
    growing = [name_of(p) for p in planners if p.limit(start) > start]
    for exclusive, reason in (
        ("xrpo", "assigns all additional samples of a group"),
        ("explore", "sets the size of groups"),
    ):
        if len(growing) > 1 and exclusive in growing:
            raise UserError(f"algo.planners ({', '.join(growing)}): {exclusive} {reason}; remove the others")
    for i, planner in enumerate(planners):
        if isinstance(planner, Explore) and not planner.first <= size <= planner.largest > planner.first:
            raise UserError(
                f"algo.planners[{i}] (explore): rollout.group_size = {size} is the size of a group without probes; "
                f"expected a size between first = {planner.first} and largest = {planner.largest}, which must differ"
            )
        if isinstance(planner, Dars | Xrpo) and planner.largest <= start:
            raise UserError(
                f"algo.planners[{i}] ({name_of(planner)}).largest = {planner.largest}: expected more than the "
                f"{start} samples that groups start with (rollout.group_size = {size})"
            )


def _check_odd(size: int, size_text: str, planners: Sequence[Planner], selectors: Sequence[Selector]) -> None:
    """Check that every group has an odd number of samples, so that its median is the reward of one sample.

    Args:
        size: number of samples that groups start with.
        size_text: the setting of the group size, for messages.
        planners: planners of the config.
        selectors: selectors of the config.
    """
    needs = "algo.advantage (mc_grpo) needs an odd number of samples"
    if size % 2 == 0:
        raise UserError(f"{size_text} gives groups of {size}, but {needs}; use algo.planners = [mc_grpo]")
    for i, planner in enumerate(planners):
        if planner.limit(size) > size and not isinstance(planner, Lens):  # its selector restores the size
            raise UserError(
                f"algo.planners[{i}] ({name_of(planner)}) lets groups of {size} grow to any size up to "
                f"{planner.limit(size)}, but {needs}; use another advantage, for example dr_grpo"
            )
    for i, selector in enumerate(selectors):
        remaining = selector.size_of(size)
        if remaining is not None and remaining % 2 == 0:
            raise UserError(
                f"algo.selectors[{i}] ({name_of(selector)}) leaves {remaining} of groups of {size}, but "
                f"{needs}; set `keep` so that the number is odd"
            )
        size = size if remaining is None else remaining


def _check_batch_scaling(config: Config, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that the hook brorl, which scales the learning rate by the batch size, has a factor other than 1."""
    size, planners = config.rollout.group_size, plugins["planners"]
    start = start_size(planners, size)
    batch = config.rollout.groups_per_step * start / config.algo.minibatches
    for i, hook in enumerate(plugins["hooks"]):
        if isinstance(hook, BatchScaling) and batch == hook.samples and largest_size(planners, size) == start:
            raise UserError(
                f"algo.hooks[{i}] (brorl).samples = {hook.samples} equals the samples of an update "
                f"({config.rollout.groups_per_step} groups of {start} over {config.algo.minibatches} mini-batches), "
                "so the factor of the learning rate is 1; increase the batch, or remove the hook"
            )


def _check_judge(config: Config) -> None:
    """Check that a plug-in uses the judge."""
    is_needed = any(spec.name == "aoi" for spec in config.algo.planners)
    is_needed |= any(spec.name == "reasoning_answer_consistency" for spec in config.data.reward)
    if config.data.judge is not None and config.algo.group_reward is None and not is_needed:
        raise UserError(
            f"data.judge = {config.data.judge!r} is unused: algo.group_reward is not set; use fapo, the planner "
            "aoi, or data.judge = null"
        )


def _check_overlong(config: Config, plugins: Mapping[str, Sequence[Any]]) -> None:
    """Check that the overlong penalty starts below the largest response length."""
    longest = config.rollout.max_response_tokens
    for i, shaping in enumerate(plugins["shaping"]):
        if isinstance(shaping, Overlong) and shaping.cap - shaping.buffer >= longest:
            raise UserError(
                f"algo.shaping[{i}] (overlong): cap = {shaping.cap} minus buffer = {shaping.buffer}: expected less "
                f"than rollout.max_response_tokens = {longest}; otherwise no response is penalised"
            )


def _why_unavailable(need: str, config: Config) -> str:
    """Return the reason why the run cannot provide the signal `need`; empty if it can."""
    if need == "behaviour":
        return _why_no_behaviour(config)
    if need == "tool_penalty" and config.rollout.generator == "single_turn":
        return "rollout.generator = single_turn calls no tools; use calculator, or penalty: length"
    if need == "values" and config.trainer.lora is not None:
        return "trainer.lora trains only adapters, and values need a separate layer; remove one of them"
    if need == "divergence" and config.algo.teacher is None:
        return "algo.teacher is not set"
    if need in ("verdicts", "guidance") and config.data.judge is None:
        return "data.judge is not set"
    forks = config.rollout.generator in TREES or any(p.name == "scope" for p in config.algo.planners)
    if need == "forks" and not forks:
        return f"rollout.generator = {config.rollout.generator} generates no trees; use latr"
    if need == "guidance" and config.rollout.generator not in ("single_turn", "calculator", "functions"):
        return f"rollout.generator = {config.rollout.generator} creates its prompt itself; use single_turn"
    if need == "repairs" and config.data.process_judge is None:
        return "data.process_judge is not set"
    if need == "repairs" and config.rollout.generator not in ("single_turn", *TREES):
        return (
            f"rollout.generator = {config.rollout.generator} cannot continue a prefix of another response; use "
            "single_turn"
        )
    if need == "probes" and not config.engine.explorers:
        return "engine.pools has no pool with role = explore"
    if need == "prompt_scores" and config.engine.reference is None:
        return "engine.reference is not set: expected own, or the URL of a server with the reference weights"
    return ""


def _why_no_behaviour(config: Config) -> str:
    """Return the reason why tokens cannot be scored by the weights that sampled them; empty if they can."""
    if config.launch.placement != "colocated":
        return (
            f"with launch.placement = {config.launch.placement!r} the weights have changed before tokens can be "
            "scored; use colocated, or algo.anchor = interpolated or ewma"
        )
    if config.router.interruption != "abort":
        return (
            f"router.interruption = {config.router.interruption} keeps the last tokens of a sample in its engine "
            "until the weights have changed; use abort, or algo.anchor = interpolated or ewma"
        )
    if config.trainer.replay == "trainer":
        return (
            "trainer.replay = 'trainer' trains a token with the experts of the step's scoring pass, but its log-prob "
            "was computed with other experts; use trainer.replay = engine, or algo.anchor = old"
        )
    return ""
