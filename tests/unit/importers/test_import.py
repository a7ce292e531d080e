"""`rlsys import`: scripts in the form of verl's and slime's become configs that pass `rlsys explain`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.cli import main
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.importers import slime, verl
from rlsys.importers.draft import parse_value
from rlsys.importers.shell import Script
from rlsys.importers.slime import SLIME
from rlsys.importers.verl import VERL

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "tests" / "data" / "foreign"


# The shell


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' \"d e\"", ["a", "b c", "d e"]),
        ("X=3\nrun --x $X ${X} \"${X}y\" '$X'", ["run", "--x", "3", "3", "3y", "$X"]),
        ("run a \\\n  b # not this\n", ["run", "a", "b"]),
        ("A=(--x 1\n # --y 2\n --z 'q r')\nrun ${A[@]}", ["run", "--x", "1", "--z", "q", "r"]),
        ("A=(1)\nA+=(2 3)\nrun ${A[@]}", ["run", "1", "2", "3"]),
        ("run $((2 * (3 + 1))) ", ["run", "8"]),
        ("N=4\nM=$((N * 2))\nrun $((M / 3))", ["run", "2"]),
        ('run ${GONE:-fallback} ${GONE:-"${OTHER:-deep}"}', ["run", "fallback", "deep"]),
        ("export X=1\nX=2; run $X", ["run", "2"]),
        ('A=()\nrun "${A[@]}" a ${A[@]}', ["run", "a"]),
        ("run $((2**6)) $((-7 / 2)) $(seq 1 2 5)", ["run", "64", "-3", "1", "3", "5"]),
        ("X=1\nX=2 run $X\nrun $X", ["run", "1"]),
        ("run a 2>&1 > log | tee b", ["run", "a"]),
        ("cat <<END\nrun no\nEND\nrun a", ["run", "a"]),
        ('run "{\\"a\\": \\"b\\"}"', ["run", '{"a": "b"}']),
    ],
)
def test_words_as_bash_would_make_them(text: str, words: list[str]) -> None:
    commands = [command.argv for command in Script(text).commands]
    assert [w for w in commands if w[0] == "run" or len(words) == 3][-1] == words


@pytest.mark.parametrize(
    ("text", "shown", "why"),
    [
        ("run $UNKNOWN", "$UNKNOWN", "UNKNOWN is not set"),
        ("run $(date)", "$(date)", "what a command prints is not known"),
        ("run $1", "$1", "an argument that the script is started with"),
        ("if true; then X=1; else X=2; fi\nrun $X", "$X", "X is set in the if at line 1"),
        ("X=1\nfalse && X=2\nrun $X", "$X", "X is set in the && or || at line 2"),
        ("X=1\n(X=2)\nrun $X", "$X", "X is set in the subshell at line 2"),
        ("for X in 1 2; do :; done\nrun $X", "$X", "X has several values in the loop at line 1"),
        ("run $((RANDOM + 1))", "$((RANDOM + 1))", "arithmetic that is not computed"),
        ("run a{1,2}", "a{1,2}", "braces are not expanded"),
        ("run *.jsonl", "*.jsonl", "a pattern depends on the files that are there"),
    ],
)
def test_a_hole_is_shown_as_the_script_has_it(text: str, shown: str, why: str) -> None:
    script = Script(text)
    word = script.commands[-1].argv[-1]
    assert (script.source_text(word), [hole.reason for hole in script.holes_in(word)]) == (shown, [why])


def test_nothing_is_run_and_what_is_not_known_is_remembered(tmp_path: Path) -> None:
    script = Script(f"touch {tmp_path}/made\nX=$(touch {tmp_path}/made)\nrun $GONE $((GONE + 1)) ${{#X}}")
    assert not (tmp_path / "made").exists()
    assert {"$GONE", "$((GONE + 1))", "${#X}", f"$(touch {tmp_path}/made)"} <= script.unknown


def test_an_unfinished_script_is_read_to_its_end() -> None:
    for text in ("run 'a", 'run "a', "A=(1 2", "run ${X", "run $((1", "run \\"):
        Script(text)


def test_numbers_are_numbers() -> None:
    assert [parse_value(t) for t in ("1e-6", "3", "True", "null", "['a', 'b']", "a: b: c", 5)] == [
        1e-6, 3, True, None, ["a", "b"], "a: b: c", 5,
    ]  # fmt: skip


# Both translators


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
    out = tmp_path / "mine.yaml"
    assert main.main(["import", framework, str(script), "--out", str(out)]) == 3  # each has a made-up option
    data: dict[str, Any] = yaml.safe_load(out.read_text())
    return data


def test_a_script_of_slime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made("slime", tmp_path, monkeypatch)
    told = " ".join(capsys.readouterr().out.split())
    assert found["run"] == {"dir": "/checkpoints/some-moe/"}
    assert found["data"]["source"] == "jsonl"
    assert found["data"]["keys"] == {"prompt": "question", "answer": "solution"}
    assert found["rollout"] == {
        "temperature": 0.9, "over_provision": 1.5, "max_staleness": 4, "groups_per_step": 32, "group_size": 8,
        "max_response_tokens": 4096,
    }  # fmt: skip
    assert found["algo"] == {
        "planners": ["dapo"], "advantage": "grpo", "reducer": "sequence_mean", "minibatches": 2,
        "anchor": "behaviour",
        "loss": [{"name": "clip", "clip_low": 0.2, "clip_high": 0.28}, {"name": "kl", "beta": 0.001, "kind": "k3"}],
        "corrections": [{"name": "tis", "cap": 2.0}],
    }  # fmt: skip
    assert found["parallel"] == {"tp": 2, "pp": 1, "ep": 4, "etp": 1, "dp": 8}
    assert (found["engine"]["tp"], found["engine"]["count"]) == (4, 4)
    assert found["launch"] == {"gpus_per_node": 8, "nodes": 2, "backend": "ray", "release_memory": True}
    assert [s["name"] for s in found["eval"]["sets"]] == ["hard", "easy"]
    assert found["eval"]["sets"][1]["data"]["params"]["heldout_path"].endswith("easy.jsonl")
    assert found["eval"]["prompts"] == 90
    assert "--made-up-option = 3: no counterpart is known" in told
    assert "--sequence-parallel = True: so here" in told
    assert "--eval-top-p = 0.7" in told
    assert "${MODEL_ARGS[@]}: MODEL_ARGS is not set" in told
    assert found["engine"]["extra_args"] == ["--mem-fraction-static", "0.7"]
    assert main.main(["explain", str(tmp_path / "mine.yaml")]) == 0


def test_a_script_of_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made("verl", tmp_path, monkeypatch)
    told = " ".join(capsys.readouterr().out.split())
    assert found["run"] == {"dir": "runs/run one"}
    assert found["data"]["reward"] == f"{tmp_path}/rewards.py:score"
    assert found["algo"] == {
        "advantage": "dr_grpo", "reducer": "token_mean", "planners": ["dapo"], "minibatches": 4, "anchor": "old",
        "loss": [{"name": "clip", "clip_low": 0.2, "clip_high": 0.28}, {"name": "kl", "beta": 0.001, "kind": "k3"}],
        "shaping": [{"name": "overlong", "cap": 4096, "buffer": 512, "factor": 1.0}],
    }  # fmt: skip
    assert found["parallel"] == {"tp": 2, "pp": 1, "ep": 4, "etp": 1, "dp": 4}
    assert (found["engine"]["tp"], found["engine"]["count"]) == (4, 2)
    assert found["eval"]["sets"] == [{"name": "val", "samples": 4, "temperature": 0.6, "prompts": 90}]
    assert (
        found["trainer"]["warmup_steps"],
        found["trainer"]["checkpoint_every"],
        found["eval"]["every"],
    ) == (10, 20, 5)
    assert "algorithm.made_up = 3: no counterpart is known" in told
    assert (found["rollout"]["top_p"], found["rollout"]["top_k"]) == (0.9, 1024)
    assert "rollout.top_k = 1024: top_p needs a bound" in told
    assert "trainer.steps = 15: 15 epochs of 90 rows, 64 prompts a step" in told
    assert found["trainer"]["steps"] == 15
    assert main.main(["explain", str(tmp_path / "mine.yaml")]) == 0


@pytest.mark.parametrize(("reader", "names"), [(verl, VERL), (slime, SLIME)], ids=["verl", "slime"])
def test_a_setting_becomes_the_field_that_a_person_is_told_of(reader: Any, names: dict[str, str]) -> None:
    """`rlsys train` says of a name of theirs what it is called here; `rlsys import` must not say otherwise."""
    text = (SCRIPTS / f"{reader.__name__.rpartition('.')[2]}_math.sh").read_text()
    told = {
        row.setting: row.result for row in reader.translate(reader.read_settings(text, None, {}), ()).mapped
    }
    same = [name for name in told if "=" not in names.get(name, "=")]  # others have a value of their own
    assert len(same) > 10
    for name in same:
        field = re.match(r"[\w.]+", names[name])
        assert field is not None and told[name].startswith(field[0]), name


def test_their_parsers_are_ours() -> None:
    """All three use SGLang's names."""
    text = (SCRIPTS / "slime_math.sh").read_text()
    more = "--sglang-mem-fraction-static 0.7 --sglang-tool-call-parser qwen25 --sglang-reasoning-parser qwen3"
    text = text.replace("--sglang-mem-fraction-static 0.7", more)
    engine = slime.translate(slime.read_settings(text, None, {}), ()).config["engine"]
    assert (engine["tool_call_parser"], engine["reasoning_parser"], engine["count"]) == ("qwen25", "qwen3", 4)
    settings = verl.read_settings((SCRIPTS / "verl_math.sh").read_text(), None, {})
    at = "actor_rollout_ref.rollout.multi_turn"
    settings.values |= {f"{at}.enable": "True", f"{at}.format": "hermes"}
    draft = verl.translate(settings, ())
    assert draft.config["engine"]["tool_call_parser"] == "hermes"
    assert "rollout.generator = functions" in next(
        r.result for r in draft.rejected if r.setting == f"{at}.enable"
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
        ({"lora.rank": "8"}, None, ["lora.rank"]),
    ],
)
def test_verls_adapters(given: dict[str, str], ours: dict[str, Any] | None, refused: list[str]) -> None:
    model = "actor_rollout_ref.model."
    settings = verl.read_settings((SCRIPTS / "verl_math.sh").read_text(), None, {})
    settings.values |= {model + name: value for name, value in given.items()}
    draft = verl.translate(settings, ())
    assert draft.config["trainer"].get("lora") == ours
    assert [r.setting.removeprefix(model) for r in draft.rejected if r.setting.startswith(model)] == refused


