"""The built-in rewards: answers in mathematics, shapes of a response, programs in a sandbox."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.data import Tokenizer
from rlsys.data.quickstart_model import write_model
from rlsys.rewards import make_score
from rlsys.rewards.code import read_tests
from tests.helpers.responses import response_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def score(model: Path, name: str, text: str, entry: dict[str, Any] | None = None, **params: Any) -> float:
    reward = {"name": name, "params": params}
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": reward}})
    response = response_of(text, Tokenizer(model))
    return float(make_score(config)(Prompt(0, "", [], entry or {}), response))


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("0.5", r"so \boxed{1/2}<eos>", 1),
        (r"\frac{1}{2}", "<answer>0.5</answer><eos>", 1),
        (r"$\boxed{\frac{3}{4}}$", r"\boxed{0.75}<eos>", 1),
        ("Ann has 3 + 4 = 7.\n#### 7", "Answer: 7<eos>", 1),
        ("1,000", r"\boxed{1000}<eos>", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}<eos>", 1),
        ("(1, 2)", r"\boxed{(1,2)}<eos>", 1),
        (7, r"\boxed{7}<eos>", 1),
        ("7", r"\boxed{8}<eos>", 0),
        ("7", "it is 7<eos>", 0),  # it never says that this is the answer
        ("7", r"\boxed{7}", 0),  # cut off
        ("7", r"\boxed{", 0),
        ("7", r"\boxed{\frac{}<eos>", 0),
    ],
)
def test_math(model: Path, gold: Any, text: str, right: float) -> None:
    assert score(model, "math", text, {"answer": gold}) == right


def test_math_scores_a_truncated_response(model: Path) -> None:
    assert score(model, "math", r"\boxed{7} and", {"answer": "7"}, finished=False) == 1


@pytest.mark.parametrize(
    ("name", "params", "text", "value"),
    [
        ("regex", {"pattern": r"\d+ apples$"}, "3 apples<eos>", 1),
        ("regex", {"pattern": r"\d+"}, "none<eos>", 0),
        ("regex", {"pattern": "a.b", "full_match": True}, "a\nb<eos>", 1),
        ("regex", {"pattern": "a", "full_match": True}, "ab<eos>", 0),
        ("json_schema", {"schema": {"required": ["a"]}}, 'x\n```json\n{"a": 1}\n```<eos>', 1),
        ("json_schema", {"schema": {"required": ["a"]}}, '</think>{"b": 1}<eos>', 0),
        ("json_schema", {"schema": {"type": "array"}}, "hm</think>[1]<eos>", 1),
        ("json_schema", {"schema": {"type": "array"}}, "<answer>[1]</answer><eos>", 1),
        ("json_schema", {"schema": True}, "no json<eos>", 0),
        ("length", {"limit": 10, "buffer": 4}, "123456", 0),
        ("length", {"limit": 10, "buffer": 4}, "12345678", -0.5),
        ("length", {"limit": 10, "buffer": 4}, "1234567890123", -1),
        ("length", {}, "1" * 230, pytest.approx(-(230 - 205) / 51)),
        ("format", {}, "3</think><answer>3</answer><eos>", 1),
        ("format", {}, "<answer>3</answer></think><eos>", pytest.approx(1 / 3)),
        ("format", {}, "</think></think><answer>3</answer><eos>", pytest.approx(2 / 3)),
        ("format", {}, "</think><answer>3</answer>", 0),
        ("format", {"marks": ["#"]}, "a#b<eos>", 1),
    ],
)
def test_shapes(model: Path, name: str, params: dict[str, Any], text: str, value: float) -> None:
    assert score(model, name, text, **params) == value


def test_patterns_and_schemas_of_a_row(model: Path, tmp_path: Path) -> None:
    assert score(model, "regex", "b<eos>", {"pattern": "^b"}) == 1
    assert score(model, "json_schema", "1<eos>", {"schema": '{"type": "number"}'}) == 1
    (tmp_path / "s.json").write_text('{"type": "string"}')
    assert score(model, "json_schema", '"x"<eos>', schema=str(tmp_path / "s.json")) == 1


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("regex", {"pattern": "("}, "regex: pattern = '(': not a regular expression"),
        ("regex", {"patern": "x"}, "data.reward: got an unexpected keyword argument 'patern'"),
        ("json_schema", {"schema": {"type": "nothing"}}, "schema = {'type': 'nothing'}: not a JSON schema"),
        ("json_schema", {"schema": "/no/file"}, "schema = '/no/file': cannot read"),
        ("length", {"limit": 3, "buffer": 4}, "buffer = 4, limit = 3: expected 0 < buffer <= limit"),
        ("format", {"marks": []}, "marks = []: expected at least one"),
        ("code", {"seconds": 0}, "seconds = 0, memory_mb = 512: expected seconds > 0"),
        ("regex", {"whole": True}, "regex: parameter whole was renamed; expected full_match"),
    ],
)
def test_wrong_parameters_are_one_line(model: Path, name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        score(model, name, "<eos>", **params)
    assert message in str(caught.value)


# --- code ---

ADDS = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```<eos>"
FUNCTION = "```python\ndef add(a, b):\n    return a + b\n```<eos>"


@pytest.mark.parametrize(
    ("text", "tests", "partial", "value"),
    [
        (ADDS, [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "9\n"}], False, 1),
        (ADDS, [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "8\n"}], False, 0),
        (ADDS, [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "8\n"}], True, 0.5),
        (ADDS, '{"inputs": ["1 2"], "outputs": ["3"]}', False, 1),
        (FUNCTION, "assert add(1, 2) == 3", False, 1),
        (FUNCTION, {"functional": "assert add(1, 2) == 4"}, False, 0),
        (FUNCTION, ["assert add(1, 2) == 3", "assert add(0, 0) == 1"], True, 0.5),
        (FUNCTION, {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, False, 1),
        ("```python\nimport os\nprint('passed')\nos._exit(0)\n```<eos>", "assert False", False, 0),
        ("no program<eos>", "assert True", False, 0),
    ],
)
def test_code(model: Path, text: str, tests: Any, partial: bool, value: float) -> None:
    assert score(model, "code", text, {"tests": tests}, partial=partial) == value


def test_invalid_tests_are_an_error() -> None:
    invalid_tests: list[Any] = [[], {}, [1], [{"input": "x"}]]
    for tests in invalid_tests:
        with pytest.raises(ValueError, match="expected \\[\\{input, output\\}"):
            read_tests(tests)


@contextmanager
def fusion(answer: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(answer).encode()
            self.send_response(200 if self.path == "/run_code" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def test_sandbox_fusion_runs_the_program_if_a_url_is_set(model: Path) -> None:
    tests = {"tests": [{"input": "1 2\n", "output": "3"}]}
    result = {"status": "Finished", "return_code": 0, "stdout": "3\n"}
    with fusion({"status": "Success", "run_result": result}) as (url, requests):
        assert score(model, "code", ADDS, tests, url=url) == 1
    assert (
        requests[0]["stdin"] == "1 2\n"
        and requests[0]["language"] == "python"
        and "input()" in requests[0]["code"]
    )
    with fusion({"status": "Failed", "run_result": {**result, "return_code": 1}}) as (url, _):
        assert score(model, "code", ADDS, tests, url=url) == 0
    refusal = {"status": "SandboxError", "message": "full"}
    with fusion(refusal) as (url, _), pytest.raises(RuntimeError, match="full"):
        score(model, "code", ADDS, tests, url=url)
    with pytest.raises(RuntimeError, match="no result of SandboxFusion"):
        score(model, "code", ADDS, tests, url=url)
