"""An experiment: YAML + `a.b=c` overrides -> one frozen, checked `Config`.

Cross-field checks print both numbers. Every user mistake raises `ConfigError`: one line.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from rlsys.algo_section import AlgoSection
from rlsys.config_sections import (
    DataConfig,
    EngineConfig,
    EvalConfig,
    LaunchConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RouterConfig,
    RunConfig,
    SFTConfig,
    TrainerConfig,
    WeightsConfig,
)
from rlsys.errors import UserError
from rlsys.section import Section
from rlsys.shipped import find_config, find_model


class ConfigError(UserError):
    """A user's mistake in the configuration: one clear line, exit code 2."""


class Config(Section):
    run: RunConfig = RunConfig()
    """Folder and seed."""
    model: ModelConfig
    """The model that is trained."""
    data: DataConfig = DataConfig()
    """Prompts and rewards."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation: sizes, APRIL, staleness, time limits."""
    algo: AlgoSection = AlgoSection()
    """The algorithm: which plug-ins, with which parameters."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimizer, memory and checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """How the trainer's ranks share the model and the samples."""
    engine: EngineConfig = EngineConfig()
    """The SGLang engines."""
    router: RouterConfig = RouterConfig()
    """How samples reach engines, and what a push does to them."""
    weights: WeightsConfig = WeightsConfig()
    """How weights reach the engines."""
    launch: LaunchConfig = LaunchConfig()
    """Where and how the processes start."""
    sft: SFTConfig = SFTConfig()
    """The warm start of `rlsys sft`."""

    @property
    def samples_per_step(self) -> int:
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def over_provision(self) -> float:
        """What the run begins with; `auto` moves on from there."""
        factor = self.rollout.over_provision
        return min(2.0, 1.0 + self.rollout.max_staleness) if factor == "auto" else factor

    @property
    def start_seconds(self) -> float:
        """What an engine may take to start: engine.start_timeout, or by what it has to read and to compile."""
        if self.engine.start_timeout is not None:
            return self.engine.start_timeout
        folder = sum(file.stat().st_size for file in self.model.path.glob("*.safetensors"))
        reading = 4.0 * folder / 1e9  # a quarter of a GB/s: a shared folder that all engines read at once
        compiling = (300.0 if self.launch.gpus_per_node else 0.0) + (
            1800.0 if self.model.fp8 != "none" else 0.0
        )
        return 240.0 + reading + compiling

    @property
    def slots(self) -> int:
        """Samples kept in flight over the whole pool; at the start, where over_provision is auto."""
        return round(self.over_provision * self.samples_per_step)

    @model_validator(mode="after")
    def _cross(self) -> Self:
        r, t, p = self.rollout, self.trainer, self.parallel
        if self.router.interruption != "abort" and self.launch.placement == "colocated":
            raise ValueError(
                f"router.interruption = {self.router.interruption} keeps samples in the engines, but with "
                "launch.placement = colocated they rest while the trainer works; use abort, or disaggregated"
            )
        if self.launch.release_memory and self.launch.placement != "colocated":
            raise ValueError(
                f"launch.release_memory = true, but with launch.placement = {self.launch.placement} "
                "engines never rest; use colocated"
            )
        if r.over_provision == "auto" and r.max_staleness < 1:
            raise ValueError(
                f"rollout.over_provision = auto needs room to move, but rollout.max_staleness = {r.max_staleness} "
                "allows only 1; use max_staleness >= 1"
            )
        if self.over_provision > 1 and r.max_staleness < 1:
            raise ValueError(
                f"rollout.over_provision = {r.over_provision} keeps interrupted samples for a later weight version, "
                f"but rollout.max_staleness = {r.max_staleness} would drop them; use max_staleness >= 1"
            )
        if (fewest := self.launch.min_engines) is not None and fewest > self.engine.count:
            raise ValueError(
                f"launch.min_engines = {fewest}: expected at most engine.count = {self.engine.count}"
            )
        if t.token_budget < r.max_response_tokens:
            raise ValueError(
                f"trainer.token_budget = {t.token_budget} cannot hold one response of "
                f"rollout.max_response_tokens = {r.max_response_tokens}"
            )
        if t.replay == "engine" and not self.engine.return_routes:
            raise ValueError("trainer.replay = engine needs engine.return_routes = true")
        if t.offload_optimizer and self.model.dtype != "bfloat16":
            raise ValueError(
                f"trainer.offload_optimizer = {t.offload_optimizer} needs model.dtype = bfloat16, "
                f"which keeps float32 weights in the optimizer; here it is {self.model.dtype}"
            )
        if p.dispatcher == "allgather" and not t.equal_lengths:
            raise ValueError(
                "parallel.dispatcher = allgather needs trainer.equal_lengths = true: "
                "it gathers equally many tokens from every rank"
            )
        if self.engine.max_total_tokens < r.max_response_tokens:
            raise ValueError(
                f"engine.max_total_tokens = {self.engine.max_total_tokens} cannot hold one response of "
                f"rollout.max_response_tokens = {r.max_response_tokens}"
            )
        if self.samples_per_step % (p.data_parallel * self.algo.minibatches):
            raise ValueError(
                f"rollout.groups_per_step * group_size = {self.samples_per_step} samples do not divide over "
                f"dp * algo.minibatches = {p.data_parallel} * {self.algo.minibatches}{p.why_dp}"
            )
        if self.launch.nodes > 1 and self.launch.backend == "local":
            raise ValueError(
                f"launch.nodes = {self.launch.nodes} needs launch.backend = slurm or ray; local is one machine"
            )
        if r.group_size == 1 and self.algo.advantage.name == "grpo" and not self.algo.planners:
            raise ValueError("rollout.group_size = 1 leaves grpo without a baseline; use group_size >= 2")
        return self


