"""`rlsys import`: scripts in the form of verl's and slime's become configs that pass `rlsys explain`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.cli import main
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.importers import slime, verl
from rlsys.importers.arguments import read_arguments
from rlsys.importers.draft import Settings, parse_value
from rlsys.importers.slime import SLIME
from rlsys.importers.verl import VERL

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "tests" / "data" / "foreign"


# Command lines


def command_line(framework: Any, text: str) -> Settings:
    """The settings of a resolved command."""
    arguments = read_arguments(text, None, framework.program_index, framework.EXPECTED)
    settings: Settings = framework.read_settings(arguments)
    return settings


def test_a_pasted_command_needs_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.importers.arguments.run_script", None)
    text = "python3 train.py --a 1 \\\n --b 'x y' \"z\" --c=2 --d $E --lr `x`"
    values = command_line(slime, text).values
    assert values["--a"] == "1" and values["--b"] == ["x y", "z"] and values["--c"] == "2"
    reason = "E: a variable that is not set; set it with --env E=VALUE"
    assert (str(values["--d"]), values["--d"].reason) == ("$E", reason)
    home = read_arguments("python train.py --d $HOME/x", None, slime.program_index, "", (), {"HOME": "/me"})
    assert slime.read_settings(home).values["--d"] == "/me/x"
    listing = "python3\0train.py\0--a\0b c\0"
    assert command_line(slime, listing).values["--a"] == "b c"
    assert (
        command_line(verl, "python -m verl.trainer.main_ppo data.a='x y' && next").values["data.a"] == "x y"
    )


def test_a_second_training_command_is_a_problem(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("for n in 1 2; do python train.py --lr $n; done\npython train.py --lr 1\n")
    arguments = read_arguments(script.read_text(), script, slime.program_index, slime.EXPECTED)
    settings = slime.read_settings(arguments)
    assert settings.values["--lr"] == "1"
    assert settings.problems == ["a second training command: train.py --lr 2"]


def test_numbers_are_numbers() -> None:
    assert [parse_value(t) for t in ("1e-6", "3", "True", "null", "['a', 'b']", "a: b: c", 5)] == [
        1e-6, 3, True, None, ["a", "b"], "a: b: c", 5,
    ]  # fmt: skip


# Both translators


def settings_of(reader: Any) -> Settings:
    """The settings of the script in tests/data/foreign."""
    script = SCRIPTS / f"{reader.__name__.rpartition('.')[2]}_math.sh"
    text = script.read_text()
    settings: Settings = reader.read_settings(
        read_arguments(text, script, reader.program_index, reader.EXPECTED)
    )
    return settings


def made(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The config of our script, whose model and data are there."""
    monkeypatch.chdir(ROOT)
    for name in ("train", "hard", "easy", "test"):
        rows = [
            {"question": f"{name} {i}?", "prompt": f"{name} {i}?", "solution": str(i), "answer": str(i)}
            for i in range(90)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = (SCRIPTS / f"{framework}_math.sh").read_text()
    text = text.replace("/data/", f"{tmp_path}/").replace(".parquet", ".jsonl")
    text = text.replace("/models/Some-MoE\n", f"{ROOT}/configs/models/Qwen3-30B-A3B\n")
    text = text.replace("/models/Some-MoE ", f"{ROOT}/configs/models/Qwen3-30B-A3B ")
    text = text.replace("${MODEL_DIR}/Some-MoE\n", f"{ROOT}/configs/models/Qwen3-30B-A3B\n", 1)
    (tmp_path / "rewards.py").write_text("def score(config):\n    return lambda prompt, text: 0.0\n")
    text = text.replace("rewards/mine.py", f"{tmp_path}/rewards.py")
    script = tmp_path / "run.sh"
    script.write_text(text)
    shutil.copytree(SCRIPTS / "models", tmp_path / "models")
    out = tmp_path / "mine.yaml"
    assert main.main(["import", framework, str(script), "--out", str(out)]) == 3  # each has a made-up option
    data: dict[str, Any] = yaml.safe_load(out.read_text())
    return data


def test_a_script_of_slime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made("slime", tmp_path, monkeypatch)
    output = " ".join(capsys.readouterr().out.split())
    assert config["run"] == {"dir": "/checkpoints/some-moe/"}
    assert config["data"]["source"] == "jsonl"
    assert config["data"]["keys"] == {"prompt": "question", "answer": "solution"}
    assert config["rollout"] == {
        "temperature": 0.9, "over_provision": 1.5, "max_staleness": 4, "groups_per_step": 32, "group_size": 8,
        "max_response_tokens": 4096,
    }  # fmt: skip
    assert config["algo"] == {
        "planners": ["dapo"], "advantage": "grpo", "reducer": "sequence_mean", "minibatches": 2,
        "anchor": "behaviour",
        "loss": [{"name": "clip", "clip_low": 0.2, "clip_high": 0.28}, {"name": "kl", "beta": 0.001, "kind": "k3"}],
        "corrections": [{"name": "tis", "cap": 2.0}],
    }  # fmt: skip
    assert config["parallel"] == {"tp": 2, "pp": 1, "ep": 4, "etp": 1, "dp": 8}
    assert (config["engine"]["tp"], config["engine"]["count"]) == (4, 4)
    assert config["launch"] == {"gpus_per_node": 8, "nodes": 2, "backend": "ray", "release_memory": True}
    assert [s["name"] for s in config["eval"]["sets"]] == ["hard", "easy"]
    assert config["eval"]["sets"][1]["data"]["params"]["heldout_path"].endswith("easy.jsonl")
    assert config["eval"]["prompts"] == 90
    assert "--made-up-option = 3: no counterpart is known" in output
    assert "--sequence-parallel = True: rlsys always does this" in output
    assert (config["eval"]["sets"][0]["top_p"], config["eval"]["sets"][0]["top_k"]) == (0.7, 1024)
    assert config["data"]["params"]["shuffle"] is False
    assert config["engine"]["memory_fraction"] == 0.7 and "extra_args" not in config["engine"]
    assert main.main(["explain", str(tmp_path / "mine.yaml")]) == 0


def test_a_script_of_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made("verl", tmp_path, monkeypatch)
    output = " ".join(capsys.readouterr().out.split())
    assert config["run"] == {"dir": "runs/run one"}
    assert config["data"]["reward"] == f"{tmp_path}/rewards.py:score"
    assert config["algo"] == {
        "advantage": "dr_grpo", "reducer": "token_mean", "planners": ["dapo"], "minibatches": 4, "anchor": "old",
        "loss": [
            {"name": "dual_clip", "dual": 3.0, "clip_low": 0.2, "clip_high": 0.28},
            {"name": "kl", "beta": 0.001, "kind": "k3"},
        ],
        "shaping": [{"name": "overlong", "cap": 4096, "buffer": 512, "factor": 1.0}],
    }  # fmt: skip
    assert config["parallel"] == {"tp": 2, "pp": 1, "ep": 4, "etp": 1, "dp": 4}
    assert (config["engine"]["tp"], config["engine"]["count"]) == (4, 2)
    assert config["eval"]["sets"] == [{"name": "val", "samples": 4, "temperature": 0.6, "prompts": 90}]
    params = {"max_prompt_tokens": 1024, "overlong_prompts": "drop"}
    assert {name: config["data"]["params"][name] for name in params} == params
    assert (
        config["trainer"]["warmup_steps"],
        config["trainer"]["checkpoint_every"],
        config["eval"]["interval"],
    ) == (10, 20, 5)
    assert "algorithm.made_up = 3: no counterpart is known" in output
    assert (config["rollout"]["top_p"], config["rollout"]["top_k"]) == (0.9, 1024)
    assert "rollout.top_k = 1024: engines return a bounded number of tokens" in output
    assert config["trainer"]["epochs"] == 15
    assert load_config(tmp_path / "mine.yaml").trainer.steps == 15
    assert main.main(["explain", str(tmp_path / "mine.yaml")]) == 0


@pytest.mark.parametrize(("reader", "names"), [(verl, VERL), (slime, SLIME)], ids=["verl", "slime"])
def test_import_and_train_map_a_setting_to_the_same_field(reader: Any, names: dict[str, str]) -> None:
    """`rlsys train` says of a name of theirs what it is called here; `rlsys import` must not say otherwise."""
    results = {row.setting: row.result for row in reader.translate(settings_of(reader), ()).mapped}
    shared_names = [
        name for name in results if "=" not in names.get(name, "=")
    ]  # others have a value of their own
    assert len(shared_names) > 10
    for name in shared_names:
        field = re.match(r"[\w.]+", names[name])
        assert field is not None and results[name].startswith(field[0]), name


def test_parser_names_are_imported_unchanged() -> None:
    """All three use SGLang's names."""
    settings = settings_of(slime)
    settings.values |= {"--sglang-tool-call-parser": "qwen25", "--sglang-reasoning-parser": "qwen3"}
    engine = slime.translate(settings, ()).config["engine"]
    assert (engine["tool_call_parser"], engine["reasoning_parser"], engine["count"]) == ("qwen25", "qwen3", 4)
    settings = settings_of(verl)
    prefix = "actor_rollout_ref.rollout.multi_turn"
    settings.values |= {f"{prefix}.enable": "True", f"{prefix}.format": "hermes"}
    draft = verl.translate(settings, ())
    assert draft.config["engine"]["tool_call_parser"] == "hermes"
    assert "rollout.generator = functions" in next(
        r.result for r in draft.rejected if r.setting == f"{prefix}.enable"
    )


@pytest.mark.parametrize(
    ("given", "ours", "refused"),
    [
        ({"lora_rank": "0"}, None, []),
        ({"lora_rank": "8"}, {"rank": 8, "alpha": 16.0}, []),
        (
            {"lora_rank": "8", "lora_alpha": "32", "target_modules": "['q_proj', 'v_proj']"},
            {"rank": 8, "alpha": 32.0, "targets": ["q_proj", "v_proj"]},
            [],
        ),
        ({"lora_rank": "8", "target_modules": ".*proj"}, {"rank": 8, "alpha": 16.0}, ["target_modules"]),
        ({"lora.rank": "8"}, {"rank": 8, "alpha": 32}, []),
        (
            {"lora.rank": "8", "lora.target_modules": "['linear_proj']"},
            {"rank": 8, "alpha": 32, "targets": ["o_proj"]},
            [],
        ),
    ],
)
def test_verls_adapters(given: dict[str, str], ours: dict[str, Any] | None, refused: list[str]) -> None:
    model = "actor_rollout_ref.model."
    settings = settings_of(verl)
    settings.values |= {model + name: value for name, value in given.items()}
    draft = verl.translate(settings, ())
    assert draft.config["trainer"].get("lora") == ours
    assert [r.setting.removeprefix(model) for r in draft.rejected if r.setting.startswith(model)] == refused


@pytest.mark.parametrize(("theirs", "ours"), [("adam", "adamw"), ("dist_muon", "muon"), ("sgd", None)])
def test_slimes_optimizer(theirs: str, ours: str | None) -> None:
    settings = settings_of(slime)
    settings.values["--optimizer"] = theirs
    draft = slime.translate(settings, ())
    assert draft.config["trainer"].get("optimizer") == ours
    refused = [row.setting for row in draft.rejected]
    assert ("--optimizer" in refused) == (theirs == "sgd")


def test_yaml_of_verl_is_its_dotted_names(tmp_path: Path) -> None:
    settings = verl.read_yaml({"data": {"train_batch_size": 8, "val_files": None}, "trainer": {"nnodes": 2}})
    assert settings.values == {"data.train_batch_size": 8, "trainer.nnodes": 2}
    overrides = verl.read_yaml(["data.train_batch_size=8", "+trainer.nnodes=2"])  # .hydra/overrides.yaml
    assert overrides.values == {"data.train_batch_size": "8", "trainer.nnodes": "2"}
    assert slime.read_yaml({"hf_checkpoint": "m", "colocate": True, "use_tis": False}).values == {
        "--hf-checkpoint": "m", "--colocate": True,
    }  # fmt: skip


def test_engines_of_their_own(tmp_path: Path) -> None:
    """train_async: the engines have other GPUs, and the anchor estimates what nobody can score."""
    words = (
        "train_async.py --hf-checkpoint m --prompt-data d.jsonl --rollout-batch-size 8 --n-samples-per-prompt 8 "
        "--rm-type math"
    )
    settings = command_line(
        slime,
        f"python {words} --actor-num-gpus-per-node 8 --rollout-num-gpus 16 --partial-rollout "
        "--over-sampling-batch-size 12",
    )
    config = slime.translate(settings, ("math",)).config
    assert config["launch"] == {
        "gpus_per_node": 8,
        "nodes": 3,
        "backend": "ray",
        "placement": "disaggregated",
    }
    assert config["engine"]["count"] == 16
    assert "weights" not in config
    assert (config["algo"]["anchor"], config["data"]["reward"]) == ("interpolated", "math")


@pytest.mark.parametrize(
    ("framework", "text", "told"),
    [
        ("verl", "echo hello", "no training command: expected python -m verl.trainer.main_ppo"),
        ("slime", "echo hello", "no training command: expected train.py or train_async.py"),
        (
            "slime",
            "python train.py --lr 1",
            "--hf-checkpoint is missing; expected --hf-checkpoint and --prompt-data",
        ),
        (
            "verl",
            "python -m verl.trainer.main_ppo data.train_batch_size=3",
            "expected actor_rollout_ref.model.path and data.train_files",
        ),
        (
            "slime",
            "python train.py --hf-checkpoint m --prompt-data d --lr fast",
            "--lr = fast: expected a number",
        ),
    ],
)
def test_an_unsupported_script_gets_a_one_line_error(
    framework: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "x.sh"
    script.write_text(text)
    assert main.main(["import", framework, str(script), "--out", str(tmp_path / "y.yaml")]) == 2
    stderr = capsys.readouterr().err
    assert told in stderr and stderr.count("\n") == 1


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.yaml").write_text("")
    assert main.main(["import", "verl", "none.sh", "--out", str(tmp_path / "there.yaml")]) == 2
    assert "already exists; use --out for another file" in capsys.readouterr().err
    assert main.main(["import", "verl", str(tmp_path / "none.sh"), "--out", str(tmp_path / "new.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_written_config_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("slime", tmp_path, monkeypatch)
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith(
        "# Translated from run.sh by rlsys import.\n# MISSING: --made-up-option = 3: no counter"
    )
    load_config(tmp_path / "mine.yaml", [])
    with pytest.raises(UserError):
        load_config(tmp_path / "mine.yaml", ["rollout.group_size=0"])
