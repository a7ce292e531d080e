"""Location of a model folder's tokenizer.json: the folder, or a cache of converted tokenizers.

The tokenizer of a folder is the one that AutoTokenizer builds. It may differ from tokenizer.json, because
AutoTokenizer reads tokens from tokenizer_config.json, and some classes build another tokenizer. If AutoTokenizer
would use tokenizer.json unchanged, the folder itself is used. Otherwise a subprocess converts the tokenizer, once for
each content of its files; only the subprocess imports transformers, and with it torch. The result is stored in a
private cache; the model folder is not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlsys.core.cache import cache_folder
from rlsys.core.errors import UserError, disk_errors
from rlsys.core.imports import module_command
from rlsys.core.model_folder import TOKENIZER, side_files, vocabulary_files
from rlsys.core.process_pool import INHERITED_VARIABLES

CONFIG = "tokenizer_config.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_PROCESSOR_TEMPLATE = "chat_template.json"
_GENERIC = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Tokenizer classes that use tokenizer.json unchanged."""
_PLAIN = frozenset(
    {
        "added_tokens_decoder", "additional_special_tokens", "backend", "chat_template",
        "clean_up_tokenization_spaces", "extra_special_tokens", "is_local", "local_files_only", "model_input_names",
        "model_max_length", "name_or_path", "padding_side", "tokenizer_class", "truncation_side",
    }
)  # fmt: skip
"""Fields of tokenizer_config.json that change no token id, or that _is_self_contained checks."""
_KEYED = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
"""Suffixes of the files whose content is part of the cache key."""


def tokenizer_folder(path: Path, trust_remote_code: bool = False) -> Path:
    """Return a folder with the tokenizer.json of a model folder, and convert the tokenizer first if needed.

    Args:
        path: the model folder.
        trust_remote_code: whether the tokenizer's code in the folder may run.

    Returns:
        `path`, or a folder in the cache. Its tokenizer_config.json names the special tokens.

    Raises:
        UserError: there is no tokenizer, it needs code that may not run, or no tokenizer.json gives the same ids.
    """
    if _is_self_contained(path):
        return path
    if not vocabulary_files(path):
        raise UserError(
            f"model.path = {str(path)!r}: contains no tokenizer.json and no other vocabulary file; expected one, for "
            "example tokenizer.model, tiktoken.model or vocab.json"
        )
    with disk_errors(path, UserError):
        if empty := next((file for file in vocabulary_files(path) if not file.stat().st_size), None):
            raise UserError(f"{empty}: is empty; expected a tokenizer's vocabulary")
    code = remote_code(path)
    if code is not None and not trust_remote_code:
        if (path / TOKENIZER).is_file():  # it contains the same tokenizer, and needs no code
            return path
        raise UserError(
            f"model.path = {str(path)!r}: its tokenizer needs code from the folder, {code}; review it, and set "
            "model.trust_remote_code=true to run it"
        )
    folder = cache_folder("tokenizers") / _key(path)
    if not (folder / TOKENIZER).is_file():
        _convert(path, folder, code is not None)
    return folder


def remote_code(path: Path) -> str | None:
    """Return the tokenizer class that `auto_map` of tokenizer_config.json names; None if it names none.

    Raises:
        UserError: tokenizer_config.json is not a JSON object.
    """
    auto_map = read_config(path).get("auto_map", {}) if (path / CONFIG).is_file() else {}
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map  # a list in old folders
    classes = [name for name in (entry if isinstance(entry, list) else [entry]) if isinstance(name, str)]
    return classes[-1] if classes else None


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder.

    Raises:
        UserError: the file is missing, or is not a JSON object.
    """
    file = folder / name
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing; expected a JSON object") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{file}: not readable as JSON: {e}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(document).__name__}")
    return document


def token_text(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, which is a string or an object with the key `content`."""
    return token.get("content") if isinstance(token, dict) else token


