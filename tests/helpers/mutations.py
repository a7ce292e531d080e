"""Fuzz configs and config.json files with seeded mutations, and find failures other than a one-line error.

As a script: `python tests/helpers/mutations.py COUNT [SEED]`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import yaml

from rlsys.algo.preflight import check
from rlsys.algo.registry import SECTION_KINDS, TABLE, load
from rlsys.algo.trial import try_objective
from rlsys.cli.explain import describe_run
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.rollout.dry_run import build_inputs, conclude_groups
from rlsys.rollout.preflight import check_names

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p.name != "base.yaml")
QUICKSTART = ROOT / "configs/quickstart.yaml"
MODELS = sorted((ROOT / "configs/models").glob("*/config.json"))
CPU_SECONDS = 30
"""CPU time after which a case counts as hung. CPU time does not depend on the load of the machine."""
LONG = "a" * 300
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 10**6, 10**9, 2**31, 2**63, 10**30, -(10**30), 10**400,
    0.0, 0.5, -0.5, 1.5, 1e-30, 1e20, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
    "", " ", "0", "1e20", "none", "null", ".", "..", "/", "/dev/null", "~", LONG, LONG * 20, "/".join([LONG] * 3),
    "a\0b", "a\nb", "é", "\ud83d\ude00", ":", "a:", ":a", "a:b", "no.such:thing", "json:loads", "math:pi",
    "rlsys.core.types:Prompt", "rlsys..types:x", ".x:y", "http://", "http://[", "http://a:b", "http://a:99999",
    "http://u:p@h", "https://h/ x", "grpo", "clip", "kl", "dapo", "float16", "2026-01-01",
    [], [0], [1, 2, 3], ["clip"], [[]], [None], {}, {"a": 1}, {"name": None}, {"name": "clip"}, {"name": ["clip"]},
    {1: 2}, {None: None}, [{"name": "clip", "clip_low": "x"}], [1e20, -1],
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One mutated input."""

    config: Path
    """Absolute path, or the name of one of `files`."""
    overrides: tuple[str, ...]
    """Config overrides. `{folder}` stands for the folder of `files`."""
    files: dict[str, bytes]
    """Name -> content of files in a temporary folder."""


