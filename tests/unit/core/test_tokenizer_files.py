"""Where a tokenizer lies: by the contents of its folder, in a private cache, and code only with consent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.core import tokenizer_files
from rlsys.core.errors import UserError
from rlsys.core.tokenizer_files import tokenizer_folder
from rlsys.data.quickstart_model import write_model
from rlsys.engine.launch_args import engine_command
from rlsys.engine.server import tokenizer_arguments

VOCABULARIES = (
    "tokenizer.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, bool]]:
    """What the process that converts was asked for: the folder, and whether its code may run."""
    asked: list[tuple[Path, bool]] = []

    def convert(path: Path, folder: Path, code: bool) -> None:
        asked.append((path, code))
        folder.mkdir()
        shutil.copy(tmp_path / "quickstart" / "tokenizer.json", folder)

    write_model(tmp_path / "quickstart")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_files, "_convert", convert)
    return asked


def with_vocabulary(folder: Path, name: str, **settings: object) -> Path:
    folder.mkdir()
    (folder / name).write_text("a vocabulary")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_folder_is_converted_once_for_each_content(
    name: str, tmp_path: Path, converted: list[tuple[Path, bool]]
) -> None:
    folder = with_vocabulary(tmp_path / "model", name)
    first = tokenizer_folder(folder)
    assert tokenizer_folder(folder) == first and converted == [(folder, False)]
    assert first.parent == tmp_path / "cache" / "rlsys" / "tokenizers"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    moved = folder.rename(tmp_path / "moved")
    assert tokenizer_folder(moved) == first  # not by its path
    (moved / "model.safetensors").write_text("weights")
    assert tokenizer_folder(moved) == first
    (moved / name).write_text("another vocabulary")
    assert tokenizer_folder(moved) != first and len(converted) == 2


def test_a_folder_with_tokenizer_json_is_its_own(tmp_path: Path, converted: list[tuple[Path, bool]]) -> None:
    folder = tmp_path / "quickstart"
    auto_map = {"AutoTokenizer": ["own.Slow", "own.Fast"]}  # some have code beside it, which nobody needs
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "eos_token": "<eos>"}))
    assert tokenizer_folder(folder) == folder and not converted
    assert tokenizer_arguments(["--model-path", str(folder)]) == []


@pytest.mark.parametrize(
    "auto_map", [{"AutoTokenizer": ["own.Ranks", None]}, {"AutoTokenizer": "own.Ranks"}, ["own.Ranks", None]]
)
def test_code_needs_consent(auto_map: object, tmp_path: Path, converted: list[tuple[Path, bool]]) -> None:
    folder = with_vocabulary(tmp_path / "model", "tiktoken.model", auto_map=auto_map)
    with pytest.raises(UserError, match=r"code in the folder, own\.Ranks; .* model\.trust_remote_code=true"):
        tokenizer_folder(folder)
    assert not converted
    made = tokenizer_folder(folder, trust_remote_code=True)
    assert converted == [(folder, True)]
    with pytest.raises(UserError, match="trust_remote_code"):  # also where it has run before
        tokenizer_folder(folder)
    argv = ["server", "--model-path", str(folder), "--trust-remote-code"]
    assert tokenizer_arguments(argv) == ["--tokenizer-path", str(made)]


def test_consent_reaches_the_engines(tmp_path: Path) -> None:
    for trust in (True, False):
        config = Config.model_validate({"model": {"path": tmp_path, "trust_remote_code": trust}})
        assert ("--trust-remote-code" in engine_command(config, 0, 3100)[0]) is trust


def test_code_without_being_named_is_not_run(tmp_path: Path, converted: list[tuple[Path, bool]]) -> None:
    """Consent is for code that the folder names: the process gets no right that it does not need."""
    folder = with_vocabulary(tmp_path / "model", "vocab.json", auto_map={"AutoModel": "own.Model"})
    tokenizer_folder(folder, trust_remote_code=True)
    assert converted == [(folder, False)]


def test_no_vocabulary_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UserError, match=r"no tokenizer\.json there, and no vocabulary in another form"):
        tokenizer_folder(tmp_path)
    assert tokenizer_arguments(["--model-path", str(tmp_path)]) == []


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path, converted: list[tuple[Path, bool]]) -> None:
    """Whoever writes there chooses what the model reads."""
    folder = with_vocabulary(tmp_path / "model", "vocab.json")
    cache = tmp_path / "cache" / "rlsys" / "tokenizers"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(UserError, match="others may write there"):
        tokenizer_folder(folder)
    assert not converted