def chat_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a folder.

    Args:
        folder: a model folder, or a folder from `tokenizer_folder`.
        config: content of its tokenizer_config.json.

    Returns:
        the template, or several by name; None if the folder has none.

    Raises:
        UserError: a template is unreadable or not a text, or none of several is named default or tool_use.
    """
    file = folder / _TEMPLATE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise UserError(f"{file}: cannot be read: {e}") from None
    template, source = config.get("chat_template"), folder / CONFIG
    processor_file = folder / _PROCESSOR_TEMPLATE
    if template is None and processor_file.is_file():
        template, source = read_config(folder, _PROCESSOR_TEMPLATE).get("chat_template"), processor_file
    if isinstance(template, list | dict) and template:
        return _named_templates(template, source)
    if not (template is None or template in ([], {}) or isinstance(template, str)):
        raise UserError(f"{source}: chat_template = {template!r:.80}: expected a text")
    return template or None


def _named_templates(value: list[Any] | dict[str, Any], source: Path) -> dict[str, str]:
    """Return the templates of a `chat_template` that contains several templates, by name.

    Raises:
        UserError: a template has no name or is not a text, or none is named default or tool_use.
    """
    try:
        templates = (
            value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
        )
    except (KeyError, TypeError):
        raise UserError(
            f"{source}: chat_template = {value!r:.80}: expected objects with name and template"
        ) from None
    if not {"default", "tool_use"} & templates.keys():
        raise UserError(
            f"{source}: chat_template has {', '.join(map(str, templates))}; expected a template named default"
        )
    for name, template in templates.items():
        if not isinstance(template, str):
            raise UserError(f"{source}: chat_template {name} = {template!r:.80}: expected a text")
    return templates


def _is_self_contained(path: Path) -> bool:
    """Return whether AutoTokenizer uses tokenizer.json unchanged.

    This is the case if tokenizer.json has all tokens that other files name, and no other file changes how
    AutoTokenizer interprets tokenizer.json.
    """
    other_files = ("special_tokens_map.json", "added_tokens.json", _TEMPLATES)
    if not all((path / name).is_file() for name in (TOKENIZER, CONFIG)):
        return False
    if any((path / name).exists() for name in other_files):
        return False
    config = read_config(path)
    is_plain = _PLAIN.issuperset(name for name in config if not name.endswith("_token"))
    if config.get("tokenizer_class") not in _GENERIC or not is_plain or config.get("extra_special_tokens"):
        return False
    try:
        added_tokens = json.loads((path / TOKENIZER).read_text(encoding="utf-8")).get("added_tokens") or ()
    except (OSError, ValueError, AttributeError):
        return True  # loading the file reports the error
    try:
        return _has_tokens(added_tokens, config)
    except (AttributeError, KeyError, TypeError):
        return False  # the conversion reports the error


def _has_tokens(added_tokens: Sequence[dict[str, Any]], config: Mapping[str, Any]) -> bool:
    """Return whether `added_tokens` of tokenizer.json contain all tokens that tokenizer_config.json names."""
    attributes = {token["content"]: {k: v for k, v in token.items() if k != "id"} for token in added_tokens}
    texts = {str(token["id"]): token["content"] for token in added_tokens}
    special_tokens = [token_text(value) for name, value in config.items() if name.endswith("_token")]
    special_tokens += [token_text(value) for value in config.get("additional_special_tokens") or ()]
    if any(text and not attributes.get(text, {}).get("special") for text in special_tokens):
        return False
    decoder = config.get("added_tokens_decoder") or {}
    return all(
        texts.get(i) == token.get("content") and token.items() <= attributes[texts[i]].items()
        for i, token in decoder.items()
    )


def files_digest(path: Path) -> str:
    """Return a digest of a folder's tokenizer files: vocabulary, configs, templates and code."""
    digest = hashlib.sha256()
    for name in side_files(path):
        if (len(name.parts) == 1 or name.parts[0] == _TEMPLATES) and name.suffix in _KEYED:
            with disk_errors(path / name, UserError):
                content = (path / name).read_bytes()
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _key(path: Path) -> str:
    """Return the cache key: a digest of the tokenizer files and of the versions of transformers and tokenizers."""
    key = f"3 {version('transformers')} {version('tokenizers')} {files_digest(path)}"
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _convert(path: Path, folder: Path, code: bool) -> None:
    """Convert the tokenizer of a model folder in a subprocess.

    Args:
        path: the model folder.
        folder: folder in the cache, which is created atomically.
        code: whether to run the tokenizer's code in the model folder.

    Raises:
        UserError: the conversion failed.
    """
    with disk_errors(folder, UserError):
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        command = module_command("rlsys.data.tokenizer_conversion", str(path.absolute()), str(partial))
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "HF_HUB_OFFLINE": "1",  # the folder may name a repository, which must not be read
            "HF_MODULES_CACHE": str(partial / "code"),
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        result = subprocess.run(
            [*command, *(["--trust-remote-code"] if code else [])],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if result.returncode:
            message = (
                result.stderr.strip().rpartition("\n")[2] or f"its process ended with {result.returncode}"
            )
            raise UserError(
                f"model.path = {str(path)!r}: its tokenizer cannot be converted to tokenizer.json: {message}"
            )
        shutil.rmtree(partial / "code", ignore_errors=True)
        with disk_errors(folder, UserError):
            try:
                partial.rename(folder)
            except OSError:
                if not (
                    folder / TOKENIZER
                ).is_file():  # another process may have created the folder meanwhile
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
