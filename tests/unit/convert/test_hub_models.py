"""A model of a Hugging Face hub in the place of a folder: fetched once, recorded by its commit, read offline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlsys.cli.main import main
from rlsys.config import Config, dump_config, identity, load_config
from rlsys.convert.hub import find_folder, model_overrides, pin_models
from rlsys.core.errors import UserError
from rlsys.core.hub import snapshot_name
from tests.helpers.loopback_hub import COMMIT, hub

MODEL = Path(__file__).parents[3] / "configs" / "models" / "quickstart-moe"
FILES = {file.name: file.read_bytes() for file in MODEL.iterdir() if file.is_file()}
OTHER = "b2" * 20
UNREAD = {"pytorch_model.bin": b"x", "original/consolidated.safetensors": b"x", "onnx/model.onnx": b"x"}


@pytest.fixture
def revisions() -> dict[str, str]:
    return {"main": COMMIT, "v1": OTHER}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revisions: dict[str, str]) -> Iterator[list[str]]:
    """The paths that a hub on loopback is asked for; it has me/tiny, and the cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub("me/tiny", FILES | UNREAD, "models", revisions) as (url, paths):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield paths


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def config(path: str, *more: str) -> Config:
    return load_config(Path("quickstart"), [f"model.path={path}", "run.dir=run", *more])


