"""Bad configs and config.json files: one line that names the field, never a traceback, never a hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.cli import main
from rlsys.core.errors import UserError
from tests.helpers.mutations import CPU_SECONDS, MODELS, QUICKSTART, cases, cpu_time_limit

CASES, CHUNK = 2000, 50
FIRST = 10
"""Chunks in `make check`; `make test` has all."""


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < FIRST else pytest.mark.gate) for n in range(CASES // CHUNK)]
)
def test_bad_input_is_refused_in_one_line_or_runs(seed: int) -> None:
    bad = [
        f"{outcome}: {case}" for case, outcome in cases(seed, CHUNK) if outcome not in ("passes", "refused")
    ]
    assert not bad, "\n".join(bad)


LONG = "a" * 300


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rollout.group_size=1e20", "rollout.group_size = 1e+20: "),
        ("rollout.group_size=100000000000000000000.0", "rollout.group_size = 1e+20: "),
        (
            "rollout.group_size=1000000",
            "rollout.group_size = 1000000: expected at most 65536",
        ),
        ("engine.count=1000000", "engine.count = 1000000: expected at most 16384"),
        (
            "launch.nodes=10000000000",
            "launch.nodes = 10000000000: expected at most 65536",
        ),
        ("parallel.pp=2000000000", "parallel.pp = 2000000000: expected at most the 3 layers of "),
        ("run.dir=", "run.dir = None: "),
        ("run.dir=''", "run.dir: expected a path, found an empty text"),
        (f"model.path={LONG}", "model.path: expected names of at most 255 bytes, 4095 in all, found 'aaa"),
        (
            f"run.dir={'/'.join(['a' * 200] * 30)}",
            "run.dir: expected names of at most 255 bytes, 4095 in all, found",
        ),
        (r'run.dir="a\0b"', r"run.dir: expected a path, found 'a\x00b' with a NUL character in it"),
        (
            "data.params={long_share: 2026-13-45}",
            "override 'data.params={long_share: 2026-13-45}': invalid timestamp",
        ),
        (f"run.seed={'9' * 5000}", "override 'run.seed=999"),
    ],
)
def test_values_that_are_too_large_or_no_path(
    override: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(QUICKSTART.parents[1])
    with cpu_time_limit(CPU_SECONDS):
        assert main.main(["explain", str(QUICKSTART), override]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"rlsys: error: {told}")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_parameters": "yarn"}, "rope_parameters = 'yarn': expected an object"),
        ({"rope_scaling": 3}, "rope_scaling = 3: expected an object"),
        ({"decoder_sparse_step": False}, "decoder_sparse_step = False: expected a whole number from 1 to"),
        (
            {"num_hidden_layers": 10**30},
            f"num_hidden_layers = {10**30}: expected a whole number from 1 to 10000",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no': expected true or false"),
        ({"quantization_config": "fp8"}, "the weights are quantised (fp8)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: expected a divisor of num_attention_heads = "),
        ({"hidden_size": 1, "head_dim": None}, "num_attention_heads = "),
        ({"mlp_only_layers": [1, "x"]}, "mlp_only_layers = [1, 'x']: expected a list of layers"),
        ({"vocab_size": 2**31}, "vocab_size = 2147483648: expected a whole number from 1 to 2147483647"),
    ],
)
def test_a_field_of_config_json_is_named(
    changes: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (quickstart,) = (path for path in MODELS if path.parent.name == "quickstart-moe")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(quickstart.read_text()) | changes))
    with cpu_time_limit(CPU_SECONDS):
        assert main.main(["explain", str(QUICKSTART), f"model.path={tmp_path}"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"rlsys: error: {tmp_path}/config.json: {told}")
    assert stderr.count("\n") == 1


def test_a_module_that_fails_at_its_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsys.algo import build
    from rlsys.core.imports import resolve

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_written.py").write_text("def score(:\n")
    for make in (lambda p: resolve("data.reward", p, {}), lambda p: build("loss", p)):
        with pytest.raises(
            UserError, match="half_written:score': cannot import half_written: SyntaxError: "
        ) as e:
            make("half_written:score")
        assert "\n" not in str(e.value)
