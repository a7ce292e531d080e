"""Where a tokenizer lies: by the contents of its folder, in a private cache, and code only with consent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core import tokenizer_files
from rlsys.core.errors import RowError, UserError
from rlsys.core.tokenizer_files import CONFIG, tokenizer_folder
from rlsys.data import Tokenizer
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
    requests: list[tuple[Path, bool]] = []

    def convert(path: Path, folder: Path, code: bool) -> None:
        requests.append((path, code))
        folder.mkdir()
        shutil.copy(tmp_path / "quickstart" / "tokenizer.json", folder)

    write_model(tmp_path / "quickstart")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_files, "_convert", convert)
    return requests


def with_vocabulary(folder: Path, name: str, **settings: object) -> Path:
    folder.mkdir()
    (folder / name).write_text("a vocabulary")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_folder_is_converted_once_per_content(
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
    with pytest.raises(
        UserError, match=r"code from the folder, own\.Ranks; .* model\.trust_remote_code=true"
    ):
        tokenizer_folder(folder)
    assert not converted
    converted_folder = tokenizer_folder(folder, trust_remote_code=True)
    assert converted == [(folder, True)]
    with pytest.raises(UserError, match="trust_remote_code"):  # also where it has run before
        tokenizer_folder(folder)
    argv = ["server", "--model-path", str(folder), "--trust-remote-code"]
    assert tokenizer_arguments(argv) == ["--tokenizer-path", str(converted_folder)]


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
    with pytest.raises(UserError, match=r"contains no tokenizer\.json and no other vocabulary file"):
        tokenizer_folder(tmp_path)
    assert tokenizer_arguments(["--model-path", str(tmp_path)]) == []


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path, converted: list[tuple[Path, bool]]) -> None:
    """Whoever writes there chooses what the model reads."""
    folder = with_vocabulary(tmp_path / "model", "vocab.json")
    cache = tmp_path / "cache" / "rlsys" / "tokenizers"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(UserError, match="writable by other users"):
        tokenizer_folder(folder)
    assert not converted


# Published folders with less in tokenizer_config.json, or with more forms of a chat template


def quickstart(folder: Path, **changes: Any) -> Path:
    """The quickstart's model without its chat template file; `changes` of tokenizer_config.json, None: left out."""
    write_model(folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    tokenizer_config = {**json.loads((folder / CONFIG).read_text()), "chat_template": template, **changes}
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in tokenizer_config.items() if v is not None}))
    return folder


@pytest.mark.parametrize("eos", ["<eos>", {"content": "<eos>"}])
def test_eos_is_read_from_special_tokens_map(eos: Any, tmp_path: Path) -> None:
    """Where AutoTokenizer looks, too."""
    quickstart(tmp_path, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<eos>", 2)


def test_eos_may_be_defined_only_by_an_id_in_config_json(tmp_path: Path) -> None:
    tokenizer = Tokenizer(quickstart(tmp_path, eos_token=None))
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<eos>", 2)


def test_a_folder_without_any_eos_is_one_line(tmp_path: Path) -> None:
    quickstart(tmp_path, eos_token=None)
    for name in ("config.json", "generation_config.json"):
        raw_config = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({k: v for k, v in raw_config.items() if k != "eos_token_id"}))
    with pytest.raises(UserError, match="eos_token"):
        Tokenizer(tmp_path)


def test_a_chat_template_is_read_from_chat_template_json(tmp_path: Path) -> None:
    template = json.loads((quickstart(tmp_path) / CONFIG).read_text())["chat_template"]
    expected = Tokenizer(tmp_path).apply_chat([{"role": "user", "content": "1+1"}])
    quickstart(tmp_path, chat_template=None)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert Tokenizer(tmp_path).apply_chat([{"role": "user", "content": "1+1"}]) == expected


@pytest.mark.parametrize("file", [CONFIG, "chat_template.json"])
def test_chat_templates_may_be_an_object_of_their_names(file: str, tmp_path: Path) -> None:
    template = json.loads((quickstart(tmp_path) / CONFIG).read_text())["chat_template"]
    expected = Tokenizer(tmp_path).apply_chat([{"role": "user", "content": "1+1"}])
    templates = {"default": template, "rag": "x"}
    quickstart(tmp_path, chat_template=templates if file == CONFIG else None)
    if file != CONFIG:
        (tmp_path / file).write_text(json.dumps({"chat_template": templates}))
    try:
        result = Tokenizer(tmp_path).apply_chat([{"role": "user", "content": "1+1"}])
    except UserError as refusal:
        result = str(refusal)
    assert result == expected


@pytest.mark.parametrize(
    "odd",
    [{"eos_token": ["<eos>"]}, {"added_tokens_decoder": ["<eos>"]}, {"added_tokens_decoder": {"2": "<eos>"}}],
    ids=str,
)
def test_invalid_token_fields_fall_back_to_the_conversion(
    odd: dict[str, Any], tmp_path: Path, converted: list[tuple[Path, bool]]
) -> None:
    folder = quickstart(tmp_path / "odd", **odd)
    try:
        tokenizer_files.tokenizer_folder(folder)
    except (AttributeError, KeyError, TypeError) as e:
        pytest.fail(f"{e!r}")
    assert converted == [(folder, False)]


@pytest.mark.parametrize(
    "template",
    [
        5, {"default": 5}, ["x"], [{"name": "default"}], [{"name": "default", "template": 5}],
        [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "x"}],
    ],
)  # fmt: skip
def test_a_chat_template_that_is_none_is_one_line(template: Any, tmp_path: Path) -> None:
    """Several without a default one: their names are told."""
    raised: BaseException | None = None
    try:
        Tokenizer(quickstart(tmp_path, chat_template=template)).apply_chat(
            [{"role": "user", "content": "1+1"}]
        )
    except (UserError, AttributeError, KeyError, TypeError) as e:
        raised = e
    assert isinstance(raised, UserError) and "chat_template" in str(raised), repr(raised)
    assert "rag" not in str(template) or "rag, tool_use" in str(raised), raised


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"{{ " + b"(" * 3000 + b"1" + b")" * 3000 + b" }}"),
        ("tokenizer_config.json", b"[" * 100_000), ("generation_config.json", b"[" * 100_000),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_tokenizer_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    quickstart(tmp_path)
    (tmp_path / name).write_bytes(content)
    raised: BaseException | None = None
    try:
        tokenizer = Tokenizer(tmp_path)
        tokenizer.apply_chat([{"role": "user", "content": "1+1"}])
        tokenizer.stop_ids  # noqa: B018
    except (UserError, UnicodeDecodeError, RecursionError) as e:
        raised = e
    assert isinstance(raised, UserError) and name.partition(".")[0].replace("_", " ") in str(raised).replace(
        "_", " "
    )


def test_a_template_that_writes_too_much_refuses_the_messages(tmp_path: Path) -> None:
    raised: BaseException | None = None
    try:
        Tokenizer(quickstart(tmp_path, chat_template="{{ 'a' * 10**17 }}")).apply_chat([])
    except (RowError, MemoryError) as e:
        raised = e
    assert isinstance(raised, RowError), repr(raised)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_an_empty_vocabulary_is_not_converted(
    name: str, tmp_path: Path, converted: list[tuple[Path, bool]]
) -> None:
    """A download that was cut off; AutoTokenizer makes a tokenizer of it that reads nothing."""
    folder = with_vocabulary(tmp_path / "model", name, eos_token="<eos>")
    (folder / name).write_bytes(b"")
    raised: UserError | None = None
    try:
        tokenizer_folder(folder)
    except UserError as e:
        raised = e
    assert raised is not None and name in str(raised) and not converted, raised
