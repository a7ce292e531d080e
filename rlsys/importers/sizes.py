"""Batch sizes, parallel layout, engines and launch: the part of the translation that verl and slime share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rlsys.importers.draft import Draft

LORA_START = (
    "trainer.lora: A is sampled as in PEFT, uniformly up to 1 / sqrt(inputs); Megatron samples otherwise"
)
"""Warning about adapters on Megatron's matrices."""


@dataclass
class Sizes:
    """Sizes of a run in the other framework.

    Attributes:
        nodes: number of nodes of the trainer.
        gpus: number of GPUs of the trainer per node.
        groups: number of groups of a step.
        group_size: number of samples of a group.
        update: number of samples of an optimizer update; None for all samples of a step.
        prompt: maximum number of tokens of a prompt.
        response: maximum number of tokens of a response.
        micro: number of tokens of a micro-batch on one GPU; 0 if it is not set.
        tp: tensor-parallel size of the trainer; pp, cp, ep, etp and vpp are its other parallel sizes.
        engine_tp: tensor-parallel size of an engine.
        engine_gpus: number of GPUs of the engines; None if they share the trainer's GPUs.
    """

    nodes: int
    gpus: int
    groups: int = 1
    group_size: int = 1
    update: int | None = None
    prompt: int = 0
    response: int = 1
    micro: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    engine_tp: int = 1
    engine_gpus: int | None = None


_LAYOUT = ("nodes", "gpus", "tp", "pp", "cp")
"""Attributes of Sizes that determine the data-parallel size."""


@dataclass
class _SizedDraft:
    """Config draft whose fields come from sizes.

    Attributes:
        draft: the config draft.
        names: attribute of Sizes -> the settings that set it.
    """

    draft: Draft
    names: dict[str, tuple[str, ...]]

    def settings(self, *attributes: str) -> list[str]:
        """Return the settings that set the attributes."""
        return [name for attribute in attributes for name in self.names.get(attribute, ())]

    def set_field(self, path: str, value: object, *attributes: str) -> None:
        """Write a config field that the attributes determine."""
        self.draft.set_field(path, value, *self.settings(*attributes))

    def has_unresolved(self, *attributes: str) -> bool:
        """Return whether one of the attributes has an unresolved setting."""
        return any(self.draft.is_unresolved(name) for name in self.settings(*attributes))


