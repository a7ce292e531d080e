"""Checkpoints on the real megatron-core: whole or not there, checked, kept by policy, written in the background."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from rlsys.core.errors import RlsysError, RunError
from rlsys.trainer.checkpoints import checkpoint, manifest
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_model(tmp_path_factory.mktemp("models") / "moe", num_hidden_layers=2)


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(cases.config_of(model, tmp_path / "run", trainer={"keep_checkpoints": 2}))
    yield trainer
    trainer.close()


def folder(trainer: Trainer) -> Path:
    return trainer.config.run.dir / "checkpoints"


def test_retention_keeps_the_best_checkpoint_and_ignores_partial_ones(trainer: Trainer) -> None:
    for step, score in ((1, 0.2), (2, 0.5), (3, None), (4, 0.4), (5, None)):
        cases.save(trainer, step, score)
    assert checkpoint.steps(folder(trainer)) == [2, 4, 5]
    (folder(trainer) / "step-000005").rename(folder(trainer) / "step-000005.partial")
    assert trainer.load_checkpoint() == 4
    cases.save(trainer, 6)
    assert sorted(p.name for p in folder(trainer).iterdir()) == ["step-000002", "step-000004", "step-000006"]


def test_a_save_holds_the_state_of_its_own_step(trainer: Trainer) -> None:
    cases.steps(trainer, 1)
    expected = cases.weight_sums(trainer)
    trainer.save_checkpoint(1)
    cases.steps(trainer, 1)  # overwrites every weight while the thread may still be writing
    assert trainer.finish_checkpoint() == 1
    assert trainer.finish_checkpoint() is None
    assert trainer.load_checkpoint() == 1
    assert cases.weight_sums(trainer) == expected


FILES = ("metadata.json", "common.pt", ".metadata", "__0_0.distcp")


@pytest.mark.parametrize("victim", FILES)
def test_a_flipped_byte_is_named(victim: str, trainer: Trainer) -> None:
    for step in (1, 2):
        cases.save(trainer, step)
    file = folder(trainer) / "step-000002" / victim
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=rf"step-000002: .* {victim} has changed .* from step 1"):
        trainer.load_checkpoint()


@pytest.mark.parametrize("kind", ["function", "object"])
def test_security_h4_a_planted_checkpoint_runs_no_code_on_resume(
    kind: str, trainer: Trainer, tmp_path: Path
) -> None:
    """The checksums of a planted checkpoint are right. torch reads `.metadata` and objects with pickle.load."""

    class Code:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "made"), "w")

    cases.save(trainer, 1)
    step = folder(trainer) / "step-000001"
    planted: Any = Code()
    if kind == "object":
        planted = pickle.loads((step / ".metadata").read_bytes())
        key = next(key for key in planted.state_dict_metadata if key.startswith("decoder"))
        torch.save(Code(), step / "code.distcp")
        size = (step / "code.distcp").stat().st_size
        shape = planted.state_dict_metadata[key].size
        planted.state_dict_metadata[key] = BytesStorageMetadata()
        planted.state_dict_metadata[key].size = shape
        planted.storage_data[MetadataIndex(key)] = _StorageInfo("code.distcp", 0, size)
    (step / ".metadata").write_bytes(pickle.dumps(planted))
    about = json.loads((step / manifest.NAME).read_text())
    for name in (".metadata", *(p.name for p in step.glob("code.distcp"))):
        about["files"][name] = hashlib.sha256((step / name).read_bytes()).hexdigest()
    (step / manifest.NAME).write_text(json.dumps(about))
    message = (
        "expected only types of the format"
        if kind == "function"
        else "as a pickled object; expected a tensor"
    )
    with contextlib.suppress(Exception):
        trainer.load_checkpoint()
    assert not (tmp_path / "made").exists()
    with pytest.raises(RlsysError, match=message):
        trainer.load_checkpoint()


def test_a_missing_file_and_a_missing_manifest_are_named(trainer: Trainer) -> None:
    cases.save(trainer, 1)
    (folder(trainer) / "step-000001/__0_0.distcp").unlink()
    with pytest.raises(RunError, match=r"__0_0\.distcp is missing"):
        trainer.load_checkpoint()
    (folder(trainer) / "step-000001/manifest.json").unlink()
    with pytest.raises(RunError, match=r"manifest\.json is missing or truncated"):
        trainer.load_checkpoint()


def test_a_checkpoint_of_another_model_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    cases.save(trainer, 1)
    trainer.close()
    wider = cases.write_model(tmp_path / "wider", num_hidden_layers=2, moe_intermediate_size=64)
    wider_trainer = Trainer(cases.config_of(wider, tmp_path / "run"))
    with pytest.raises(RunError, match=r"step-000001: the checkpoint cannot be loaded"):
        wider_trainer.load_checkpoint()
    wider_trainer.close()


def test_a_full_disk_is_reported(trainer: Trainer) -> None:
    trainer.finish_checkpoint()
    cases.save(trainer, 1)
    trainer.save_checkpoint(2)
    pending = trainer._checkpoints._pending
    assert pending is not None
    pending.write.is_done(wait=True)
    pending.write.error = "OSError: No space left on device"
    with pytest.raises(
        RunError, match=r"step-000002: .* could not be written: rank 0: OSError: No space left"
    ):
        trainer.finish_checkpoint()
    assert checkpoint.steps(folder(trainer)) == [1]


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it(model: Path, tmp_path: Path) -> None:
    """A process saves step 1, begins to save step 2, and is killed when a part of it is on the disk."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    victim = "tests.helpers.trainer_saves_forever"
    command = [sys.executable, "-m", victim, str(model), str(tmp_path / "run")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    expected = process.stdout.readline()
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder_names = {p.name for p in (tmp_path / "run/checkpoints").iterdir()}
    assert folder_names == {"step-000001", "step-000002.partial"}
    resumed = Trainer(cases.config_of(model, tmp_path / "run"))
    assert resumed.load_checkpoint() == 1
    assert repr(cases.weight_sums(resumed)) == expected.strip()
    cases.save(resumed, 2)
    assert checkpoint.steps(tmp_path / "run/checkpoints") == [1, 2]
    resumed.close()


def test_ranks_share_the_writing_and_read_each_piece_once(tmp_path: Path) -> None:
    """Four data-parallel ranks. Before: one of them had gathered the optimizer's state and wrote all of it."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 4096}
    model = cases.write_model(tmp_path / "model", num_hidden_layers=2, **sizes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run(
        [*torchrun, "-m", "tests.helpers.checkpoint_share", model, tmp_path, "dp=4"], check=True, env=env
    )
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(4)]
    assert all(r["same"] for r in ranks)
    wrote = [r["wrote"] for r in ranks]
    assert max(wrote) <= 1.05 * min(wrote), wrote
    read = [tuple(piece) for r in ranks for piece in r["read"]]
    assert len(set(read)) == len(read), "a piece was read twice"
    assert sum(length for _, _, length in read) <= sum(wrote)
