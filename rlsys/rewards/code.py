"""The reward `code`: runs the program of a response against tests, in a sandbox of this machine or of SandboxFusion.

Tests stand in the row, as `tests` or as its right answer (then perhaps a text that is JSON):

    [{"input": "1 2\\n", "output": "3\\n"}, ...]          standard input and output
    {"inputs": [...], "outputs": [...]}                  the same, as verl's and PRIME's rows have it
    {"functional": "assert add(1, 2) == 3"}, or a text   code that is run after the program
"""

from __future__ import annotations

import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.data.tokenizer import Tokenizer
from rlsys.obs.direct import opener
from rlsys.rewards.sandbox import Outcome, run_program

_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)
LARGEST_ANSWER = 2**24
"""Bytes, of SandboxFusion."""
Run = Callable[[str, str], Outcome]
"""(program, standard input) -> what came of it."""


def code(
    config: Config,
    partial: bool = False,
    url: str | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
    key: str = "tests",
) -> Callable[[Prompt, str], float]:
    """1 when the last fenced program of a response passes all tests, else 0; `partial`: the share that it passes.

    `url`: a SandboxFusion server that runs it; unset: a sandbox of this machine (sandbox.py says what that keeps
    away, and from what it does not protect). `seconds` and `memory_mb`: of one test. rollout.reward_timeout has to be
    more than `seconds` times the tests of a row.
    """
    tokenizer = Tokenizer.of(config)
    if seconds <= 0 or memory_mb < 32:
        raise UserError(
            f"data.reward: code: seconds = {seconds:g}, memory_mb = {memory_mb}: expected > 0, and at least 32"
        )

    def run(program: str, said: str) -> Outcome:
        if url is not None:
            return _fusion(url, program, said, seconds, memory_mb)
        return run_program(program, said, seconds=seconds, memory_mb=memory_mb)

    def score(prompt: Prompt, text: str) -> float:
        tests = read_tests(prompt.entry[key] if key in prompt.entry else prompt.entry["answer"])
        blocks = _BLOCK.findall(tokenizer.without_special(text))
        if not blocks:
            return 0.0
        passed = 0
        for test in tests:
            if test(blocks[-1], run):
                passed += 1
            elif not partial:
                return 0.0
        return passed / len(tests)

    return score


def read_tests(tests: Any) -> list[Callable[[str, Run], bool]]:
    """Raises ValueError for what is no list of tests."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            return [_asserts(tests)]
    if isinstance(tests, dict) and "functional" in tests:
        return [_asserts(tests["functional"])]
    if isinstance(tests, dict) and "inputs" in tests:
        if tests.get("fn_name"):
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            return [_call(tests["fn_name"], given, wanted) for given, wanted in pairs]
        tests = [{"input": i, "output": o} for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):
        return [_asserts(t) for t in tests]
    if (
        not isinstance(tests, list)
        or not tests
        or not all(isinstance(t, dict) and "output" in t for t in tests)
    ):
        raise ValueError(
            f"tests are {str(tests)[:80]!r}; expected [{{input, output}}, ...] or code with asserts"
        )
    return [_dialogue(str(t.get("input", "")), str(t["output"])) for t in tests]


def _dialogue(said: str, wanted: str) -> Callable[[str, Run], bool]:
    """Lines are compared without blanks at their ends."""

    def test(program: str, run: Run) -> bool:
        found = run(program, said)
        return found.ok and _lines(found.output) == _lines(wanted)

    return test


def _asserts(checks: str) -> Callable[[str, Run], bool]:
    return lambda program, run: _reaches_end(f"{program}\n\n{checks}\n", run)


def _call(name: str, given: Any, wanted: Any) -> Callable[[str, Run], bool]:
    """LeetCode's form: a function, or a method of Solution."""
    values = json.dumps([given if isinstance(given, list) else [given], wanted])
    checks = (
        f"import json as _json\n_args, _wanted = _json.loads({values!r})\n"
        f"_f = getattr(Solution(), {name!r}) if 'Solution' in globals() else {name}\n"
        "_found = _json.loads(_json.dumps(_f(*_args)))\n"
        "assert _found == _wanted or [_found] == _wanted\n"
    )
    return _asserts(checks)


def _reaches_end(program: str, run: Run) -> bool:
    """Of code with asserts. An early exit of the program is no pass: the last line has to be reached, which prints
    what the program cannot know."""
    done = secrets.token_hex(16)
    found = run(f"{program}\nprint()\nprint({done!r})\n", "")
    return found.ok and _lines(found.output)[-1:] == [done]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _fusion(url: str, program: str, said: str, seconds: float, memory_mb: int) -> Outcome:
    """One run by SandboxFusion. Raises RuntimeError when the server gives no result: no fault of the program."""
    body = {
        "code": program, "language": "python", "stdin": said, "compile_timeout": seconds, "run_timeout": seconds,
        "memory_limit_MB": memory_mb,
    }  # fmt: skip
    address = url if url.rstrip("/").endswith("run_code") else url.rstrip("/") + "/run_code"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=seconds * 2 + 10) as answer:
            found = json.loads(answer.read(LARGEST_ANSWER))
        result = found.get("run_result") or {}
        if found["status"] == "SandboxError":
            raise RuntimeError(f"{address}: {found.get('message')}")
        return Outcome(
            found["status"] == "Success" and result.get("return_code") == 0, result.get("stdout") or ""
        )
    except (urllib.error.URLError, TimeoutError, ValueError, KeyError, AttributeError) as e:
        raise RuntimeError(f"{address}: no answer of SandboxFusion: {type(e).__name__}: {e}") from None