def set_sizes(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]]) -> None:
    """Write the fields of rollout, parallel, engine, weights and launch, and the fields derived from several of them.

    Args:
        draft: the config draft.
        s: the sizes. Sizes below 1 are set to 1, and their settings count as unresolved.
        names: attribute of `s` -> the settings that set it.
    """
    sized = _SizedDraft(draft, names)
    for attribute in ("groups", "group_size", "response", "nodes", "gpus", "engine_tp"):
        if getattr(s, attribute) < 1:
            for name in sized.settings(attribute)[:1]:
                draft.mark_unresolved(name, "expected at least 1")
            setattr(s, attribute, 1)
    sized.set_field("rollout.groups_per_step", s.groups, "groups")
    sized.set_field("rollout.group_size", s.group_size, "group_size")
    sized.set_field("rollout.max_response_tokens", s.response, "response")
    dp = set_parallel(draft, s, names)
    samples = _fit_groups(sized, s, dp) * s.group_size
    minibatches = _largest_divisor(
        max(1, samples // dp), max(1, round(samples / s.update)) if s.update else 1
    )
    sized.set_field("algo.minibatches", minibatches, "update", "groups", "group_size", *_LAYOUT)
    token_budget = max(s.micro * s.cp, s.prompt + s.response)
    sized.set_field("trainer.token_budget", token_budget, "micro", "cp", "prompt", "response")
    _set_engines(sized, s)
    draft.consumed.update(n for setting_names in names.values() for n in setting_names)


def _fit_groups(sized: _SizedDraft, s: Sizes, dp: int) -> int:
    """Return the number of groups of a step. Raise rollout.groups_per_step so that `dp` divides the samples."""
    is_resolved = not sized.has_unresolved("groups", "group_size", *_LAYOUT)
    if s.groups * s.group_size % dp == 0 or not is_resolved:
        return s.groups
    groups = next(g for g in range(s.groups, s.groups + dp + 1) if g * s.group_size % dp == 0)
    sized.draft.warnings.append(
        f"rollout.groups_per_step = {groups}, not {s.groups}: dp = {dp} must divide the number of samples"
    )
    sized.draft.config["rollout"]["groups_per_step"] = groups
    return groups


def _set_engines(sized: _SizedDraft, s: Sizes) -> None:
    """Write the fields of engine and launch."""
    sized.set_field("engine.tp", s.engine_tp, "engine_tp")
    if s.engine_gpus is None:
        engine_gpus, nodes = s.nodes * s.gpus, s.nodes
        engine_attributes = ["nodes", "gpus", "placement"]
        node_attributes = ["nodes"]
    else:
        engine_gpus, nodes = s.engine_gpus, s.nodes + -(-s.engine_gpus // s.gpus)
        engine_attributes = ["engine_gpus", "placement"]
        node_attributes = ["nodes", "gpus", *engine_attributes]
    sized.set_field("engine.count", max(1, engine_gpus // s.engine_tp), "engine_tp", *engine_attributes)
    sized.set_field("engine.deterministic", False)
    sized.set_field("launch.gpus_per_node", s.gpus, "gpus")
    sized.set_field("launch.nodes", nodes, *node_attributes)
    if nodes > 1:
        sized.set_field("launch.backend", "ray", "nodes", "gpus", *engine_attributes)
    if s.engine_gpus is not None:
        sized.set_field("launch.placement", "disaggregated", "placement")
    else:
        sized.set_field("launch.release_memory", True, "placement")


def set_parallel(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]]) -> int:
    """Write the fields of parallel, and return the data-parallel size.

    Args:
        draft: the config draft.
        s: the sizes. Parallel sizes below 1 are set to 1, and `ep` to a size that fits the layout.
        names: attribute of `s` -> the settings that set it.
    """
    sized = _SizedDraft(draft, names)
    for attribute in ("tp", "pp", "cp", "ep", "vpp"):
        setattr(s, attribute, max(1, getattr(s, attribute)))
    world = s.nodes * s.gpus
    dp = max(1, world // (s.tp * s.pp * s.cp))
    ranks, etp = s.tp * s.cp * dp, s.etp or s.tp
    if ranks % (s.ep * etp) and not sized.has_unresolved(*_LAYOUT, "ep", "etp"):
        ep = max(1, math.gcd(s.ep, max(1, ranks // etp)))
        draft.warnings.append(
            f"parallel.ep = {ep}, not {s.ep}: ep x etp must divide tp x cp x dp = {ranks} ranks; the layout changes "
            "only memory and speed"
        )
        s.ep = ep
    if world % (s.tp * s.pp * s.cp) and not sized.has_unresolved(*_LAYOUT):
        draft.warnings.append(
            f"parallel.dp = {dp}: {world} GPUs are not a multiple of tp {s.tp} x pp {s.pp} x cp {s.cp}"
        )
    for attribute in ("tp", "pp", "cp", "vpp", "ep"):
        size = getattr(s, attribute)
        if size > 1 or attribute in ("tp", "pp") or sized.has_unresolved(attribute):
            sized.set_field(f"parallel.{attribute}", size, attribute)
    if s.etp is not None or sized.has_unresolved("etp"):
        sized.set_field("parallel.etp", s.etp, "etp")
    sized.set_field("parallel.dp", dp, *_LAYOUT)
    return dp


def set_layout(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]], batch: int) -> None:
    """Write the fields of parallel and launch for a run without engines.

    Args:
        draft: the config draft.
        s: the sizes.
        names: attribute of `s` -> the settings that set it.
        batch: number of rows of an update.
    """
    dp = set_parallel(draft, s, names)
    if batch % dp:
        draft.warnings.append(f"sft.params.batch = {batch}: expected a multiple of parallel.dp = {dp}")
    draft.set_field("launch.gpus_per_node", s.gpus, *names["gpus"])
    draft.set_field("launch.nodes", s.nodes, *names["nodes"])
    if s.nodes > 1:
        draft.set_field("launch.backend", "ray", *names["nodes"])
    draft.consumed.update(n for setting_names in names.values() for n in setting_names)


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`. `number` is at most MAX_INTEGER squared."""
    best = 1
    for candidate in range(1, math.isqrt(number) + 1):
        if candidate > limit:
            break
        if number % candidate == 0:
            best = max(best, candidate, number // candidate if number // candidate <= limit else 1)
    return best


def set_steps(draft: Draft, name: str, epochs: str, default_epochs: int) -> None:
    """Write trainer.steps, or trainer.epochs if the script sets no number of steps.

    Args:
        draft: the config draft.
        name: the setting with the number of steps.
        epochs: the setting with the number of epochs.
        default_epochs: default number of epochs; 0 for none.
    """
    steps, count = draft.integer(name, 0), draft.integer(epochs, default_epochs)
    if steps > 0 or draft.is_unresolved(name):
        draft.set_field("trainer.steps", steps, name)
        draft.consumed.add(epochs)
    elif count > 0 or draft.is_unresolved(epochs):
        draft.set_field("trainer.epochs", count, epochs)
    else:
        draft.require(name, "the script sets neither steps nor epochs")
        draft.set_field("trainer.steps", steps, name)


def omit_offload(draft: Draft) -> None:
    """Remove trainer.offload_optimizer, which the config rejects together with trainer.mtp_loss."""
    if draft.config["trainer"].pop("offload_optimizer", None):
        draft.mapped = [row for row in draft.mapped if not row.result.startswith("trainer.offload_optimizer")]
        draft.warnings.append(
            "trainer.offload_optimizer: omitted, because trainer.mtp_loss does not support it; it changes only memory"
        )


def set_warm_up(draft: Draft, name: str, updates: int) -> None:
    """Write trainer.warmup_steps for a setting that counts optimizer updates.

    Args:
        draft: the config draft.
        name: the setting.
        updates: number of updates of a train step.
    """
    count = draft.integer(name, 0)
    if count > 0 and updates > 1:
        draft.set_field("trainer.warmup_steps", -(-count // updates), name)
        if count % updates:
            draft.warnings.append(
                f"trainer.warmup_steps: rounded up, because {count} is not a multiple of {updates} updates per step"
            )


def eval_truncation(draft: Draft, top_p: float, top_k: int) -> dict[str, float]:
    """Return top_k and top_p of an evaluation set; empty if the script's values exclude no token.

    top_k up to 1 means no limit.
    """
    if top_k <= 1 and top_p == 1:
        return {}
    limit = min(top_k, 2048) if top_k > 1 else 1024
    if limit != top_k:
        draft.warnings.append(f"eval.sets: top_k = {limit}; rlsys needs a limit of at most 2048")
    return {"top_k": limit, "top_p": top_p}


def set_anchor(draft: Draft) -> None:
    """Write algo.anchor: `old`, since both frameworks recompute log-probs at the start of a step.

    If samples are interrupted, the anchor is `behaviour`, which is exact for resumed samples, or for disaggregated
    engines `interpolated`.
    """
    if draft.get_field("rollout.over_provision", 1) <= 1:
        draft.set_field("algo.anchor", "old")
        return
    is_disaggregated = draft.get_field("launch.placement", "") == "disaggregated"
    anchor = "interpolated" if is_disaggregated else "behaviour"
    draft.warnings.append(
        f"algo.anchor = {anchor}: it depends on the policies of resumed samples; the script scores all samples with "
        "one policy"
    )
    draft.set_field("algo.anchor", anchor)


def set_heldout_prompts(draft: Draft, path: object, count: int | None) -> None:
    """Write eval.prompts.

    Args:
        draft: the config draft.
        path: file with the held-out prompts; None if it is unknown.
        count: number of its rows; None if the file does not exist on this machine.
    """
    draft.set_field("eval.prompts", min(128, count or 30))
    if count is None:
        file = f"{path} does not exist on this machine" if path else "the file of held-out prompts is unknown"
        draft.warnings.append(f"eval.prompts = 30: {file}, so the number of its prompts is unknown")


def data_source(path: object) -> str:
    """Return the short name of the prompt source that reads a file, or the first of a list of files."""
    first = path[0] if isinstance(path, list) and path else path
    return "parquet" if str(first).endswith(".parquet") else "jsonl"


def reject_media(draft: Draft, model: str, data: str) -> None:
    """Reject a model or a data set of images, sound or video, because its rows would be trained as text.

    Args:
        draft: the config draft.
        model: the setting with the model.
        data: the setting with the training data.
    """
    if re.search(
        r"(?i)(?<![a-z])(vl|vlm|vision|omni|audio|llava|internvl)(?![a-z])|[a-z0-9](-vl|vl-)",
        draft.text(model),
    ):
        draft.reject(model, "by its name a model of images, sound or video; rlsys trains models of text only")
    if re.search(r"(?i)geo3k|geometry3k|visual|vqa|multimodal", str(draft.get(data))):
        draft.reject(data, "by its name data with images; prompts of rlsys are text")
