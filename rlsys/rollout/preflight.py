"""Preflight: detects missing plug-ins and invalid URLs of the rollout process before anything starts."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.imports import resolve
from rlsys.data import SOURCES
from rlsys.engine.parsers import check_parsers
from rlsys.generators.generator import find_generator
from rlsys.rewards import find_reward
from rlsys.rewards.judges import find_judge
from rlsys.rewards.repairs import build_process_judge


def check_names(config: Config) -> None:
    """Check that all names and import paths exist, and that URLs are valid. Create only the process judge.

    Raises:
        UserError: a name or import path does not exist, or a URL is invalid.
    """
    resolve("data.source", config.data.source, SOURCES)
    for spec in config.data.reward:
        find_reward(spec.name)
    find_generator(config.rollout.generator)
    check_parsers(config)
    if (judge := config.data.judge) is not None:
        if "://" in judge or judge.partition(":")[2][:1].isdigit():
            _check_url("data.judge", judge)
        find_judge(judge)
    build_process_judge(config)
    if (reference := config.engine.reference) not in (None, "own"):
        _check_url("engine.reference", reference)
    if (teacher := config.algo.teacher) is not None and teacher.engine not in (None, "own"):
        _check_url("algo.teacher.engine", teacher.engine)


def _check_url(field: str, url: str) -> None:
    """Check that a value is the URL of a server, without credentials, because configs are stored.

    Raises:
        UserError: the value is no URL, or has credentials.
    """
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"{field} = {url!r}: not a URL: {e}") from None
    if parts.username is not None:
        raise UserError(
            f"{field}: the URL has a user name or a password; expected one without, because the config is stored"
        )
    if not url.startswith(("http://", "https://")) or not host or any(c.isspace() for c in url):
        raise UserError(f"{field} = {url!r}: expected a URL http://HOST:PORT or https://HOST")
