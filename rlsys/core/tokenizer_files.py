"""Where the tokenizer.json of a model folder lies: in the folder, or in a cache of converted tokenizers.

Folders without tokenizer.json (tiktoken.model, tokenizer.model, vocab.json with merges.txt) are converted once for
each content of their tokenizer files, by a process of its own: only it imports transformers, and with it torch. The
cache is private, and nothing is written into the model's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rlsys.core.cache import cache_folder
from rlsys.core.errors import UserError, disk_errors
from rlsys.core.model_folder import TOKENIZER, side_files, vocabulary_files
from rlsys.core.workers import KEPT_VARIABLES

CONFIG = "tokenizer_config.json"
_KEYED = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
"""Files by which a converted tokenizer is known."""


def tokenizer_folder(path: Path, trust_remote_code: bool = False) -> Path:
    """The folder with `path`'s tokenizer.json: `path`, or that of its conversion, which also has the special tokens'
    names in tokenizer_config.json. Converts what was not converted before.

    Raises UserError, one line, when there is no tokenizer, when reading it needs the folder's own code and
    `trust_remote_code` is false, and when no tokenizer.json gives the same ids.
    """
    if (path / TOKENIZER).is_file():
        return path
    if not vocabulary_files(path):
        raise UserError(
            f"model.path = {str(path)!r}: no tokenizer.json there, and no vocabulary in another form "
            "(tokenizer.model, tiktoken.model, vocab.json)"
        )
    code = remote_code(path)
    if code is not None and not trust_remote_code:
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
    file = path / CONFIG
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("auto_map", {}) if file.is_file() else {}
        found = named.get("AutoTokenizer") if isinstance(named, dict) else named  # a list in old folders
    except (OSError, ValueError, AttributeError) as e:
        raise UserError(f"{file}: not readable as JSON: {e}") from None
    classes = [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]
    return classes[-1] if classes else None


def files_digest(path: Path) -> str:
    """The same for the same files of a tokenizer: vocabulary, configs, templates, code."""
    digest = hashlib.sha256()
    for name in side_files(path):
        if len(name.parts) == 1 and name.suffix in _KEYED:
            with disk_errors(path / name, UserError):
                content = (path / name).read_bytes()
            digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _key(path: Path) -> str:
    """The same for the same files, read by the same transformers."""
    key = f"2 {version('transformers')} {version('tokenizers')} {files_digest(path)}"
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
