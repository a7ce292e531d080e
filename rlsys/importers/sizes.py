"""Batch sizes, parallel layout, engines and launch: the part of a translation that verl and slime share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rlsys.importers.draft import Draft

LORA_START = (
    "trainer.lora: A is drawn as PEFT does, evenly up to 1 / sqrt(inputs); Megatron draws it otherwise"
)
"""Difference of adapters on Megatron's matrices."""


@dataclass
class Sizes:
    """Sizes of a run in the other framework."""

    nodes: int
    gpus: int
    """Trainer GPUs per node."""
    groups: int = 1
    group_size: int = 1
    update: int | None = None
    """Samples of one optimizer update; None: all of a step."""
    prompt: int = 0
    response: int = 1
    micro: int = 0
    """Tokens of a micro-batch on one GPU; 0: not set."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    engine_tp: int = 1
    engine_gpus: int | None = None
    """Number of GPUs of the engines; None: they share the trainer's."""


def set_sizes(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]]) -> None:
    """Write the fields of rollout, parallel, engine, weights and launch, and the fields derived from several of them.

    Args:
        draft: the config draft.
        s: the sizes.
        names: attribute of `s` -> the settings that it comes from.
    """

    def settings_of(*figures: str) -> list[str]:
        return [name for figure in figures for name in names.get(figure, ())]

    def set_field(path: str, value: object, *figures: str) -> None:
        draft.set_field(path, value, *settings_of(*figures))

    for figure, minimum in (
        ("groups", 1),
        ("group_size", 1),
        ("response", 1),
        ("nodes", 1),
        ("gpus", 1),
        ("engine_tp", 1),
    ):
        if getattr(s, figure) < minimum:
            for name in settings_of(figure)[:1]:
                draft.mark_unresolved(name, f"{getattr(s, figure)} does not say how many")
            setattr(s, figure, minimum)
    layout = ("nodes", "gpus", "tp", "pp", "cp")
    set_field("rollout.groups_per_step", s.groups, "groups")
    set_field("rollout.group_size", s.group_size, "group_size")
    set_field("rollout.max_response_tokens", s.response, "response")
    dp = set_parallel(draft, s, names)
    world = s.nodes * s.gpus
    samples = s.groups * s.group_size
    if samples % dp and not any(
        draft.is_unresolved(name) for name in settings_of("groups", "group_size", *layout)
    ):
        step = next(g for g in range(s.groups, s.groups + dp + 1) if g * s.group_size % dp == 0)
        draft.warnings.append(
            f"rollout.groups_per_step = {step}, not {s.groups}: samples must divide over dp = {dp}"
        )
        draft.config["rollout"]["groups_per_step"] = step
        samples = step * s.group_size
    minibatches = _largest_divisor(
        max(1, samples // dp), max(1, round(samples / s.update)) if s.update else 1
    )
    set_field("algo.minibatches", minibatches, "update", "groups", "group_size", *layout)
    max_tokens = s.prompt + s.response
    set_field("trainer.token_budget", max(s.micro * s.cp, max_tokens), "micro", "cp", "prompt", "response")
    set_field("engine.tp", s.engine_tp, "engine_tp")
    engine_gpus = world if s.engine_gpus is None else s.engine_gpus
    of_engines = ("engine_gpus", "placement") if s.engine_gpus is not None else ("nodes", "gpus", "placement")
    set_field("engine.count", max(1, engine_gpus // s.engine_tp), "engine_tp", *of_engines)
    set_field("engine.deterministic", False)
    nodes = s.nodes if s.engine_gpus is None else s.nodes + -(-s.engine_gpus // s.gpus)
    set_field("launch.gpus_per_node", s.gpus, "gpus")
    set_field("launch.nodes", nodes, "nodes", *(("gpus", *of_engines) if s.engine_gpus is not None else ()))
    if nodes > 1:
        set_field("launch.backend", "ray", "nodes", "gpus", *of_engines)
    if s.engine_gpus is not None:
        set_field("launch.placement", "disaggregated", "placement")
    else:
        set_field("launch.release_memory", True, "placement")
    draft.consumed.update(n for setting_names in names.values() for n in setting_names)


def set_parallel(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]]) -> int:
    """Write the fields of parallel; return the data parallel size."""

    def settings_of(*figures: str) -> list[str]:
        return [name for figure in figures for name in names.get(figure, ())]

    def set_field(path: str, value: object, *figures: str) -> None:
        draft.set_field(path, value, *settings_of(*figures))

    layout = ("nodes", "gpus", "tp", "pp", "cp")
    for figure in ("tp", "pp", "cp", "ep", "vpp"):
        setattr(s, figure, max(1, getattr(s, figure)))
    world = s.nodes * s.gpus
    dp = max(1, world // (s.tp * s.pp * s.cp))
    ranks, etp = s.tp * s.cp * dp, s.etp or s.tp
    if ranks % (s.ep * etp) and not any(draft.is_unresolved(n) for n in settings_of(*layout, "ep", "etp")):
        fitting = max(1, math.gcd(s.ep, max(1, ranks // etp)))
        draft.warnings.append(
            f"parallel.ep = {fitting}, not {s.ep}: ep x etp must divide tp x cp x dp = {ranks} ranks; a layout "
            "changes memory and speed alone"
        )
        s.ep = fitting
    if world % (s.tp * s.pp * s.cp) and not any(draft.is_unresolved(name) for name in settings_of(*layout)):
        draft.warnings.append(
            f"{world} GPUs are not a multiple of tp {s.tp} x pp {s.pp} x cp {s.cp}; parallel.dp = {dp}"
        )
    for figure in ("tp", "pp", "cp", "vpp", "ep"):
        if (
            getattr(s, figure) > 1
            or figure in ("tp", "pp")
            or any(draft.is_unresolved(n) for n in settings_of(figure))
        ):
            set_field(f"parallel.{figure}", getattr(s, figure), figure)
    if s.etp is not None or any(draft.is_unresolved(name) for name in settings_of("etp")):
        set_field("parallel.etp", s.etp, "etp")
    set_field("parallel.dp", dp, *layout)
    return dp


def set_layout(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]], batch: int) -> None:
    """Write the fields of parallel and launch for a run without engines.

    Args:
        draft: the config draft.
        s: the sizes.
        names: attribute of `s` -> the settings that it comes from.
        batch: rows of an update.
    """
    dp = set_parallel(draft, s, names)
    if batch % dp:
        draft.warnings.append(f"sft.params.batch = {batch} does not divide over parallel.dp = {dp}")
    draft.set_field("launch.gpus_per_node", s.gpus, *names["gpus"])
    draft.set_field("launch.nodes", s.nodes, *names["nodes"])
    if s.nodes > 1:
        draft.set_field("launch.backend", "ray", *names["nodes"])
    draft.consumed.update(n for setting_names in names.values() for n in setting_names)


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`; `number` is at most MAX_INTEGER squared."""
    best = 1
    for candidate in range(1, math.isqrt(number) + 1):
        if candidate > limit:
            break
        if number % candidate == 0:
            best = max(best, candidate, number // candidate if number // candidate <= limit else 1)
    return best


def set_steps(draft: Draft, name: str, epochs: str, default_epochs: int) -> None:
    """Write trainer.steps, or trainer.epochs where the script gives no number of steps.

    Args:
        draft: the config draft.
        name: the setting with the number of steps.
        epochs: the setting with the number of epochs.
        default_epochs: its default; 0 for none.
    """
    steps, count = draft.integer(name, 0), draft.integer(epochs, default_epochs)
    if steps > 0 or draft.is_unresolved(name):
        draft.set_field("trainer.steps", steps, name)
        draft.consumed.add(epochs)
    elif count > 0 or draft.is_unresolved(epochs):
        draft.set_field("trainer.epochs", count, epochs)
    else:
        draft.require(name, "the script gives neither steps nor epochs")
        draft.set_field("trainer.steps", steps, name)


def omit_offload(draft: Draft) -> None:
    """Remove trainer.offload_optimizer, which the config rejects together with trainer.mtp_loss."""
    if draft.config["trainer"].pop("offload_optimizer", None):
        draft.mapped = [row for row in draft.mapped if not row.result.startswith("trainer.offload_optimizer")]
        draft.warnings.append(
            "trainer.offload_optimizer: not together with trainer.mtp_loss; it changes memory alone"
        )


def set_warm_up(draft: Draft, name: str, updates: int) -> None:
    """Write trainer.warmup_steps for a setting that counts updates, of which a train step has several."""
    count = draft.integer(name, 0)
    if count > 0 and updates > 1:
        draft.set_field("trainer.warmup_steps", -(-count // updates), name)
        if count % updates:
            draft.warnings.append(
                f"trainer.warmup_steps: {count} updates are not a multiple of a step's {updates}"
            )


def eval_truncation(draft: Draft, top_p: float, top_k: int) -> dict[str, float]:
    """Return the fields of an evaluation set; top_k up to 1 and top_p 1 leave out no token."""
    if top_k <= 1 and top_p == 1:
        return {}
    if not 1 < top_k <= 2048:
        draft.warnings.append("eval.sets: top_k is 1024 where the script has no bound, or one above 2048")
    return {"top_k": min(top_k, 2048) if top_k > 1 else 1024, "top_p": top_p}


def set_anchor(draft: Draft) -> None:
    """Write algo.anchor.

    Both frameworks recompute log-probs at the start of a step; only `behaviour` is exact for interrupted
    samples.
    """
    over_provisioned = draft.get_field("rollout.over_provision", 1) > 1
    if over_provisioned:
        draft.warnings.append(
            "algo.anchor: exact for resumed samples; the script scores all of them with one policy"
        )
    disaggregated = draft.get_field("launch.placement", "") == "disaggregated"
    draft.set_field(
        "algo.anchor", ("interpolated" if disaggregated else "behaviour") if over_provisioned else "old"
    )


def set_heldout_prompts(draft: Draft, path: object, count: int | None) -> None:
    """Write eval.prompts for a file of `count` rows; None if the file does not exist here."""
    draft.set_field("eval.prompts", min(128, count or 30))
    if count is None:
        file = f"{path} is not here" if path else "the file with held-out prompts is not known"
        draft.warnings.append(f"eval.prompts = 30: {file}, so nobody counted its prompts")


def data_source(path: object) -> str:
    """Return the short name of the data source that reads a file."""
    first = path[0] if isinstance(path, list) and path else path
    return "parquet" if str(first).endswith(".parquet") else "jsonl"


def reject_media(draft: Draft, model: str, data: str) -> None:
    """Reject a model, or a data set, of images, sound or video, since its rows would train as text."""
    if re.search(
        r"(?i)(?<![a-z])(vl|vlm|vision|omni|audio|llava|internvl)(?![a-z])|[a-z0-9](-vl|vl-)",
        draft.text(model),
    ):
        draft.reject(model, "by its name a model of images, sound or video; models and prompts here are text")
    if re.search(r"(?i)geo3k|geometry3k|visual|vqa|multimodal", str(draft.get(data))):
        draft.reject(data, "by its name rows with images; prompts here are text")