_EXPECTED = {"Spec": "expected a name, or {name: NAME, parameter: value, ...}"}


def _unknown_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """Message for a key that no section has, with the nearest known one."""
    *path, key = [str(x) for x in loc]
    at: Any = model
    for name in (n for n in path if n in at.model_fields):  # of a list, the place follows its field
        annotation = at.model_fields[name].annotation
        choices = (a for a in (annotation, *get_args(annotation)) if isinstance(a, type))
        at = next((a for a in choices if issubclass(a, BaseModel)), at)
    names = list(at.model_fields)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    dotted = ".".join([*path, key])
    hint = f"did you mean {'.'.join([*path, near[0]])}?" if near else f"known keys: {', '.join(names)}"
    return f"{dotted}: unknown key; {hint}"


def explain_error(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for the first mistake of a validation error: field, value, what was expected."""
    first = error.errors()[0]
    names = [str(x) for x in first["loc"]]
    loc = ".".join(n for n in names if not set("-[") & set(n))  # without the alternatives of a union
    if first["type"] == "extra_forbidden":
        return _unknown_key(first["loc"], model)
    if first["type"] == "missing":
        return f"{loc}: missing; it has no default"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{loc}: {message}" if loc else message
    value = repr(first["input"])[:200]
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{loc} = {value}: {_EXPECTED.get(first['ctx']['class_name'], 'expected a section, field: value')}"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        known = re.findall("'([^']*)'", first["ctx"]["expected"])
        if near := difflib.get_close_matches(first["input"], known, n=1, cutoff=0.5):
            return f"{loc} = {value}: did you mean {near[0]}? (known: {', '.join(known)})"
    others = error.errors()[1:]
    if alternatives := [e["msg"] for e in others if len(e["loc"]) > 1 and e["loc"][:-1] == first["loc"][:-1]]:
        message = ", or: ".join([message, *alternatives])  # of a union: what each would have taken
    more = f" (and {len(others) - len(alternatives)} more)" if len(others) > len(alternatives) else ""
    return f"{loc} = {value}: {message}{more}"


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        out[key] = (
            _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        )
    return out


class _Loader(yaml.SafeLoader):
    """A key that is given twice is a mistake; YAML's own loader would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Any:
    """Raises ConfigError, one line that begins with `where`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        if mark is not None and not where.startswith("override"):
            where = f"{where}:{mark.line + 1}:{mark.column + 1}"
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    except ValueError as e:  # a date or a number that Python cannot hold
        raise ConfigError(f"{where}: a value cannot be read: {e}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the config: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the config is not UTF-8 text") from None
    data = _parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return data


def read_layers(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The YAML at `path` over its `base:`, if it names one: a file (relative to this one), or a shipped config."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: base files form a circle: {' -> '.join(p.name for p in (*seen, path))}")
    data = _read_yaml(path)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {base!r}: expected a file name")
    beside = path.parent / base
    found = beside if beside.exists() else find_config(Path(base))
    return _merge(read_layers(found, (*seen, path)), data)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1", ...]` -> `{"a": {"b": 1}}`; values are YAML."""
    out: dict[str, Any] = {}
    for text in overrides:
        key, eq, value = text.partition("=")
        if not eq or not key or not all(key.split(".")):
            raise ConfigError(f"override {text!r}: expected section.field=value")
        parsed = _parse_yaml(value, f"override {text!r:.200}")
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        out = _merge(out, parsed)
    return out


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, check. Raises ConfigError with one line; touches nothing else on disk.

    `path` may be the name of a shipped config, `model.path` a folder that is shipped: see rlsys.shipped.
    """
    data = _merge(read_layers(find_config(path)), parse_overrides(overrides))
    model = data.get("model")
    if isinstance(model, dict) and isinstance(named := model.get("path"), str):
        data["model"] = {**model, "path": str(find_model(Path(named)))}
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        raise ConfigError(explain_error(e, Config)) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML, loadable again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def identity_fields(config: Config) -> dict[str, Any]:
    """What must not change when a run folder is used again (the number of steps, say, may)."""
    data = config.model_dump(mode="json")
    data.pop("launch")
    data.pop("router")
    data["run"].pop("dir")
    data["rollout"].pop("repeat")
    data["data"].pop("judge_timeout")
    if "://" in (data["data"]["judge"] or ""):
        data["data"]["judge"] = "url"  # its server may move
    data["engine"] = {k: data["engine"][k] for k in ("deterministic",)}
    for key in ("steps", "checkpoint_every", "export_every", "keep_checkpoints"):
        data["trainer"].pop(key)
    data.pop("eval")
    data.pop("parallel")  # a checkpoint loads in any layout
    return data


def identity(config: Config) -> str:
    """Hash of identity_fields."""
    return hashlib.sha256(json.dumps(identity_fields(config), sort_keys=True).encode()).hexdigest()[:16]
