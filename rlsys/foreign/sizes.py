"""The part of a translation that verl and slime share: batch, layout, engines and launch, made to fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlsys.foreign.draft import Draft

LEAST_CACHE = 65536


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
    """Fields of rollout, parallel, engine, weights, launch, and what follows from several of them."""

    def put(place: str, value: object, figure: str = "") -> None:
        draft.put(place, value, *names.get(figure, ()))

    put("rollout.groups_per_step", s.groups, "groups")
    put("rollout.group_size", s.group_size, "group_size")
    put("rollout.max_response_tokens", s.response, "response")
    world = s.nodes * s.gpus
    dp = max(1, world // (s.tp * s.pp * s.cp))
    if world % (s.tp * s.pp * s.cp):
        draft.odd.append(
            f"{world} GPUs are no multiple of tp {s.tp} x pp {s.pp} x cp {s.cp}; parallel.dp = {dp}"
        )
    for figure in ("tp", "pp", "cp", "vpp", "ep"):
        if getattr(s, figure) > 1 or figure in ("tp", "pp"):
            put(f"parallel.{figure}", getattr(s, figure), figure)
    if s.etp is not None:
        put("parallel.etp", s.etp, "etp")
    put("parallel.dp", dp)
    samples = s.groups * s.group_size
    minibatches = max(1, round(samples / s.update)) if s.update else 1
    while minibatches > 1 and samples % (dp * minibatches):
        minibatches -= 1
    if samples % (dp * minibatches):
        step = next(g for g in range(s.groups, s.groups + dp + 1) if g * s.group_size % dp == 0)
        draft.odd.append(
            f"rollout.groups_per_step = {step}, not {s.groups}: samples must divide over dp = {dp}"
        )
        draft.config["rollout"]["groups_per_step"] = step
    put("algo.minibatches", minibatches, "update")
    longest = s.prompt + s.response
    put("trainer.token_budget", max(s.micro * s.cp, longest), "micro")
    put("engine.max_total_tokens", max(LEAST_CACHE, 8 * longest), "cache")
    put("engine.tp", s.engine_tp, "engine_tp")
    engine_gpus = world if s.engine_gpus is None else s.engine_gpus
    put("engine.count", max(1, engine_gpus // s.engine_tp), "engine_gpus")
    put("engine.deterministic", False)
    nodes = s.nodes if s.engine_gpus is None else s.nodes + -(-s.engine_gpus // s.gpus)
    put("launch.gpus_per_node", s.gpus, "gpus")
    if nodes > 1:
        put("launch.nodes", nodes, "nodes")
        put("launch.backend", "ray")
    if s.engine_gpus is not None:
        put("launch.placement", "disaggregated", "placement")
    else:
        put("launch.release_memory", True, "placement")
    if nodes > 1 or s.engine_gpus is not None:
        put("weights.method", "broadcast")
    draft.used.update(n for several in names.values() for n in several)


def put_anchor(draft: Draft) -> None:
    """Both frameworks score again at the start of a step; only `behaviour` is exact for interrupted samples."""
    over = draft.config["rollout"].get("over_provision", 1) > 1
    apart = draft.config["launch"].get("placement") == "disaggregated"
    draft.put("algo.anchor", ("interpolated" if apart else "behaviour") if over else "old")


def put_held_out(draft: Draft, path: object, count: int | None) -> None:
    """`count`: rows of the file, where it is there."""
    draft.put("eval.prompts", min(128, count or 30))
    if count is None:
        draft.odd.append(f"eval.prompts = 30: {path} is not here, so nobody counted its prompts")


def source_of(path: object) -> str:
    """The short name of the source that reads a file."""
    first = path[0] if isinstance(path, list) and path else path
    return "parquet" if Path(str(first)).suffix == ".parquet" else "jsonl"
