"""Checks of the secrecy and the permissions of a run's API keys."""

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
    """Check the keys of engine 0 of an active run.

    They are on no command line and in no file that other users can read, and the engine requires them.
    """
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
    assert request(url, "/model_info") == (401, None)
    assert request(url, "/model_info", secrets[0])[0] == 200
    assert request(url, "/abort_request", secrets[0], rid="none")[0] == 401, (
        "the api key opens no admin endpoint"
    )
    assert request(url, "/abort_request", secrets[1], rid="none")[0] == 200


def _engine_of(line: bytes, word: bytes) -> bool:
    return (
        b"rlsys.rollout.service" in line
        and line.split(b"\0")[line.split(b"\0").index(word) - 1] == b"--engine"
    )


def request(url: str, path: str, key: str | None = None, **body: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=30) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else None
    except urllib.error.HTTPError as e:
        return e.code, None
