"""Location of a model folder's tokenizer.json: in the folder, or in a cache of converted tokenizers.

A folder's tokenizer is what AutoTokenizer reads: AutoTokenizer takes tokens from tokenizer_config.json, and
for some classes it builds another tokenizer than the one in tokenizer.json. A folder is converted once for
each content of its tokenizer files, in a subprocess: only it imports transformers, and with it torch. The
cache is private, and nothing is written into the model folder. A folder is used without conversion if AutoTokenizer
would use its tokenizer.json unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
"""Fields of tokenizer_config.json that change no token id, besides those that _is_self_contained checks."""
_KEYED = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
"""Suffixes of the files whose content identifies a converted tokenizer."""


def tokenizer_folder(path: Path, trust_remote_code: bool = False) -> Path:
    """Return a folder with tokenizer.json for model folder `path`; convert the tokenizer first if needed.

    That is `path` itself or a converted copy. Its tokenizer_config.json names the special tokens.

    Args:
        path: the model folder.
        trust_remote_code: whether the tokenizer's own code may run.

    Raises:
        UserError: there is no tokenizer, it needs the folder's own code without permission, or no
            tokenizer.json gives the same ids.
    """
    if _is_self_contained(path):
        return path
    if not vocabulary_files(path):
        raise UserError(
            f"model.path = {str(path)!r}: contains no tokenizer.json and no other vocabulary file "
            "(tokenizer.model, tiktoken.model, vocab.json)"
        )
    with disk_errors(path, UserError):
        if empty := next((file for file in vocabulary_files(path) if not file.stat().st_size), None):
            raise UserError(f"{empty}: is empty; expected a tokenizer's vocabulary")
    code = remote_code(path)
    if code is not None and not trust_remote_code:
        if (path / TOKENIZER).is_file():  # the same tokenizer, in a format that needs no code
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
    """Return the tokenizer class that `auto_map` of tokenizer_config.json names; None without one.

    Raises:
        UserError: the file is not readable as JSON.
    """
    auto_map = read_config(path).get("auto_map", {}) if (path / CONFIG).is_file() else {}
    entry = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map  # a list in old folders
    classes = [name for name in (entry if isinstance(entry, list) else [entry]) if isinstance(name, str)]
    return classes[-1] if classes else None


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or of another JSON file of the folder.

    Raises:
        UserError: the file is missing, or is not a JSON object.
    """
    file = folder / name
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{file}: not readable as JSON: {e}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(document).__name__}")
    return document


def token_text(token: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json: a string, or an object with the text under `content`."""
    return token.get("content") if isinstance(token, dict) else token


def chat_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name, of a folder from `tokenizer_folder`.

    Raises:
        UserError: a template is unreadable or not a text, or none is called default or tool_use.
    """
    file = folder / _TEMPLATE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise UserError(f"{file}: cannot be read: {e}") from None
    template, source = config.get("chat_template"), folder / CONFIG
    if template is None and (folder / _PROCESSOR_TEMPLATE).is_file():
        template, source = (
            read_config(folder, _PROCESSOR_TEMPLATE).get("chat_template"),
            folder / _PROCESSOR_TEMPLATE,
        )
    if isinstance(template, list | dict) and template:
        try:
            templates = (
                template
                if isinstance(template, dict)
                else {entry["name"]: entry["template"] for entry in template}
            )
        except (KeyError, TypeError):
            raise UserError(f"{source}: chat_template: expected objects with name and template") from None
        if not {"default", "tool_use"} & templates.keys():
            raise UserError(
                f"{source}: chat_template has {', '.join(map(str, templates))}; expected a template named default"
            )
        for entry in templates.values():
            if not isinstance(entry, str):
                raise UserError(f"{source}: chat_template = {entry!r:.80}: expected a text")
        return templates
    if not (template is None or template in ([], {}) or isinstance(template, str)):
        raise UserError(f"{source}: chat_template = {template!r:.80}: expected a text")
    return template or None


def _is_self_contained(path: Path) -> bool:
    """Return whether AutoTokenizer uses tokenizer.json unchanged.

    It does if the file has all tokens that other files name, and no other file changes how it is read.
    """
    other_files = ("special_tokens_map.json", "added_tokens.json", _TEMPLATES)
    if not all((path / name).is_file() for name in (TOKENIZER, CONFIG)) or any(
        (path / o).exists() for o in other_files
    ):
        return False
    config = read_config(path)
    if config.get("tokenizer_class") not in _GENERIC or not _PLAIN.issuperset(
        name for name in config if not name.endswith("_token")
    ):
        return False
    if config.get("extra_special_tokens"):
        return False
    try:
        added_tokens = json.loads((path / TOKENIZER).read_text(encoding="utf-8")).get("added_tokens") or ()
    except (OSError, ValueError, AttributeError):
        return True  # loading it reports the error
    try:
        attributes = {
            token["content"]: {k: v for k, v in token.items() if k != "id"} for token in added_tokens
        }
        ids = {str(token["id"]): token["content"] for token in added_tokens}
        special_tokens = [token_text(value) for name, value in config.items() if name.endswith("_token")]
        special_tokens += [token_text(value) for value in config.get("additional_special_tokens") or ()]
        if any(t and not attributes.get(t, {}).get("special") for t in special_tokens):
            return False
        added = config.get("added_tokens_decoder") or {}
        return all(
            ids.get(i) == t.get("content") and t.items() <= attributes[ids[i]].items()
            for i, t in added.items()
        )
    except (AttributeError, KeyError, TypeError):
        return False  # converting it reports the error


def files_digest(path: Path) -> str:
    """Return a digest of the files of a tokenizer: vocabulary, configs, templates, code."""
    digest = hashlib.sha256()
    for name in side_files(path):
        if (len(name.parts) == 1 or name.parts[0] == _TEMPLATES) and name.suffix in _KEYED:
            with disk_errors(path / name, UserError):
                content = (path / name).read_bytes()
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _key(path: Path) -> str:
    """Return the cache key: a digest of the files and of the versions of transformers and tokenizers."""
    key = f"3 {version('transformers')} {version('tokenizers')} {files_digest(path)}"
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _convert(path: Path, folder: Path, code: bool) -> None:
    """Write the converted tokenizer of `path` to `folder`, atomically. `code`: run the tokenizer's own code."""
    with disk_errors(folder, UserError):
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        command = module_command("rlsys.data.tokenizer_conversion", str(path.absolute()), str(partial))
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "HF_HUB_OFFLINE": "1",  # read the folder only, never a repository that it names
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
                if not (folder / TOKENIZER).is_file():  # otherwise another process was faster
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
