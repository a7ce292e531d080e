"""A process that scores: `python -m rlsys.rewards.worker`, started and spoken to by rlsys.rewards.workers only.

The first message is the config, every other one a prompt and a response. Ends with its standard input, and with the
process that started it even while a reward function hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from typing import Any, BinaryIO

from rlsys.config import Config
from rlsys.plugins import place
from rlsys.rewards import make_scores
from rlsys.rewards.signatures import is_async
from rlsys.rewards.workers import LENGTH

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a reward function that reads gets nothing
    os.dup2(2, 1)  # what it prints goes to the log, not among the answers
    config = Config.model_validate_json(read(questions) or b"")
    limit = round(config.data.reward_memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    scores = [score for score in make_scores(config) if not is_async(score)]
    write(answers, {"value": None})
    while message := read(questions):
        prompt, response_text = pickle.loads(message)
        try:
            write(answers, {"value": [score(prompt, response_text) for score in scores]})
        except Exception as e:  # noqa: BLE001  (user code: whatever it raises is its verdict)
            write(answers, {"error": f"{type(e).__name__}: {e}{place(e)}"})


def read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def write(stream: BinaryIO, answer: dict[str, Any]) -> None:
    """Numbers of numpy and the like are answers too. Raises TypeError for what is no number."""
    data = json.dumps(answer, default=float).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
