"""`rlsys convert` on the real megatron-core: every family there and back, in several layouts, into the trainer."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlsys.cli.main import main as rlsys
from rlsys.config import Config
from rlsys.config.trainer import ModelConfig, ParallelConfig
from rlsys.convert import output
from rlsys.convert.torch_dist import DistWriter
from rlsys.core.errors import RunError, UserError
from rlsys.trainer import setup
from rlsys.trainer.checkpoints import manifest
from rlsys.trainer.checkpoints.conversion import hf_to_megatron, megatron_to_hf, verify
from rlsys.trainer.trainer import Trainer
from tests.helpers import family_cases
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": {},
    "LlamaForCausalLM": {},
    "MixtralForCausalLM": {},
    "Glm4MoeForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
}
DENSE: tuple[dict[str, int], ...] = ({}, {"pp": 4}, {"tp": 2, "pp": 2})
EXPERTS: tuple[dict[str, int], ...] = (
    {},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "etp": 2, "pp": 4, "ep": 2},
)


def parallel(layout: dict[str, int]) -> ParallelConfig:
    return ParallelConfig.model_validate(layout)


def quiet(done: int, total: int) -> None:
    """Nobody watches."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_is_bit_equal_in_every_layout(family: str, tmp_path: Path) -> None:
    model = cases.write_model(tmp_path / "model", family, **FAMILIES[family])
    original = tensors_of(model)
    if family == "MixtralForCausalLM":  # the type of a folder is kept
        original = {name: t.bfloat16() for name, t in original.items()}
        save_file(original, model / "model.safetensors")
    has_experts = any("experts" in name for name in original)
    for i, layout in enumerate(EXPERTS if has_experts else DENSE):
        megatron_folder, back = tmp_path / f"megatron-{i}", tmp_path / f"hf-{i}"
        result = hf_to_megatron(model, megatron_folder, layout, quiet)
        assert (result.tensors, result.elements) == (len(original), sum(t.numel() for t in original.values()))
        files = {int(f.name.split("_")[2]) for f in megatron_folder.glob("*.distcp")}
        assert max(files) < parallel(layout).world_size, "a file for a rank that the layout does not have"
        assert len(files) >= layout.get("tp", 1) * layout.get("pp", 1)
        megatron_to_hf(megatron_folder, back, quiet)
        returned = tensors_of(back)
        assert returned.keys() == original.keys()
        assert all(torch.equal(returned[n], t) and returned[n].dtype == t.dtype for n, t in original.items())
    assert verify(model, megatron_folder, quiet).tensors == len(original)


CASES = {
    "DeepseekV3ForCausalLM": ("hf:tp=2", "hf:pp=2", "megatron:ep=2", "megatron:tp=2,ep=2,etp=1"),
    "Glm4MoeForCausalLM": ("hf:tp=2", "megatron:pp=2", "hf:ep=2"),
    "Qwen2ForCausalLM": ("megatron:tp=2", "hf:pp=2"),
    "MixtralForCausalLM": ("megatron:tp=2",),
    # Sinks, windows and biases; a norm over all heads; a gate of shared experts; biases of softmax scores; groups.
    "GptOssForCausalLM": ("hf:tp=2,ep=2,etp=1", "hf:cp=2", "megatron:pp=2", "megatron:tp=2,etp=1"),
    "MiniMaxM2ForCausalLM": ("hf:tp=2", "megatron:tp=2,ep=2,etp=1"),
    "Qwen2MoeForCausalLM": ("megatron:tp=2",),
    "Ernie4_5_MoeForCausalLM": ("megatron:ep=2", "hf:tp=2"),
    "DeepseekV2ForCausalLM": ("megatron:tp=2,ep=2,etp=1",),
    # States of a gated delta net, cut by heads; gates in attention; norms that are kept as their distance from 1.
    "Qwen3NextForCausalLM": ("hf:tp=2", "megatron:pp=2", "megatron:tp=2,ep=2,etp=1"),
    # Experts are stacked in folders, and cut; a tower is carried.
    "Qwen3VLMoeForConditionalGeneration": ("hf:tp=2", "megatron:pp=2", "hf:ep=2", "megatron:tp=2,ep=2,etp=1"),
}