def dotted_fields(fields: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the dotted names of all fields and sections of a config, with their values."""
    entries = {}
    for name, value in fields.items():
        entries[path + name] = value
        if isinstance(value, dict) and value:
            entries |= dotted_fields(value, f"{path}{name}.")
    return entries


MODEL_FIELDS = (
    "rope_parameters", "rope_scaling", "rope_theta", "decoder_sparse_step", "mlp_only_layers", "q_lora_rank",
    "n_shared_experts", "quantization_config", "num_key_value_heads", "head_dim", "eos_token_id", "norm_topk_prob",
    "num_nextn_predict_layers", "first_k_dense_replace", "tie_word_embeddings",
)  # fmt: skip
DATA_PARAMS = (
    "task",
    "args",
    "size",
    "short",
    "long",
    "long_share",
    "digits",
    "path",
    "heldout_path",
    "shuffle_seed",
)
FIELDS = dotted_fields(load_config(QUICKSTART).model_dump(mode="json")) | {
    f"data.params.{name}": 5 for name in DATA_PARAMS
}


def perturb(random: Random, value: Any) -> Any:
    """Return a value near `value`, which may be valid."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        candidates = [value * 2, value + 1, value - 1, value * 1000, value // 2, -value, 10**6 + 1]
        return random.choice([*candidates, value / 2] if abs(value) < 2**63 else candidates)
    if isinstance(value, str):
        return random.choice([value[:-1], value.upper(), value + " ", value * 2])
    return random.choice(VALUES)


def draw_case(random: Random) -> Case:
    """Return a random case that mutates config fields, the config's text, a plug-in or the model's config.json."""
    kind = random.choice(["field", "field", "field", "text", "model", "model", "plugin"])
    config = random.choice([QUICKSTART, QUICKSTART, random.choice(CONFIGS)])
    if kind == "field":
        return Case(config, tuple(_override(random) for _ in range(random.choice([1, 1, 2, 3]))), {})
    if kind == "plugin":
        return Case(QUICKSTART, (_plugin(random),), {})
    if kind == "text":
        return Case(Path("config.yaml"), (), {"config.yaml": _mutate_bytes(random, config.read_bytes())})
    raw = random.choice(MODELS).read_bytes()
    if random.random() < 0.15:
        changed = _mutate_bytes(random, raw)
    else:
        model_config = json.loads(raw)
        for _ in range(random.choice([1, 1, 2])):
            _mutate_fields(random, model_config)
        changed = json.dumps(model_config).encode("utf-8", "surrogatepass")
    overrides = ["model.path={folder}", *random.choice([[], [], [_override(random)]])]
    return Case(random.choice([QUICKSTART, config]), tuple(overrides), {"config.json": changed})


def _override(random: Random) -> str:
    name = random.choice(list(FIELDS))
    value = perturb(random, FIELDS[name]) if random.random() < 0.4 else random.choice(VALUES)
    if random.random() < 0.1:
        name = name[:-1] if random.random() < 0.5 else name + ".x"
    if isinstance(value, str) and random.random() < 0.5:
        return f"{name}={value}"
    return f"{name}={_yaml(value)}"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix(
        "...\n"
    )


def _plugin(random: Random) -> str:
    """Return an override that sets a plug-in with one or two mutated parameters."""
    field, kind = random.choice(list(SECTION_KINDS.items()))
    name = random.choice(list(TABLE[kind]))
    spec: dict[str, Any] = {"name": name}
    fields = load(field, TABLE[kind][name]).model_fields
    for param in random.sample(list(fields), min(len(fields), random.choice([1, 1, 2]))):
        default = fields[param].default
        spec[param] = perturb(random, default) if random.random() < 0.6 else random.choice(VALUES)
    value: Any = [spec] if isinstance(FIELDS[f"algo.{field}"], list) else spec
    return f"algo.{field}={_yaml(value)}"


def _mutate_bytes(random: Random, text: bytes) -> bytes:
    """Delete, insert, replace or repeat bytes at random offsets."""
    out = bytearray(text)
    for _ in range(random.choice([1, 2, 8])):
        offset = random.randrange(len(out))
        mutation = random.randrange(5)
        if mutation == 0:
            del out[offset : offset + random.choice([1, 5, 50])]
        elif mutation == 1:
            out[offset:offset] = random.choice(
                [
                    b":",
                    b"- ",
                    b"[",
                    b"{",
                    b"}",
                    b"\t",
                    b"\n",
                    b"&a ",
                    b"*a",
                    b"!!",
                    b"\0",
                    b"\xff",
                    b"'",
                    b'"',
                ]
            )
        elif mutation == 2:
            out[offset] = random.randrange(256)
        elif mutation == 3:
            out[offset:offset] = out[offset : offset + 40]
        else:
            out[offset:offset] = random.choice(
                [b"[" * 2000, b"{a: " * 500, b"9" * 5000, b"1e999", b"!!python/object:os.x "]
            )
        if not out:
            out = bytearray(b" ")
    return bytes(out)


def _mutate_fields(random: Random, fields: dict[str, Any]) -> None:
    """Mutate one field of config.json or of an object in it."""
    name = random.choice([*fields, *MODEL_FIELDS])
    inner = fields.get(name)
    if isinstance(inner, dict) and random.random() < 0.7:
        _mutate_fields(random, inner)
    elif random.random() < 0.15:
        fields.pop(name, None)
    else:
        fields[name] = perturb(random, inner) if random.random() < 0.5 else random.choice(VALUES)


def run(case: Case, folder: Path) -> None:
    """Run the checks of `rlsys explain` on a case, except the reward process."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    overrides = [text.replace("{folder}", str(folder)) for text in case.overrides]
    config = load_config(folder / case.config, overrides)
    check_names(config)
    check(config)
    if any(
        text.startswith(("data", "eval", "model", "algo.p", "algo.g", "rollout")) for text in case.overrides
    ):
        inputs = build_inputs(config)
        if inputs is not None:
            asyncio.run(conclude_groups(config, *inputs))
    if any(text.startswith("algo") for text in case.overrides):
        try_objective(config, None)
    describe_run(config, 80.0)


def outcome(case: Case) -> str:
    """Return `passes`, `refused` (a UserError of one line), or a description of the failure."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with cpu_time_limit(CPU_SECONDS):
                run(case, Path(folder))
        except UserError as e:
            lines = str(e).splitlines()
            return "refused" if len(lines) == 1 and lines[0].strip() else f"not one line: {str(e)!r:.300}"
        except TimeoutError:
            return "hangs"
        except Exception as e:  # noqa: BLE001  (each such exception is a finding)
            frames = traceback.extract_tb(e.__traceback__)
            project_frame = next(
                (f for f in reversed(frames) if "/rlsys/" in f.filename or "/launch/" in f.filename),
                frames[-1],
            )
            return f"{type(e).__name__} at {Path(project_frame.filename).name}:{project_frame.lineno}: {e!s:.200}"
    return "passes"


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds` of CPU time, as soon as Python code runs."""

    def on_timeout(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    previous_handler = signal.signal(signal.SIGPROF, on_timeout)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous_handler)


def cases(seed: int, count: int) -> Iterator[tuple[Case, str]]:
    """Yield `count` random cases with their outcomes."""
    random = Random(seed)
    for _ in range(count):
        case = draw_case(random)
        yield case, outcome(case)


def main(count: int, seed: int) -> None:
    counts: Counter[str] = Counter()
    for case, result in cases(seed, count):
        counts[result.split(" ")[0] if result in ("passes", "refused") else "failed"] += 1
        if result not in ("passes", "refused"):
            print(
                result,
                "|",
                case.config.name,
                case.overrides,
                {k: len(v) for k, v in case.files.items()},
                flush=True,
            )
    print(dict(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
