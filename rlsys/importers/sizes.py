"""The part of a translation that verl and slime share: batch, layout, engines and launch, made to fit each other."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rlsys.importers.draft import Draft
from rlsys.importers.rows import rows_of


@dataclass
class Sizes:
    """Of a run of theirs; names of their settings that a figure comes from are in `names`, by figure."""

    groups: int
    group_size: int
    update: int | None
    """Samples of one optimizer update; None: all of a step."""
    prompt: int
    response: int
    micro: int
    """Tokens of a micro-batch on one GPU; 0: not said."""
    nodes: int
    gpus: int
    """Of the trainer, a node."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    engine_tp: int = 1
    engine_gpus: int | None = None
    """GPUs of their own; None: the engines share the trainer's."""


def put_sizes(draft: Draft, s: Sizes, names: dict[str, tuple[str, ...]]) -> None:
    """Write the fields of rollout, parallel, engine, weights and launch, and what follows from several of them."""

    def decided(*figures: str) -> list[str]:
        return [name for figure in figures for name in names.get(figure, ())]

    def put(place: str, value: object, *figures: str) -> None:
        draft.put(place, value, *decided(*figures))

    for figure, least in (
        ("groups", 1),
        ("group_size", 1),
        ("response", 1),
        ("nodes", 1),
        ("gpus", 1),
        ("engine_tp", 1),
    ):
        if getattr(s, figure) < least:
            for name in decided(figure)[:1]:
                draft.unknown(name, f"{getattr(s, figure)} does not say how many")
            setattr(s, figure, least)
    for figure in ("tp", "pp", "cp", "ep", "vpp"):
        setattr(s, figure, max(1, getattr(s, figure)))
    layout = ("nodes", "gpus", "tp", "pp", "cp")
    put("rollout.groups_per_step", s.groups, "groups")
    put("rollout.group_size", s.group_size, "group_size")
    put("rollout.max_response_tokens", s.response, "response")
    world = s.nodes * s.gpus
    dp = max(1, world // (s.tp * s.pp * s.cp))
    if world % (s.tp * s.pp * s.cp) and not any(draft.open(name) for name in decided(*layout)):
        draft.odd.append(
            f"{world} GPUs are no multiple of tp {s.tp} x pp {s.pp} x cp {s.cp}; parallel.dp = {dp}"
        )
    for figure in ("tp", "pp", "cp", "vpp", "ep"):
        if getattr(s, figure) > 1 or figure in ("tp", "pp") or any(draft.open(n) for n in decided(figure)):
            put(f"parallel.{figure}", getattr(s, figure), figure)
    if s.etp is not None or any(draft.open(name) for name in decided("etp")):
        put("parallel.etp", s.etp, "etp")
    put("parallel.dp", dp, *layout)
    samples = s.groups * s.group_size
    if samples % dp and not any(draft.open(name) for name in decided("groups", "group_size", *layout)):
        step = next(g for g in range(s.groups, s.groups + dp + 1) if g * s.group_size % dp == 0)
        draft.odd.append(
            f"rollout.groups_per_step = {step}, not {s.groups}: samples must divide over dp = {dp}"
        )
        draft.config["rollout"]["groups_per_step"] = step
        samples = step * s.group_size
    minibatches = _largest_divisor(
        max(1, samples // dp), max(1, round(samples / s.update)) if s.update else 1
    )
    put("algo.minibatches", minibatches, "update", "groups", "group_size", *layout)
    longest = s.prompt + s.response
    put("trainer.token_budget", max(s.micro * s.cp, longest), "micro", "cp", "prompt", "response")
    if "max_total_tokens" not in draft.read("engine", {}):
        draft.odd.append(
            "engine.max_total_tokens: the script leaves the size of the KV pool to SGLang; here it is a number of "
            "tokens, and rlsys explain says how many responses the default holds"
        )
    put("engine.tp", s.engine_tp, "engine_tp")
    engine_gpus = world if s.engine_gpus is None else s.engine_gpus
    of_engines = ("engine_gpus", "placement") if s.engine_gpus is not None else ("nodes", "gpus", "placement")
    put("engine.count", max(1, engine_gpus // s.engine_tp), "engine_tp", *of_engines)
    put("engine.deterministic", False)
    nodes = s.nodes if s.engine_gpus is None else s.nodes + -(-s.engine_gpus // s.gpus)
    put("launch.gpus_per_node", s.gpus, "gpus")
    put("launch.nodes", nodes, "nodes", *(("gpus", *of_engines) if s.engine_gpus is not None else ()))
    if nodes > 1:
        put("launch.backend", "ray", "nodes", "gpus", *of_engines)
    if s.engine_gpus is not None:
        put("launch.placement", "disaggregated", "placement")
    else:
        put("launch.release_memory", True, "placement")
    if nodes > 1 or s.engine_gpus is not None:
        put("weights.method", "broadcast", "nodes", "gpus", *of_engines)
    draft.used.update(n for several in names.values() for n in several)


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`; `number` is at most the square of draft.MOST."""
    best = 1
    for small in range(1, math.isqrt(number) + 1):
        if small > most:
            break
        if number % small == 0:
            best = max(best, small, number // small if number // small <= most else 1)
    return best


def put_steps(
    draft: Draft, name: str, epochs: tuple[str, int], path: str, batch: tuple[str, int]
) -> tuple[int, list[str]]:
    """Write trainer.steps: theirs, or as many as their epochs have.

    Args:
        draft: the config in the making.
        name: the setting with the number of steps.
        epochs: the setting with the number of epochs, and its default; 0 for none.
        path: the setting with the training files.
        batch: the setting with the prompts of a step, and its default.

    Returns:
        The steps, 0 where they are not known, and the settings that decide them.
    """
    steps, decides = draft.whole(name, 0), [name]
    count = draft.whole(*epochs)
    if steps <= 0 and not draft.open(name):
        rows = None if draft.open(path) else rows_of(draft.get(path))
        decides = [epochs[0], path, *batch[:1]]
        if count > 0 and rows is not None and (size := draft.whole(*batch)) > 0:
            steps = count * max(1, rows // size)
            draft.odd.append(f"trainer.steps = {steps}: {count} epochs of {rows} rows, {size} prompts a step")
        else:
            draft.unknown(
                name,
                f"the number of steps is epochs ({count or 'not given'}) x rows of the training files / prompts of a "
                "step",
            )
            decides = [name]
    draft.put("trainer.steps", steps, *decides)
    draft.used.add(epochs[0])
    return max(0, steps), decides


def put_anchor(draft: Draft) -> None:
    """Both frameworks score again at the start of a step; only `behaviour` is exact for interrupted samples."""
    over = draft.read("rollout.over_provision", 1) > 1
    apart = draft.read("launch.placement", "") == "disaggregated"
    draft.put("algo.anchor", ("interpolated" if apart else "behaviour") if over else "old")


def put_held_out(draft: Draft, path: object, count: int | None) -> None:
    """`count`: rows of the file, where it is there."""
    draft.put("eval.prompts", min(128, count or 30))
    if count is None:
        file = f"{path} is not here" if path else "the file with held-out prompts is not known"
        draft.odd.append(f"eval.prompts = 30: {file}, so nobody counted its prompts")


def source_of(path: object) -> str:
    """The short name of the source that reads a file."""
    first = path[0] if isinstance(path, list) and path else path
    return "parquet" if str(first).endswith(".parquet") else "jsonl"


def refuse_other_media(draft: Draft, name: str) -> None:
    """A model that reads images, sound or video: its rows would train as text."""
    path = draft.text(name)
    if re.search(r"(?i)(?<![a-z])(vl|vlm|vision|omni|audio|llava|internvl)(?![a-z])|[a-z0-9](-vl|vl-)", path):
        draft.refuse(name, "by its name a model of images, sound or video; models and prompts here are text")