def test_every_layout_loads_the_same_weights_and_trains_identically(tmp_path: Path) -> None:
    """From the folder and from a checkpoint that was converted for another layout."""
    references = {}
    for family in CASES:
        folder = cases.write_model(tmp_path / family / "hf", family)
        layout = {"pp": 2} if family == "Qwen2ForCausalLM" else {"pp": 2, "ep": 4}
        hf_to_megatron(folder, tmp_path / family / "megatron", layout, quiet)
        references[family] = family_cases.measure(folder, tmp_path / "run", "")
    todo = [f"{family}:{case}" for family, some in CASES.items() for case in some]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [*torchrun, "-m", family_cases.__name__, str(tmp_path), *todo]
    subprocess.run(command, check=True, env=env)
    results = dict(json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines())
    assert list(results) == todo
    for case, result in results.items():
        expected = references[case.split(":")[0]]
        assert result["weights"] == expected["weights"], case
        for field, tolerance in (("logps", {"rtol": 0, "atol": 1e-5}), ("steps", {"rtol": 1e-5})):
            a, b = torch.tensor(result[field]), torch.tensor(expected[field])
            assert torch.allclose(a, b, **tolerance), f"{case}: {field} {a} {b}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_model(tmp_path_factory.mktemp("conversion") / "model")


@pytest.fixture(scope="module")
def converted(model: Path) -> Path:
    out = model.parent / "megatron"
    hf_to_megatron(model, out, {"ep": 2}, quiet)
    return out


def test_leaving_a_layout_leaks_no_threads(model: Path) -> None:
    """Each of gloo's polls for ever: a few conversions in one process would keep a core busy."""
    threads = []
    for _ in range(2):
        setup.init_distributed(Config(model=ModelConfig(path=model)))
        setup.leave_layout()
        threads.append(len(psutil.Process().threads()))
    assert threads[1] <= threads[0]