def test_a_hub_model_is_fetched_once_and_then_read_offline(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = pin_models(config("me/tiny")).model.path
    assert folder == tmp_path / "cache" / "models--me--tiny" / "snapshots" / COMMIT
    assert snapshot_name(folder) == f"me/tiny@{COMMIT}"
    assert {p.name for p in folder.iterdir()} == set(FILES)  # and no weights that nothing reads
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    request_count = len(asked)
    offline(monkeypatch)
    assert pin_models(config("me/tiny")).model.path == folder
    assert pin_models(config(f"me/tiny@{COMMIT}")).model.path == folder
    assert pin_models(config(str(folder))).model.path == folder
    assert len(asked) == request_count


def test_a_revision_is_a_branch_a_tag_or_a_commit(asked: list[str]) -> None:
    assert snapshot_name(find_folder(Path("me/tiny@v1"), "--hf")) == f"me/tiny@{OTHER}"
    assert snapshot_name(find_folder(Path(f"me/tiny@{OTHER}"), "--hf")) == f"me/tiny@{OTHER}"
    with pytest.raises(
        UserError,
        match=r"me/tiny': no such folder, and the download of this model at revision v2 from http.* failed",
    ):
        find_folder(Path("me/tiny@v2"), "--hf")


def test_explain_needs_no_weights(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pin_models(config("me/tiny"), weights=False).model.path
    assert not any(path.endswith("safetensors") for path in asked)
    assert not list(folder.glob("*.safetensors"))
    offline(monkeypatch)
    assert pin_models(config("me/tiny"), weights=False).model.path == folder
    with pytest.raises(UserError, match="the cache has only a part of it; `hf download me/tiny` fetches"):
        pin_models(config("me/tiny"))


@pytest.mark.gate
def test_an_unavailable_hub_model_is_reported_with_its_field(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UserError,
        match=r"^model.path = 'me/tyni': no such folder, and the download of this model from http.*404[^\n]*$",
    ):
        pin_models(config("me/tyni"))
    teacher = f"algo.teacher={{path: {MODEL}, by_source: {{sums: me/other}}}}"
    with pytest.raises(UserError, match=r"^algo.teacher.by_source.sums = 'me/other': no such folder"):
        pin_models(config(str(MODEL), teacher))
    offline(monkeypatch)
    for words in (
        ["train", "quickstart", "model.path=me/tiny"],
        ["sft", "quickstart_sft", "model.path=me/tiny"],
        ["try", "quickstart", "model.path=me/tiny"],
        ["eval", "quickstart", "model.path=me/tiny"],
        ["eval", "quickstart", "--checkpoint", "me/tiny"],
        ["submit", "quickstart", "model.path=me/tiny", "--time", "1"],
        ["rehearse", "quickstart", "model.path=me/tiny"],
        ["plan", "quickstart", "model.path=me/tiny"],
        ["tenants", "quickstart", "model.path=me/tiny", "trainer.lora={}", "--port", "1234", "--tenant", "a"],
        ["convert", "hf-to-megatron", "--hf", "me/tiny", "--out", "out"],
        ["convert", "verify", "me/tiny", str(MODEL)],
    ):
        assert main(words) == 2
        line = capsys.readouterr().err
        assert line.startswith("rlsys: error: ") and line.count("\n") == 1, words
        assert "= 'me/tiny': no such folder, and the cache has no copy; `hf download me/tiny`" in line, words


def test_a_port_without_a_hub_is_one_line(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UserError,
        match=r"^model.path = 'me/tiny': no such folder, and the download of this model from http://127.0.0.1:9",
    ):
        pin_models(config("me/tiny"))


def test_every_role_that_names_a_model_takes_one(asked: list[str]) -> None:
    pinned = pin_models(config("me/tiny", "algo.teacher={path: me/tiny@v1, by_source: {a.b: me/tiny}}"))
    assert pinned.algo.teacher is not None
    folders = [pinned.model.path, *pinned.algo.teacher.folders.values()]
    assert [snapshot_name(f) for f in folders] == [f"me/tiny@{c}" for c in (COMMIT, OTHER, COMMIT)]
    overridden_config = config(
        "me/tiny", "algo.teacher={path: me/tiny, by_source: {a.b: me/tiny}}", *model_overrides(pinned)
    )
    assert overridden_config == pinned


def test_a_resumed_run_keeps_its_model_commit(asked: list[str], revisions: dict[str, str]) -> None:
    first = pin_models(config("me/tiny"))
    Path("run").mkdir()
    Path("run/config.yaml").write_text(dump_config(first))
    revisions["main"] = OTHER
    assert pin_models(config("me/tiny")) == first == load_config(Path("run/config.yaml"))
    assert snapshot_name(pin_models(config("me/tiny@main")).model.path) == f"me/tiny@{OTHER}"
    assert snapshot_name(pin_models(config("me/tiny", "run.dir=new")).model.path) == f"me/tiny@{OTHER}"


def test_run_identity_is_independent_of_the_cache_path() -> None:
    def at(cache: str, commit: str = COMMIT) -> str:
        folder = f"{cache}/models--me--tiny/snapshots/{commit}"
        return identity(config(folder, f"algo.teacher={{path: {folder}, by_source: {{a: {folder}}}}}"))

    assert at("/one") == at("/two") != at("/one", OTHER)


def test_a_folder_of_that_name_is_no_name_of_a_hub(asked: list[str]) -> None:
    os.makedirs("me/tiny")
    assert pin_models(config("me/tiny")).model.path == Path("me/tiny")
    for name in ("tiny", "/me/tiny", "me/tiny/more", "../me", "configs/models/none"):
        assert find_folder(Path(name), "--hf") == Path(name)
    assert not asked


@pytest.mark.gate
def test_explain_reports_the_commit_of_a_hub_model(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "quickstart", "model.path=me/tiny", "run.dir=run"]) == 0
    out = capsys.readouterr().out
    assert f"me/tiny@{COMMIT} in " in out and "NOT CHECKED" not in out
    assert main(["explain", "quickstart", "model.path=me/tyni", "run.dir=run"]) == 0
    assert "NOT CHECKED: model.path = 'me/tyni': no such folder, and the download" in capsys.readouterr().out


@pytest.mark.gate
def test_a_conversion_reads_a_hub_model(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "hf-to-megatron", "--hf", "me/tiny", "--out", "made"]) == 0
    assert main(["convert", "verify", "me/tiny@v1", "made"]) == 0
    assert "bit-equal" in capsys.readouterr().out
    assert json.loads(Path("made/config.json").read_text()) == json.loads(FILES["config.json"])
