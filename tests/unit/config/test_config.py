"""What a mistaken config is told: one line that names field, value and what was expected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from rlsys.algo import check
from rlsys.cli.main import main
from rlsys.config import Config, ConfigError, dump_config, identity, load_config
from rlsys.core.errors import UserError
from rlsys.importers.slime import SLIME
from rlsys.importers.verl import VERL

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def error(*overrides: str, path: Path = QUICKSTART) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("heldout", "steps"), [("", 2 * (100 - 12) // 16), (", heldout_path: held.jsonl", 2 * (100 // 16))]
)
def test_epochs_become_steps(heldout: str, steps: int, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{path: m}}\ndata: {{source: jsonl, params: {{path: {rows}{heldout}}}}}\ntrainer: {{epochs: 2}}\n"
    )
    assert load_config(config).trainer.epochs == 2  # nothing to count yet
    rows.write_text('{"prompt": "a"}\n' * 100)
    trainer = load_config(config).trainer
    assert (trainer.steps, trainer.epochs) == (2 * (steps // 2), None)
    with pytest.raises(
        ConfigError,
        match=r"trainer.epochs = 2: the rows of data.source = \w+ cannot be counted; expected jsonl",
    ):
        load_config(config, ["data.source=chain_sum_tail"])


def test_overrides_take_precedence_over_the_file_and_keep_other_fields() -> None:
    config = load_config(QUICKSTART, ["trainer.steps=7", "run.dir=/x/y", "trainer.lr=1e-5"])
    assert (config.trainer.steps, config.run.dir, config.trainer.lr) == (7, Path("/x/y"), 1e-5)
    assert config.rollout.over_provision == load_config(QUICKSTART).rollout.over_provision


def test_a_dumped_config_loads_again_unchanged(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, ["parallel.ep=2"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rollout.group_sise=4", "rollout.group_sise: unknown key; did you mean rollout.group_size?"),
        (
            "weights.uncompared=0.9",
            "weights.uncompared: deleted; it follows from model.fp8 and engine.extra_args",
        ),
        ("weights.canary_p999=0.1", "weights.canary_p999: deleted; it follows from weights.canary_mean"),
        (
            "rollout.auto_hold=idle",
            "rollout.auto_hold: deleted; over_provision = auto always steers the share",
        ),
        (
            "trainer.equal_lengths=true",
            "trainer.equal_lengths: deleted; micro-batches have equal lengths with",
        ),
        (
            "launch.silence_seconds=60",
            "launch.silence_seconds: deleted; it is 1.5 times rollout.stall_timeout",
        ),
        ("weights.method=shard", "weights.method = 'shard': did you mean sharded?"),
        ("weights.method=nccl", "weights.method = 'nccl': expected 'auto', 'broadcast', 'sharded'"),
        ("weights.method=tensor", "weights.method = 'tensor': deleted; use auto"),
        ("eval.every=5", "eval.every: renamed; use eval.interval"),
        ("rolout.group_size=4", "rolout: unknown key; did you mean rollout?"),
        ("steps=4", "steps: unknown key; did you mean trainer.steps?"),
        ("trainer.group_size=4", "trainer.group_size: unknown key; did you mean rollout.group_size?"),
        ("rollout.zzz=4", "rollout.zzz: unknown key; known keys: groups_per_step"),
        ("trainer.lr=fast", "trainer.lr = 'fast': expected a number"),
        ("trainer.lr=", "trainer.lr = None: expected a number"),
        ("trainer.lr=-1", "trainer.lr = -1: expected more than 0"),
        ("trainer.lr=.inf", "trainer.lr = inf: expected a finite number"),
        ("trainer.steps=2.5", "trainer.steps = 2.5: expected a whole number"),
        ("trainer.early_backward=maybe", "trainer.early_backward = 'maybe': expected true or false"),
        ("trainer.recompute=layer", "trainer.recompute = 'layer': expected a list"),
        ("trainer.betas=[1, 2, 3]", "trainer.betas = [1, 2, 3]: expected at most 2 of them"),
        ("run.dir=3", "run.dir = 3: expected a path"),
        ("data.source=3", "data.source = 3: expected a text"),
        ("data.params=3", "data.params = 3: expected keys and values, {key: value, ...}"),
        ("rollout.group_size=eight", "rollout.group_size = 'eight': expected a whole number"),
        ("rollout.group_size=0", "rollout.group_size = 0: expected at least 1"),
        ("rollout.over_provision=0.5", "rollout.over_provision = 0.5: expected at least 1 or 'auto'"),
        ("algo.anchor=odl", "algo.anchor = 'odl': did you mean old? (known: mu, old, behaviour"),
        ("engine.port=70000", "engine.port = 70000: expected at most 65535"),
        ("model.path=", "model.path = None: "),
        ("steps", "override 'steps': expected section.field=value"),
        ("a..b=1", "override 'a..b=1': expected section.field=value"),
        ("rollout.group_size=true", "rollout.group_size: expected a number, found true"),
        ("rollout.over_provision=yes", "rollout.over_provision: expected a number, found true"),
        (
            "data.params={a: 1, a: 2}",
            "override 'data.params={a: 1, a: 2}': not valid YAML: duplicate key a",
        ),
        ("parallel.ep=1000", "rollout.groups_per_step * group_size = 128 samples do not divide"),
        ("run.seed=2147483648", "run.seed = 2147483648: expected less than"),
        (
            "rollout.over_provision=manual",
            "rollout.over_provision = 'manual': expected a number or 'auto'",
        ),
        ("trainer.steps=[1", "override 'trainer.steps=[1': not valid YAML"),
        (
            "data.params={a: 2024-02-30}",
            "override 'data.params={a: 2024-02-30}': invalid timestamp '2024-02-30': day is out of range",
        ),
        ("run.name=!!timestamp x", "override 'run.name=!!timestamp x': invalid timestamp 'x'"),
        ("run.name=!!bool x", "override 'run.name=!!bool x': invalid bool 'x'"),
        (
            r'run.name="\UFFFFFFFF"',
            r"""override 'run.name="\\UFFFFFFFF"': not valid YAML: an escape sequence beyond \U0010FFFF""",
        ),
    ],
)
def test_a_mistaken_value_is_named(override: str, told: str) -> None:
    assert error(override).startswith(told)


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["rollout.max_staleness=0"], ["over_provision = 2", "max_staleness = 0"]),
        (
            ["launch.release_memory=true", "launch.placement=disaggregated"],
            ["release_memory = true", "placement = disaggregated"],
        ),
        (
            ["launch.release_memory=true", "router.interruption=retract"],
            ["interruption = retract", "release_memory = true"],
        ),
        (["trainer.token_budget=10"], ["token_budget = 10", "max_response_tokens = 256"]),
        (["engine.max_total_tokens=100"], ["max_total_tokens = 100", "max_response_tokens = 256"]),
        (["parallel.dp=3"], ["128 samples", "3 * 1"]),
        (["parallel.ep=4", "parallel.dp=2"], ["tp*cp*dp = 2", "ep*etp = 4", "multiple of 4"]),
        (["engine.port=65535", "engine.count=4"], ["port = 65535", "4 engines", "65538"]),
        (["parallel.ep=1000000007", "parallel.tp=7"], ["128 samples", "dp = 1000000007"]),
    ],
)
def test_a_cross_check_prints_both_numbers(overrides: list[str], numbers: list[str]) -> None:
    message = error(
        "rollout.groups_per_step=16", "rollout.group_size=8", "rollout.over_provision=2", *overrides
    )
    assert all(number in message for number in numbers), message


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("run: {dir: [}\n")
    assert ":1:13: not valid YAML" in error(path=broken)
    broken.write_text("run: {}\ndata: {params: {day: 2024-13-01}}\n")
    assert error(path=broken).startswith(
        f"{broken}:2:22: invalid timestamp '2024-13-01': month must be in 1..12"
    )
    broken.write_text("- a\n")
    assert "expected a mapping of sections, found list" in error(path=broken)
    broken.write_bytes(b"\xff\xfe\x00x")
    assert "not UTF-8 text" in error(path=broken)
    broken.write_text("run: {}\n")
    assert error(path=broken) == "model: missing; it has no default"


def test_duplicate_keys_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\nrollout:\n  group_size: 4\n  group_size: 8\n")
    assert error(path=file) == f"{file}:4:3: not valid YAML: duplicate key group_size"
    file.write_text("model: {path: m}\nengine: &e {count: 2}\neval: {interval: 2}\nmodel: {path: n}\n")
    assert "duplicate key model" in error(path=file)


def test_booleans_are_accepted_in_boolean_fields_and_params() -> None:
    assert load_config(QUICKSTART, ["engine.deterministic=false"]).engine.deterministic is False
    assert load_config(QUICKSTART, ["data.params={a: true}"]).data.params == {"a": True}


def test_naming_another_component_drops_inherited_params(tmp_path: Path) -> None:
    path = tmp_path / "top.yaml"
    path.write_text("base: preferences/base\nsft: {traces: pairs, params: {path: x.jsonl}}\n")
    assert load_config(path).sft.params == {"path": "x.jsonl"}
    path.write_text("base: preferences/base\nsft: {params: {guess_from: 0.5}}\n")
    assert load_config(path).sft.params == {"worked": 32, "guess_from": 0.5}
    overrides = ["sft.params.path=y.jsonl", "sft.traces=pairs"]
    assert load_config(path, overrides).sft.params == {"path": "y.jsonl"}
    path.write_text("base: preferences/reward_model\n")
    assert load_config(path).sft.loss.params == {"centre": 0.01}
    assert load_config(path, ["sft.loss={name: ipo}"]).sft.loss.params == {}


def test_a_base_file_is_read_first_and_circles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text(f"base: {QUICKSTART}\ntrainer: {{steps: 3}}\n")
    config = load_config(tmp_path / "top.yaml")
    assert config.trainer.steps == 3
    assert config.model.path == load_config(QUICKSTART).model.path
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "base files form a cycle: a.yaml -> b.yaml" in error(path=tmp_path / "a.yaml")


def test_identity_ignores_fields_that_may_change_between_starts() -> None:
    neutral_overrides = [
        "trainer.steps=999",
        "run.dir=/elsewhere",
        "parallel.ep=2",
        "engine.port=31000",
        "eval.interval=3",
    ]
    assert identity(load_config(QUICKSTART, neutral_overrides)) == identity(load_config(QUICKSTART))
    for override in ("run.seed=5", "rollout.group_size=4", "trainer.lr=1e-3", "model.path=/other"):
        assert identity(load_config(QUICKSTART, [override])) != identity(load_config(QUICKSTART))


def test_the_smallest_data_parallel_size_that_the_experts_allow() -> None:
    assert load_config(QUICKSTART, ["parallel.ep=2"]).parallel.world_size == 2
    with_tp = ["parallel.ep=2", "parallel.tp=2", "parallel.etp=1"]
    assert load_config(QUICKSTART, with_tp).parallel.world_size == 2


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("rollout=5", "rollout = 5: expected a section, field: value"),
        ("algo.advantage=[grpo]", "algo.advantage = ['grpo']: expected a name, or {name: NAME"),
        ("algo.loss=[5]", "algo.loss.0 = 5: expected a name, or {name: NAME"),
        ("launch.backend=slrm", "launch.backend = 'slrm': did you mean slurm? (known: local, slurm, ray)"),
        (f"data.params={'[' * 3000}", "nested too deeply"),
    ],
)  # fmt: skip
def test_wrong_types_and_misspelled_names_get_short_error_messages(
    override: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert why in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n: a field of verl; here it is rollout.group_size",
        ),
        (
            "algorithm={gamma: 1, kl_ctrl: {kl_coef: 0.1}}",
            "algorithm.kl_ctrl.kl_coef: a field of verl; here it is algo.shaping=[{name: kl_reward, beta: X}]",
        ),
        (
            "trainer.total_epochs=3",
            "trainer.total_epochs: a field of verl; here it is trainer.epochs",
        ),
        (
            "rollout_batch_size=32",
            "rollout_batch_size: an option of slime; here it is rollout.groups_per_step",
        ),
        ("lr=3", "lr: an option of slime; here it is trainer.lr"),
        ("actor_rollout_ref.rollout.zzz=1", "actor_rollout_ref: unknown key; "),
    ],
)
def test_errors_for_verl_and_slime_names_suggest_the_rlsys_field(override: str, told: str) -> None:
    assert error(override).startswith(told)


def test_a_slime_option_on_the_command_line_suggests_the_rlsys_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (
        ["--rollout-batch-size", "32"],
        ["--rollout-batch-size=32"],
        ["--zzz", "--rollout-batch-size"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(["train", "quickstart", *words])
        assert exit_info.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            "rlsys: error: --rollout-batch-size: an option of slime; here it is rollout.groups_per_step; see"
        )


@pytest.mark.parametrize("theirs", [*VERL, *SLIME])
def test_suggested_fields_exist_and_accept_the_suggested_values(theirs: str) -> None:
    equivalent = {**VERL, **SLIME}[theirs]
    field, _, assigned_value = equivalent.partition("=")
    names = re.match(r"[\w.]+", field)
    assert names is not None
    section: Any = Config
    for name in names[0].split("."):
        if section is dict:
            break
        annotation = section.model_fields[name].annotation
        kinds = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type)]
        section = next(
            (a for a in kinds if issubclass(a, BaseModel)), dict if get_origin(annotation) is dict else None
        )
    if assigned_value:
        assert names[0] == "data.params.path" or names[0] == field
        value = re.sub(r", (the default|which) .*|, the default$", "", assigned_value).replace("X", "0.125")
        config = load_config(QUICKSTART, [f"{names[0]}={value}"])
        if names[0].startswith("algo."):
            check(config.algo)
