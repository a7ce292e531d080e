"""Test of configs that `rlsys new --model` writes: they load, fit, and hold the samples in flight."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from rlsys.cli.main import main
from rlsys.config import load_config
from rlsys.convert.config import HFConfig
from rlsys.core.errors import UserError
from rlsys.data.row_source import heldout_count
from rlsys.planner.layout import lay_out
from rlsys.planner.memory import budget, memory_problems, model_size, samples_held
from rlsys.planner.recommendation import recommend
from rlsys.rollout.dry_run import dry_run

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "configs/models"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        ("Qwen2.5-7B-Instruct", 8),
        ("Qwen2.5-7B-Instruct", 24),
        ("Qwen3-30B-A3B", 8),
        ("Qwen3-30B-A3B", 64),
        ("GLM-4.5-Air", 64),
        pytest.param("DeepSeek-V3", 512, marks=pytest.mark.gate),
        ("quickstart-moe", 1),
        ("quickstart-moe", 0),
    ],
)
def test_the_written_config_loads_and_fits(
    model: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--model", str(MODELS / model), "--gpus", str(gpus)]) == 0
    config = load_config(Path("mine/config.yaml"), [])
    hf = HFConfig.read(config.model.path)
    assert config == recommend(MODELS / model, gpus, data=config.data.model_dump()).config.model_copy(
        update={"run": config.run}
    )
    shares = lay_out(config)
    devices = {(s.node, gpu) for unit in (shares.trainer, *shares.engines) for s in unit for gpu in s.gpus}
    assert len(devices) == gpus == config.launch.nodes * config.launch.gpus_per_node
    assert not memory_problems(config, hf, 80.0)
    pool_tokens = budget(config, model_size(hf)).pool_tokens
    assert samples_held(config, pool_tokens) == config.max_running_requests
    assert gpus == 0 or f" {pool_tokens} tokens, to the KV pool" in Path("mine/config.yaml").read_text()


@pytest.mark.parametrize(
    ("model", "gpus", "enough"), [("DeepSeek-V3", 8, 128), ("GLM-4.5-Air", 8, 16), ("Qwen3-30B-A3B", 1, 8)]
)
def test_a_model_that_is_too_large_names_a_sufficient_number(model: str, gpus: int, enough: int) -> None:
    message = f"does not fit {gpus} GPUs of 80 GB .h100.; {enough} GPUs .{enough // 8} nodes. are enough"
    with pytest.raises(UserError, match=message):
        recommend(MODELS / model, gpus)
    assert recommend(MODELS / model, enough)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "8"], "--gpus 8: expected together with --model FOLDER"),
        (["--reward", "score.py:score"], "--reward score.py:score: expected together with --data FILE"),
        (["--heldout", "test.parquet"], "--heldout test.parquet: expected together with --data FILE"),
        (
            ["--model", "M", "--heldout", "test.parquet"],
            "--heldout test.parquet: expected together with --data FILE",
        ),
        (["--model", "M", "--gpus", "-1"], "--gpus -1: expected a number from 0 to 65536"),
        (["--model", "M", "--gpus", "8", "--gpu", "tpu"], "--gpu tpu: expected one of"),
        (
            ["--model", "M", "--gpus", "8", "--data", "rows.csv"],
            "--data rows.csv: expected a file that ends in",
        ),
        (["--model", "M", "--gpus", "8", "--data", "rows.jsonl"], "--data rows.jsonl: no such file"),
        (["--model", "nowhere", "--gpus", "8"], "nowhere"),
        (["--data", "rows.parquet", "--reward", "none.py"], "--reward none.py: "),
        (["--data", "rows.parquet", "--reward", "none.py:score"], "cannot import none.py: no such file"),
        (
            ["--data", "rows.parquet", "--reward", "maths"],
            "data.reward = 'maths': unknown name; did you mean math?",
        ),
        (["--model", "M", "--gpus", "8", "--reward", "maths"], "unknown name; did you mean math?"),
        (
            ["--data", "rows.parquet", "--reward", "two.py"],
            "two.py: the file defines a, b; expected two.py:FUNCTION",
        ),
        (
            ["--data", "rows.parquet", "--reward", "private.py"],
            "private.py: the file defines no public function; expected one\n",
        ),
        (["--data", "rows.parquet", "--reward", "two.py:c"], "'two.py:c': two.py has no function 'c'"),
        (["--data", "rows.parquet", "--reward", "broken.py"], "--reward broken.py: '(' was never closed"),
    ],
)
def test_bad_options_are_named(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("two.py").write_text("def a(config): pass\ndef b(config): pass\ndef _c(config): pass\n")
    Path("private.py").write_text("def _a(config): pass\n")
    Path("broken.py").write_text("def a(config:\n")
    words = [str(MODELS / "Qwen3-30B-A3B") if word == "M" else word for word in options]
    assert main(["new", "mine", *words]) == 2
    assert message in capsys.readouterr().err and not Path("mine").exists()


@pytest.mark.parametrize("reward", ["score.py:score", "score.py"])
def test_data_and_reward_are_in_the_config(
    reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of one public function needs no name of it."""
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text("def _parse(text): ...\ndef score(prompt, text): return 1.0\n")
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    command = ["new", "mine", "--model", str(MODELS / "Qwen3-30B-A3B"), "--gpus", "8", "--data", "rows.jsonl"]
    assert main([*command, "--reward", reward]) == 0
    data = load_config(Path("mine/config.yaml"), []).data
    assert (data.source, data.params, data.reward_name) == ("jsonl", {"path": "rows.jsonl"}, "score.py:score")


