"""The reward `code`: runs the program of a response against tests, in a sandbox of this machine or of SandboxFusion.

The column `tests` of a row, or its answer, has the tests as JSON or as JSON text:

    [{"input": "1 2\\n", "output": "3\\n"}, ...]            standard input and output
    {"inputs": [...], "outputs": [...]}                   the same, in the format of verl and PRIME
    {"inputs": [...], "outputs": [...], "fn_name": "f"}   arguments and return values of a function
    {"functional": "assert add(1, 2) == 3"}, or a text    code that uses the program's definitions

In a sandbox of this machine, the program neither sees the expected results nor reports the verdict, because the tests
run in a separate process (isolated.py).
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.texts import load_json
from rlsys.core.types import Prompt
from rlsys.data.tokenizer import Tokenizer
from rlsys.obs.direct import opener
from rlsys.rewards.sandbox import Outcome, Sandbox, Undecidable

_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)
MAX_ANSWER_BYTES = 2**24
"""Largest size of a response of SandboxFusion, in bytes."""


class Runner(Protocol):
    """Executor of programs."""

    def run(self, program: str, stdin: str) -> Outcome:
        """Run a program with standard input `stdin`."""

    def passes(self, program: str, tests: str) -> bool:
        """Return whether code that uses the program's definitions ends without an exception."""


Test = Callable[[str, Runner], bool]
"""A test: returns whether the program with this source passes, when run by the runner."""
log = logging.getLogger("rlsys.rewards")


def code(
    config: Config,
    partial: bool = False,
    url: str | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
    key: str = "tests",
    sandbox: str = "available",
) -> Callable[[Prompt, str], float]:
    """Score 1 if the last fenced program of a response passes all tests, otherwise 0.

    rollout.reward_timeout must be larger than `seconds` times the number of tests of a row.

    Args:
        config: config of the run.
        partial: whether to score the share of tests that pass.
        url: URL of a SandboxFusion server that runs the program; None: a sandbox of this machine (sandbox.py).
        seconds: time limit of one test, in seconds.
        memory_mb: memory limit of one test, in MiB.
        key: column of the tests.
        sandbox: how to treat a machine without bubblewrap, and tests that a program can deceive. `required`: refuse;
            `available`: warn.

    Raises:
        UserError: a parameter is invalid, or the machine lacks a required protection.
    """
    tokenizer = Tokenizer.of(config)
    if seconds <= 0 or memory_mb < 32:
        raise UserError(
            f"data.reward: code: seconds = {seconds:g}, memory_mb = {memory_mb}: expected seconds > 0 and "
            "memory_mb of at least 32"
        )
    if sandbox not in ("available", "required"):
        raise UserError(f"data.reward: code: sandbox = {sandbox!r}: expected available or required")
    required = sandbox == "required"
    runner: Runner
    if url is None:
        runner = _Local(seconds, memory_mb, required)
    else:
        runner = _Fusion(url, seconds, memory_mb, required)

    def score(prompt: Prompt, text: str) -> float:
        tests = read_tests(prompt.entry[key] if key in prompt.entry else prompt.entry["answer"])
        blocks = _BLOCK.findall(tokenizer.without_special(text))
        if not blocks:
            return 0.0
        passed_tests = 0
        for test in tests:
            if test(blocks[-1], runner):
                passed_tests += 1
            elif not partial:
                return 0.0
        return passed_tests / len(tests)

    return score


def missing_protections(config: Config) -> list[str] | None:
    """Return descriptions of protections and limits that this machine lacks; None if the run executes no programs."""
    specs = [spec for spec in config.data.reward if spec.name == "code" and spec.params.get("url") is None]
    return [*Sandbox.missing(), *Sandbox.unlimited()] if specs else None


def read_tests(tests: Any) -> list[Test]:
    """Parse the tests of a row.

    Raises:
        ValueError: the value is not a list of tests.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            return [_assertion_test(tests)]
    if isinstance(tests, dict) and "functional" in tests:
        return [_assertion_test(tests["functional"])]
    if isinstance(tests, dict) and "inputs" in tests:
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        if tests.get("fn_name"):
            return [_call_test(tests["fn_name"], arguments, expected) for arguments, expected in pairs]
        tests = [{"input": i, "output": o} for i, o in pairs]
    if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):
        return [_assertion_test(t) for t in tests]
    if (
        not isinstance(tests, list)
        or not tests
        or not all(isinstance(t, dict) and "output" in t for t in tests)
    ):
        raise ValueError(
            f"tests = {str(tests)[:80]!r}: expected [{{input, output}}, ...] or code with asserts"
        )
    return [_output_test(str(t.get("input", "")), str(t["output"])) for t in tests]


def _output_test(stdin: str, expected: str) -> Test:
    """Return a test of standard input and output. Lines are compared without trailing white space."""

    def test(program: str, runner: Runner) -> bool:
        outcome = runner.run(program, stdin)
        return outcome.ok and _lines(outcome.output) == _lines(expected)

    return test


def _assertion_test(checks: str) -> Test:
    """Return a test that runs code with assertions about the program's definitions."""
    return lambda program, runner: runner.passes(program, checks)


