"""Where the tokenizer.json of a model folder lies: in the folder, or in a cache of converted tokenizers.

A folder's tokenizer is what AutoTokenizer reads of it: AutoTokenizer takes tokens from tokenizer_config.json, and for
some classes it builds another tokenizer than tokenizer.json has. A folder is converted once for each content of its
tokenizer files, by a process of its own: only it imports transformers, and with it torch. The cache is private, and
nothing is written into the model's folder. A folder whose files say nothing beside tokenizer.json is used as it is.
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
from rlsys.core.model_folder import TOKENIZER, side_files, vocabulary_files
from rlsys.core.workers import KEPT_VARIABLES

CONFIG = "tokenizer_config.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_OF_PROCESSORS = "chat_template.json"
_GENERIC = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that are what tokenizer.json says."""
_PLAIN = frozenset(
    {
        "added_tokens_decoder", "additional_special_tokens", "backend", "chat_template",
        "clean_up_tokenization_spaces", "extra_special_tokens", "is_local", "local_files_only", "model_input_names",
        "model_max_length", "name_or_path", "padding_side", "tokenizer_class", "truncation_side",
    }
)  # fmt: skip
"""Fields of tokenizer_config.json that change no id of a text, beside those that _is_whole looks at."""
_KEYED = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
"""Files by which a converted tokenizer is known."""


def tokenizer_folder(path: Path, trust_remote_code: bool = False) -> Path:
    """The folder with `path`'s tokenizer.json: `path`, or that of its conversion, which also has the special tokens'
    names in tokenizer_config.json. Converts what was not converted before.

    Raises UserError, one line, when there is no tokenizer, when reading it needs the folder's own code and
    `trust_remote_code` is false, and when no tokenizer.json gives the same ids.
    """
    if _is_whole(path):
        return path
    if not vocabulary_files(path):
        raise UserError(
            f"model.path = {str(path)!r}: no tokenizer.json there, and no vocabulary in another form "
            "(tokenizer.model, tiktoken.model, vocab.json)"
        )
    with disk_errors(path, UserError):
        if empty := next((file for file in vocabulary_files(path) if not file.stat().st_size), None):
            raise UserError(f"{empty}: is empty; expected a tokenizer's vocabulary")
    code = remote_code(path)
    if code is not None and not trust_remote_code:
        if (path / TOKENIZER).is_file():  # what the code would read, in the form that needs none
            return path
        raise UserError(
            f"model.path = {str(path)!r}: its tokenizer is code in the folder, {code}; read that code, and set "
            "model.trust_remote_code=true to let it run"
        )
    folder = cache_folder("tokenizers") / _key(path)
    if not (folder / TOKENIZER).is_file():
        _convert(path, folder, code is not None)
    return folder


def remote_code(path: Path) -> str | None:
    """The class that tokenizer_config.json names for AutoTokenizer; None where there is none. Raises UserError."""
    named = read_config(path).get("auto_map", {}) if (path / CONFIG).is_file() else {}
    found = named.get("AutoTokenizer") if isinstance(named, dict) else named  # a list in old folders
    classes = [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]
    return classes[-1] if classes else None


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """tokenizer_config.json, or another file of JSON. Raises UserError."""
    file = folder / name
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: missing") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{file}: not readable as JSON: {e}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


def token_text(token: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object with its text under `content`."""
    return token.get("content") if isinstance(token, dict) else token


def chat_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by their names, of a folder from `tokenizer_folder`."""
    file = folder / _TEMPLATE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise UserError(f"{file}: cannot be read: {e}") from None
    template, where = config.get("chat_template"), folder / CONFIG
    if template is None and (folder / _OF_PROCESSORS).is_file():
        template, where = read_config(folder, _OF_PROCESSORS).get("chat_template"), folder / _OF_PROCESSORS
    if isinstance(template, list) and template:
        try:
            named = {one["name"]: one["template"] for one in template}
        except (KeyError, TypeError):
            raise UserError(f"{where}: chat_template: expected objects with name and template") from None
        if not {"default", "tool_use"} & named.keys():
            raise UserError(
                f"{where}: chat_template has {', '.join(map(str, named))}; expected one with the name default"
            )
        for one in named.values():
            if not isinstance(one, str):
                raise UserError(f"{where}: chat_template = {one!r:.80}: expected a text")
        return named
    if not (template is None or template == [] or isinstance(template, str)):
        raise UserError(f"{where}: chat_template = {template!r:.80}: expected a text")
    return template or None


def _is_whole(path: Path) -> bool:
    """Whether AutoTokenizer reads tokenizer.json as it is: it has all tokens that other files name, and no other file
    says how to read it."""
    others = ("special_tokens_map.json", "added_tokens.json", _TEMPLATES)
    if not all((path / name).is_file() for name in (TOKENIZER, CONFIG)) or any(
        (path / o).exists() for o in others
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
        made = json.loads((path / TOKENIZER).read_text(encoding="utf-8")).get("added_tokens") or ()
    except (OSError, ValueError, AttributeError):
        return True  # whoever loads it names the file
    known = {token["content"]: {k: v for k, v in token.items() if k != "id"} for token in made}
    ids = {str(token["id"]): token["content"] for token in made}
    named = [token_text(value) for name, value in config.items() if name.endswith("_token")]
    named += [token_text(value) for value in config.get("additional_special_tokens") or ()]
    if any(t and not known.get(t, {}).get("special") for t in named):
        return False
    added = config.get("added_tokens_decoder") or {}
    return all(
        ids.get(i) == t.get("content") and t.items() <= known[ids[i]].items() for i, t in added.items()
    )


def files_digest(path: Path) -> str:
    """The same for the same files of a tokenizer: vocabulary, configs, templates, code."""
    digest = hashlib.sha256()
    for name in side_files(path):
        if (len(name.parts) == 1 or name.parts[0] == _TEMPLATES) and name.suffix in _KEYED:
            with disk_errors(path / name, UserError):
                content = (path / name).read_bytes()
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _key(path: Path) -> str:
    """The same for the same files, read by the same transformers."""
    key = f"3 {version('transformers')} {version('tokenizers')} {files_digest(path)}"
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _convert(path: Path, folder: Path, code: bool) -> None:
    """Write `folder`, whole or not at all."""
    with disk_errors(folder, UserError):
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        command = [
            sys.executable,
            "-m",
            "rlsys.data.tokenizer_conversion",
            str(path.absolute()),
            str(partial),
        ]
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "HF_HUB_OFFLINE": "1",  # a folder is read, and never what it may name elsewhere
            "HF_MODULES_CACHE": str(partial / "code"),
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        done = subprocess.run(
            [*command, *(["--trust-remote-code"] if code else [])],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode:
            said = done.stderr.strip().rpartition("\n")[2] or f"its process ended with {done.returncode}"
            raise UserError(
                f"model.path = {str(path)!r}: no tokenizer.json can be made of its tokenizer: {said}"
            )
        shutil.rmtree(partial / "code", ignore_errors=True)
        with disk_errors(folder, UserError):
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / TOKENIZER).is_file():  # else another process was quicker
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