def test_a_runs_checkpoint_is_exported_as_the_trainer_exports_it(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(cases.config_of(model, tmp_path / "run"))
    cases.steps(trainer, 1)
    trainer.save_checkpoint(1)
    trainer.finish_checkpoint()
    trainer.export_hf(tmp_path / "exported")
    (tmp_path / "run/config.yaml").write_text(f"model: {{path: {model}}}\n")
    trainer.close()
    assert (
        rlsys(
            [
                "convert",
                "megatron-to-hf",
                "--checkpoint",
                str(tmp_path / "run"),
                "--out",
                str(tmp_path / "hf"),
            ]
        )
        == 0
    )
    assert verify(tmp_path / "hf", tmp_path / "exported", quiet).tensors == len(tensors_of(model))
    with pytest.raises(
        RunError, match=r"\d+ of \d+ tensors differ, first: model.embed_tokens.weight \(by up to"
    ):
        verify(tmp_path / "run", model, quiet)


def test_verify_command_reports_bit_equality(
    model: Path, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlsys(["convert", "verify", str(model), str(converted)]) == 0
    assert "bit-equal: " in capsys.readouterr().out


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of `rlsys convert ...`, which ends with 2."""
    assert rlsys(["convert", *argv]) == 2
    stderr = capsys.readouterr().err
    line = stderr.splitlines()[-1]
    assert line.startswith("rlsys: error: ")
    assert "Traceback" not in stderr
    return line


def test_a_layout_that_does_not_fit_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["hf-to-megatron", "--hf", str(model), "--out", str(tmp_path / "out")]
    assert "parallel.ep = 3 does not divide experts = 8" in refused([*argv, "--ep", "3"], capsys)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_touched(
    model: Path, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mtimes_before = sorted(f.stat().st_mtime_ns for f in converted.iterdir())
    argv = ["hf-to-megatron", "--hf", str(model), "--out", str(converted)]
    assert "exists already; expected a new folder" in refused(argv, capsys)
    assert mtimes_before == sorted(f.stat().st_mtime_ns for f in converted.iterdir())


def test_a_full_disk_is_reported_and_leaves_no_files(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    argv = ["hf-to-megatron", "--hf", str(model), "--out", str(out)]

    class Usage:
        free = 1000

    with monkeypatch.context() as patched:
        patched.setattr(output.shutil, "disk_usage", lambda _: Usage)
        assert "the disk has 0.00 GB free; expected at least 0.00 GB" in refused(argv, capsys)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DistWriter, "put", full)
        assert "the disk is full; the partial output was deleted" in refused(argv, capsys)
    assert not list(tmp_path.iterdir())


def test_damaged_and_foreign_models_are_named(
    model: Path, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = shutil.copytree(model, tmp_path / "cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    out = ["--out", str(tmp_path / "out")]
    assert "model.safetensors: not a whole safetensors file" in refused(
        ["hf-to-megatron", "--hf", str(cut), *out], capsys
    )

    flipped = shutil.copytree(converted, tmp_path / "flipped")
    file = flipped / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    to_hf = ["megatron-to-hf", *out, "--checkpoint"]
    assert "__0_0.distcp has changed" in refused([*to_hf, str(flipped)], capsys)

    foreign = shutil.copytree(converted, tmp_path / "foreign")
    raw = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**raw, "hidden_size": 32}))
    (foreign / manifest.NAME).unlink()
    manifest.write(foreign, 0, None, {})
    line = refused([*to_hf, str(foreign)], capsys)
    message = "another model: embedding.word_embeddings.weight has shape (96, 64), expected (96, 32)"
    assert message in line
    assert "expected a Megatron checkpoint" in refused([*to_hf, str(model)], capsys)
    assert not (tmp_path / "out").exists()


def test_a_killed_conversion_leaves_no_loadable_output(model: Path, tmp_path: Path) -> None:
    """Killed at its first tensor; the same command then succeeds."""
    out = tmp_path / "out"
    program = (
        "import os, signal, sys\n"
        "from rlsys.convert.torch_dist import DistWriter\n"
        "put = DistWriter.put\n"
        "def last(self, rank, key, *rest):\n"
        "    put(self, rank, key, *rest)\n"
        "    if 'layernorm' in key: os.kill(os.getpid(), signal.SIGKILL)\n"
        "DistWriter.put = last\n"
        "from rlsys.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    argv = ["convert", "hf-to-megatron", "--hf", str(model), "--out", str(out)]
    died = subprocess.run([sys.executable, "-c", program, *argv])
    assert died.returncode == -signal.SIGKILL
    assert [f.name for f in tmp_path.iterdir()] == ["out.partial"]
    assert rlsys(argv) == 0
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert verify(model, out, quiet).elements > 0


def test_a_checkpoint_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    """As a quantising tool leaves it: converted back, and loaded by a trainer."""
    folder, checkpoint = cases.write_model(tmp_path / "model", "Qwen3ForCausalLM"), tmp_path / "checkpoint"
    hf_to_megatron(folder, checkpoint, {}, quiet)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    key = "decoder.layers.self_attention.linear_proj.weight"
    properties = metadata.state_dict_metadata[key].properties
    metadata.state_dict_metadata[key].properties = replace(properties, dtype=torch.int8)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / manifest.NAME).unlink()
    manifest.write(checkpoint, 0, None, {})
    message = rf"{checkpoint}: {key} has type int8; expected float64, float32, bfloat16 or float16"
    with pytest.raises(UserError, match=message):
        megatron_to_hf(checkpoint, tmp_path / "back", quiet)
    with pytest.raises(UserError, match=message):
        Trainer(cases.config_of(checkpoint, tmp_path / "run")).close()
    setup.leave_layout()


def test_verify_compares_bits(tmp_path: Path) -> None:
    """A number that is none equals itself; the two zeros differ."""
    folders = [cases.write_model(tmp_path / name, "Qwen3ForCausalLM") for name in "ab"]
    for folder, zero in zip(folders, (0.0, -0.0), strict=True):
        tensors = tensors_of(folder)
        tensors["model.norm.weight"][:2] = torch.tensor([torch.nan, zero])
        save_file(tensors, folder / "model.safetensors")
    assert verify(folders[0], folders[0], quiet).tensors == len(tensors)
    with pytest.raises(RunError, match=r"1 of \d+ tensors differ, first: model\.norm\.weight"):
        verify(folders[0], folders[1], quiet)