@pytest.mark.parametrize(("theirs", "ours"), [("adam", "adamw"), ("dist_muon", "muon"), ("sgd", None)])
def test_slimes_optimizer(theirs: str, ours: str | None) -> None:
    text = (SCRIPTS / "slime_math.sh").read_text().replace("--optimizer adam", f"--optimizer {theirs}")
    draft = slime.translate(slime.read_settings(text, None, {}), ())
    assert draft.config["trainer"].get("optimizer") == ours
    refused = [row.setting for row in draft.rejected]
    assert ("--optimizer" in refused) == (theirs == "sgd")


def test_yaml_of_verl_is_its_dotted_names(tmp_path: Path) -> None:
    settings = verl.read_settings(
        "", {"data": {"train_batch_size": 8, "val_files": None}, "trainer": {"nnodes": 2}}, {}
    ).values
    assert settings == {"data.train_batch_size": 8, "trainer.nnodes": 2}
    assert slime.read_settings("", {"hf_checkpoint": "m", "colocate": True, "use_tis": False}, {}).values == {
        "--hf-checkpoint": "m", "--colocate": True,
    }  # fmt: skip


def test_engines_of_their_own(tmp_path: Path) -> None:
    """train_async: the engines have other GPUs, and the anchor estimates what nobody can score."""
    words = (
        "train_async.py --hf-checkpoint m --prompt-data d.jsonl --rollout-batch-size 8 --n-samples-per-prompt 8 "
        "--rm-type math"
    )
    settings = slime.read_settings(
        f"python {words} --actor-num-gpus-per-node 8 --rollout-num-gpus 16 --partial-rollout", None, {}
    )
    found = slime.translate(settings, ("math",)).config
    assert found["launch"] == {"gpus_per_node": 8, "nodes": 3, "backend": "ray", "placement": "disaggregated"}
    assert (found["engine"]["count"], found["weights"]["method"]) == (16, "broadcast")
    assert (found["algo"]["anchor"], found["data"]["reward"]) == ("interpolated", "math")


@pytest.mark.parametrize(
    ("framework", "text", "told"),
    [
        ("verl", "echo hello", "no settings of verl in it"),
        ("slime", "echo hello", "no command of slime in it"),
        ("slime", "python train.py --lr 1", "expected --hf-checkpoint and --prompt-data in it"),
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
def test_what_is_not_theirs_is_one_line(
    framework: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "x.sh"
    script.write_text(text)
    assert main.main(["import", framework, str(script), "--out", str(tmp_path / "y.yaml")]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.yaml").write_text("")
    assert main.main(["import", "verl", "none.sh", "--out", str(tmp_path / "there.yaml")]) == 2
    assert "already exists; use --out for another file" in capsys.readouterr().err
    assert main.main(["import", "verl", str(tmp_path / "none.sh"), "--out", str(tmp_path / "new.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_what_was_written_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("slime", tmp_path, monkeypatch)
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith("# Translated from run.sh by rlsys import.\n# MISSING: ")
    assert "# NOT TRANSLATED: --made-up-option = 3: no counterpart is known" in text
    load_config(tmp_path / "mine.yaml", [])
    with pytest.raises(UserError):
        load_config(tmp_path / "mine.yaml", ["rollout.group_size=0"])