def test_a_quantised_model_is_converted_first(tmp_path: Path) -> None:
    fields = json.loads((MODELS / "Qwen3-30B-A3B/config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"its weights are quantised \(fp8\).*rlsys convert hf-to-megatron"):
        recommend(tmp_path, 8)


def test_own_data_train_the_shipped_model_without_further_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of verl: prompts in Parquet and a function compute_score. The data check of a run accepts the config."""
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("train", range(300)), ("test", range(300, 358))):
        rows = [
            {
                "data_source": "my/sums",
                "prompt": [{"role": "user", "content": f"{i % 9}+{i // 9}="}],
                "reward_model": {"style": "rule", "ground_truth": str(i % 9 + i // 9)},
                "extra_info": {"index": i},
            }
            for i in numbers
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"{name}.parquet")
    Path("my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth in solution_str)\n"
    )
    command = ["new", "sums", "--data", "train.parquet", "--heldout", "test.parquet"]
    assert main([*command, "--reward", "my_reward.py:compute_score"]) == 0
    assert "next: rlsys try sums/config.yaml" in capsys.readouterr().out
    config = load_config(Path("sums/config.yaml"), [])
    assert config.data.params == {"path": "train.parquet", "heldout_path": "test.parquet"}
    assert (config.trainer.lr, config.trainer.steps) == (1e-4, 10), "those of the quickstart"
    result = dry_run(config)
    assert result.rewards == ()
    assert heldout_count(config) == 58
    assert main([*command, "--reward", "my_reward.py:compute_score"]) == 2


def test_an_evaluation_has_no_more_prompts_than_the_data_hold_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the written config would end at its first evaluation else."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": i + 1} for i in range(400)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "rows.parquet")
    command = ["new", "mine", "--model", str(MODELS / "Qwen3-30B-A3B"), "--gpus", "8", "--data"]
    assert main([*command, "rows.parquet"]) == 0
    config = load_config(Path("mine/config.yaml"), [])
    assert 25 < config.eval.prompts < 75 and config.eval.prompts == heldout_count(config)
    Path("other.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    command[1] = "other"
    assert main([*command, "other.jsonl"]) == 0
    warning = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert "other.jsonl:1" in warning and warning.endswith("eval.prompts = 512 is not checked")


def test_a_model_of_a_hub_is_written_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot's config.json decides; the config keeps the name, which a run pins to a commit."""
    monkeypatch.chdir(tmp_path)
    cached = cache_snapshot(tmp_path / "cache", "me/small", MODELS / "quickstart-moe/config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["new", "mine", "--model", "me/small", "--gpus", "0"]) == 0
    assert cached.is_dir()
    assert "path: me/small " in Path("mine/config.yaml").read_text()


def cache_snapshot(cache: Path, name: str, file: Path) -> Path:
    """Lay out a repository as huggingface_hub does; return the snapshot's folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    (snapshot / "config.json").write_bytes(file.read_bytes())
    return snapshot


def test_a_host_without_gpus_gets_a_config_that_fits_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlsys.cli.project.gpu_names", list)
    large = ["new", "large", "--model", str(MODELS / "Qwen3-30B-A3B")]
    monkeypatch.setattr(
        "rlsys.cli.project.psutil.virtual_memory", lambda: SimpleNamespace(total=64_000_000_000)
    )
    assert main(large) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "need" in line and line.endswith("this one has 64 GB; for a machine with N GPUs use --gpus N")
    assert not Path("large").exists()
    assert main(["new", "small", "--model", str(MODELS / "quickstart-moe")]) == 0
    assert "for the CPU of this host; --gpus N: for N GPUs" in capsys.readouterr().out
    assert load_config(Path("small/config.yaml"), []).launch.gpus_per_node == 0


@pytest.mark.parametrize(("model", "gpus", "peak"), [("GLM-4.5-Air", 64, 44.92), ("Qwen3-30B-A3B", 8, 39.34)])
def test_the_memory_of_a_written_config_is_near_its_rehearsal(model: str, gpus: int, peak: float) -> None:
    """GB of a rank at its peak, by `rlsys rehearse`."""
    size = model_size(HFConfig.read(MODELS / model))
    assert budget(recommend(MODELS / model, gpus).config, size).trainer == pytest.approx(1e9 * peak, rel=0.15)
