"""Who can read the keys of a run, and what they open."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from rlsys.core.identity import config_path


def check_secrets(run_dir: Path, processes: list[psutil.Process]) -> None:
    """The keys of engine 0 of a run that goes on: on no command line, in no file that others read, and needed."""
    keys = json.loads(config_path(run_dir, "engine-0").read_text())
    secrets = (keys["api-key"], keys["admin-api-key"])
    lines = [(Path("/proc") / str(p.pid) / "cmdline").read_bytes() for p in processes if p.is_running()]
    assert any(b"rlsys.engine.server" in line for line in lines)
    assert not any(secret.encode() in line for secret in secrets for line in lines)
    for file in (f for f in run_dir.rglob("*") if f.is_file()):
        is_config = file == config_path(run_dir, "engine-0")
        assert is_config or not any(secret.encode() in file.read_bytes() for secret in secrets), file
        assert not is_config or stat.S_IMODE(file.stat().st_mode) == 0o600
    (url,) = {word.decode() for line in lines for word in line.split(b"\0") if _engine_of(line, word)}
    assert ask(url, "/model_info") == (401, None)
    assert ask(url, "/model_info", secrets[0])[0] == 200
    assert ask(url, "/abort_request", secrets[0], rid="none")[0] == 401, "the api key opens no admin endpoint"
    assert ask(url, "/abort_request", secrets[1], rid="none")[0] == 200


def _engine_of(line: bytes, word: bytes) -> bool:
    return (
        b"rlsys.rollout.service" in line
        and line.split(b"\0")[line.split(b"\0").index(word) - 1] == b"--engine"
    )


def ask(url: str, path: str, key: str | None = None, **body: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=30) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else None
    except urllib.error.HTTPError as e:
        return e.code, None