def _call_test(name: str, arguments: Any, expected: Any) -> Test:
    """Return a test of the return value of a function, or of a method of Solution (LeetCode's format).

    Args:
        name: name of the function.
        arguments: list of arguments, or a single argument.
        expected: the return value, which may be in a list.

    Raises:
        ValueError: the name is not an identifier.
    """
    if not name.isidentifier():
        raise ValueError(f"fn_name = {name[:80]!r}: expected the name of a function")
    values = json.dumps([arguments if isinstance(arguments, list) else [arguments], expected])
    return _assertion_test(
        f"import json as _json\n_args, _wanted = _json.loads({values!r})\n"
        f"try:\n    _f = Solution().{name}\nexcept NameError:\n    _f = {name}\n"
        "_found = _json.loads(_json.dumps(_f(*_args)))\n"
        "assert _found == _wanted or [_found] == _wanted\n"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class _Local:
    """Runner in a sandbox of this machine.

    Args:
        seconds: time limit of one test, in seconds.
        memory_mb: memory limit of one test, in MiB.
        required: whether to refuse a machine without protections, and tests that a program can deceive.

    Raises:
        UserError: the machine lacks a required protection.
    """

    def __init__(self, seconds: float, memory_mb: int, required: bool) -> None:
        self._sandbox, self._required = Sandbox(seconds, memory_mb), required
        self.run = self._sandbox.run
        self._warned = False
        if missing := self._sandbox.missing():
            warning = f"data.reward: code: the sandbox of this machine does not protect: {'; '.join(missing)}"
            if required:
                raise UserError(f"{warning}; expected these protections, because sandbox = required")
            log.warning("%s", warning)
        if unlimited := self._sandbox.unlimited():
            log.warning(
                "data.reward: code: the sandbox of this machine does not limit %s", "; ".join(unlimited)
            )

    def passes(self, program: str, tests: str) -> bool:
        try:
            return self._sandbox.passes(program, tests)
        except Undecidable as e:
            if self._required:
                raise ValueError(
                    f"{e}; such tests must run in the program's process, which sandbox = required does not allow"
                ) from None
            if not self._warned:
                self._warned = True
                log.warning(
                    "data.reward: code: %s; such tests run in the program's process, which can deceive them",
                    e,
                )
            return self._sandbox.passes_in_its_process(program, tests)


class _Fusion:
    """Runner on a SandboxFusion server. Its methods raise RuntimeError if the server returns no result."""

    def __init__(self, url: str, seconds: float, memory_mb: int, required: bool) -> None:
        self._url = url if url.rstrip("/").endswith("run_code") else url.rstrip("/") + "/run_code"
        self._seconds, self._memory_mb, self._required = seconds, memory_mb, required

    def passes(self, program: str, tests: str) -> bool:
        """Return whether the tests reach their end. An early exit of the program does not pass.

        Raises:
            ValueError: sandbox = required does not allow tests in the program's process.
        """
        if self._required:
            raise ValueError(
                f"url = {self._url}: SandboxFusion runs tests in the program's process, which sandbox = required "
                "does not allow; expected tests of standard input and output"
            )
        token = secrets.token_hex(16)
        outcome = self.run(f"{program}\n\n{tests}\n\nprint()\nprint({token!r})\n", "")
        return outcome.ok and _lines(outcome.output)[-1:] == [token]

    def run(self, program: str, stdin: str) -> Outcome:
        body = {
            "code": program, "language": "python", "stdin": stdin, "compile_timeout": self._seconds,
            "run_timeout": self._seconds, "memory_limit_MB": self._memory_mb,
        }  # fmt: skip
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with opener.open(request, timeout=self._seconds * 2 + 10) as response:
                answer = load_json(response.read(MAX_ANSWER_BYTES))
            result = answer.get("run_result") or {}
            if answer["status"] == "SandboxError":
                raise RuntimeError(f"{self._url}: SandboxFusion reports an error: {answer.get('message')}")
            ok = answer["status"] == "Success" and result.get("return_code") == 0
            return Outcome(ok, result.get("stdout") or "")
        except (urllib.error.URLError, TimeoutError, ValueError, KeyError, AttributeError) as e:
            raise RuntimeError(f"{self._url}: no result of SandboxFusion: {type(e).__name__}: {e}") from None
