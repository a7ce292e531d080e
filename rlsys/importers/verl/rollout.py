"""Translates actor_rollout_ref.rollout.*: sampling, evaluations and engines."""

from __future__ import annotations

from rlsys.importers.draft import Draft
from rlsys.importers.sizes import eval_truncation
from rlsys.importers.verl.names import ACTOR, NEVER, ROLLOUT, first_present


def translate_rollout(d: Draft) -> None:
    """Translate sampling, evaluations, engines and replay of experts."""
    d.copy_setting(f"{ROLLOUT}.temperature", float)
    d.set_truncation(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
    _evaluation(d)
    d.copy_setting(f"{ROLLOUT}.max_num_seqs", int)
    ignores_end = f"{ROLLOUT}.ignore_eos"
    if d.flag(ignores_end) or d.is_unresolved(ignores_end):
        d.set_field("rollout.ignore_eos", True, ignores_end)
    else:
        d.consumed.discard(ignores_end)
    if d.flag(f"{ROLLOUT}.multi_turn.enable"):
        if d.is_present(f"{ROLLOUT}.multi_turn.format"):
            d.copy_setting(f"{ROLLOUT}.multi_turn.format")
        d.reject(
            f"{ROLLOUT}.multi_turn.enable",
            "no counterpart: use rollout.generator = functions, with Python functions as tools, or another generator",
        )
    else:
        d.consumed.discard(f"{ROLLOUT}.multi_turn.enable")
    for rollout_name, data_name in (
        ("prompt_length", "data.max_prompt_length"),
        ("response_length", "data.max_response_length"),
    ):
        if d.is_present(f"{ROLLOUT}.{rollout_name}") and d.text(f"{ROLLOUT}.{rollout_name}") != d.text(
            data_name, "512"
        ):
            d.reject(
                f"{ROLLOUT}.{rollout_name}", f"expected the value of {data_name}, {d.text(data_name, '512')}"
            )
    _engines(d)
    mode = first_present(
        d, *(f"{ACTOR}.{part}.router_replay.mode" for part in ("megatron", "veomni", "engine"))
    )
    engine = f"{ROLLOUT}.enable_rollout_routing_replay"
    if d.text(mode, "disabled") in ("R2", "R3"):
        replay = "engine" if d.text(mode) == "R3" else "trainer"
        d.set_field("trainer.replay", replay, mode)
        d.set_field("engine.return_routes", replay == "engine", mode, engine)
    else:
        d.consumed.discard(mode)


def _evaluation(d: Draft) -> None:
    """Translate rollout.val_kwargs and the interval of evaluations."""
    values = f"{ROLLOUT}.val_kwargs"
    n, temperature = d.integer(f"{values}.n", 1), d.number(f"{values}.temperature", 0)
    truncation = eval_truncation(d, d.number(f"{values}.top_p", 1.0), d.integer(f"{values}.top_k", -1))
    names = [f"{values}.{name}" for name in ("n", "temperature", "do_sample", "top_p", "top_k")]
    if n > 1 and temperature == 0 and not any(map(d.is_unresolved, names)):
        d.warnings.append(
            f"eval.sets: one response per prompt, because the script's {n} greedy responses are equal"
        )
        n = 1
    if n > 1 or temperature > 0 or any(map(d.is_unresolved, names)):
        eval_set = {"name": "val", "samples": n, "temperature": temperature, "prompts": 30}
        d.set_field("eval.sets", [eval_set | (truncation if temperature else {})], *names)
    d.consumed |= set(names)
    interval = d.integer("trainer.test_freq", -1)
    if interval > 0 or d.is_unresolved("trainer.test_freq"):
        d.set_field("eval.interval", interval, "trainer.test_freq")
    elif not d.flag("trainer.val_before_train") and d.is_present("trainer.val_before_train"):
        d.has_evaluation = False
        d.set_field("eval.prompts", 0, "trainer.test_freq", "trainer.val_before_train")
        d.config["eval"].pop("sets", None)
    else:
        d.set_field("eval.interval", NEVER, "trainer.test_freq")


def _engines(d: Draft) -> None:
    """Translate options of SGLang and the type of the KV cache to engine.extra_args."""
    prefix = f"{ROLLOUT}.engine_kwargs.sglang."
    names = [
        n for n in d.settings if n.startswith(prefix) and not n.endswith((".enable_dp_attention", ".dp_size"))
    ]
    args: list[str] = []
    for name in names:
        value = d.get(name)
        if value is False:
            d.reject(name, "expected no value: set the option that disables this in engine.extra_args")
            continue
        args.append("--" + name.removeprefix(prefix).replace("_", "-"))
        if value is not True:
            args += [str(argument) for argument in (value if isinstance(value, list) else [value])]
    for engine, setting in (("vllm", "kv_cache_dtype"), ("trtllm", "kv_cache_config.dtype")):
        name = f"{ROLLOUT}.engine_kwargs.{engine}.{setting}"
        kind = d.text(name, "auto")
        if kind in ("auto", "bfloat16", "bf16"):
            d.consumed.discard(name)
            continue
        if kind not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            d.reject(name, "expected auto, bfloat16 or fp8")
        args += ["--kv-cache-dtype", kind if kind.endswith("e5m2") else "fp8_e4m3"]
        names.append(name)
        d.warnings.append(
            "engine.extra_args --kv-cache-dtype: SGLang reads the scales of keys and values from the model folder, "
            "or uses 1"
        )
    if names:
        d.set_field("engine.extra_args", args, *names)
