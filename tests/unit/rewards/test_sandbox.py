"""Programs that nobody trusts: what they reach, what they leave, and whose word the verdict is (finding A4)."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.sockets import remove_tree, role_folder
from rlsys.rewards import sandbox
from rlsys.rewards.code import code, read_tests
from rlsys.rewards.isolated import Remote, decode, encode, free_names
from rlsys.rewards.sandbox import FOLDER_BYTES, PROCESSES, Sandbox, Undecidable

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
BOX = Sandbox(seconds=20, memory_mb=512)
isolating = pytest.mark.skipif(bool(Sandbox.missing()), reason="no bubblewrap that works")


@pytest.fixture(params=["bubblewrap", "none"])
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """With and without bubblewrap."""
    if request.param == "none":
        monkeypatch.setattr(sandbox, "_wrapper", lambda: None)
    elif Sandbox.missing():
        pytest.skip("no bubblewrap that works")
    yield BOX


# -- the verdict --------------------------------------------------------------------------------------------------

EQUAL = "class E:\n  def __eq__(s, o): return True\n  def __ne__(s, o): return False\n"
ANSWERS = """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"value": 3, "args": []}' + bytes([10]))
    except OSError: pass
"""
OPERATORS = """
class X:
    def lie(self, *others): return 0.0
    __sub__ = __rsub__ = __add__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __abs__ = lie
    def __contains__(self, item): return True
    def __iter__(self): return iter([])
def add(*numbers): return X()
"""
CALLED = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
ADD = {"functional": "assert add(1, 2) == 3"}
CLOSE = {"functional": "import math\nassert math.isclose(add(1, 2), 3.0)"}
BARE_CLOSE = {"functional": "assert math.isclose(add(1, 2), 3.0) and isclose(add(1, 2), 3.0)"}


@pytest.mark.gate
@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (ADD, "import sys\nprint(eval(open(__file__).read().split()[-1][6:-1]))\nsys.exit(0)"),
        (ADD, EQUAL + "def add(a, b): return E()"),
        (ADD, "import os\nos._exit(0)"),
        (ADD, "import sys\ndef add(a, b): sys.exit(0)"),
        (ADD, "def add(a, b):\n  import os\n  os._exit(0)"),
        (ADD, "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): raise AssertionError"),
        (
            CALLED,
            f"import json\n{EQUAL}json.loads = lambda *a, **k: ([], E())\njson.dumps = lambda *a, **k: ''\n"
            "def add(*a): return 0",
        ),
        (CALLED, EQUAL + "def add(*a): return E()"),
        (CLOSE, "import math\nmath.isclose = lambda *a: True\ndef add(a, b): return 0"),
        (BARE_CLOSE, "class math:\n  isclose = lambda *a: True\nisclose = math.isclose\ndef add(a, b): return 0"),
        (ADD, "def add(a, b): return [3]"),
        (ADD, ANSWERS),
        ({"functional": "assert abs(add(1, 2) - 3) < 1e-6"}, OPERATORS),
        ({"functional": "def check(c):\n  assert abs(c(1, 2) - 3.0) < 1e-6\ncheck(add)"}, OPERATORS),
        ({"functional": "assert abs(add(1, 2) / 3 - 1) < 1e-6 or add(1, 2) % 3 == 0"}, OPERATORS),
        ({"functional": "assert 3 in add(1, 2)"}, OPERATORS),
    ],
)  # fmt: skip
def test_security_a04_a_program_that_computes_nothing_fails_its_test(
    tests: dict[str, Any], program: str, box: Sandbox
) -> None:
    (test,) = read_tests(tests)
    assert not test(program, box)


@pytest.mark.gate
def test_a_correct_program_passes_its_test(box: Sandbox) -> None:
    for tests in (ADD, CALLED, CLOSE, BARE_CLOSE):
        (test,) = read_tests(tests)
        assert test("import sys\nprint('words')\ndef add(a, b): return a + b", box), tests


STACK = """
class Stack:
    def __init__(self): self.held = []
    def push(self, x): self.held.append(x)
    def pop(self): return self.held.pop()
    def __len__(self): return len(self.held)
"""
POINT = "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\ndef f(x): return P(x)"
MONEY = """
class Money:
    def __init__(self, units): self.cents = 100 * units
    def __add__(self, other): return Money((self.cents + other.cents) // 100)
    def __sub__(self, other):
        return Money(self.cents // 100 - (other if isinstance(other, int) else other.cents // 100))
    def __eq__(self, other): return self.cents == other.cents
    def __contains__(self, units): return 100 * units <= self.cents
def total(amounts):
    out = Money(0)
    for amount in amounts: out = out + amount
    return out
"""
NEGATIVE = "def f(x):\n  if x < 0: raise ValueError('negative')\n  return x ** 0.5"


@pytest.mark.gate
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(a): a.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        ("def f(a): return sorted(a)", "def check(c):\n  assert c([2, 1]) == [1, 2] and c(()) == []\ncheck(f)"),
        (STACK, "s = Stack()\ns.push((2, {3}))\nassert len(s) == 1 and s\nassert s.pop() == (2, {3}) and not s.held"),
        (NEGATIVE, "try:\n  f(-1)\n  assert False\nexcept ValueError as e:\n  assert 'neg' in str(e)"),
        ("def f(n):\n  for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        (POINT, "assert f(1) == P(1)\nassert f(1) != P(2)\nassert f(3).x == 3"),
        (MONEY, "assert (Money(5) - 3).cents == 200 and Money(5) + Money(1) == Money(6) and 5 in Money(5)"),
        (MONEY, "assert total([Money(1), Money(2)]) - Money(3) == Money(0)"),
        ("def f(n): return {n: 1}.items()", "assert (3, 1) in f(3) and (4, 1) not in f(3)"),
        ("class Solution:\n  def two(self, a, b): return a * b", "assert Solution().two(2, 3) == 6"),
        ("def f(): return 10 ** 5000, float('inf'), b'x', 1j", "assert f() == (10 ** 5000, float('inf'), b'x', 1j)"),
    ],
)  # fmt: skip
def test_tests_call_the_program_from_a_separate_process(program: str, tests: str) -> None:
    assert BOX.passes(program, tests)
    assert not BOX.passes(program, tests + "\nassert False")


@pytest.mark.gate
def test_tests_that_give_the_program_a_function_run_in_its_process() -> None:
    program, tests = "def f(g, x): return g(x)", "assert f(lambda v: v + 1, 2) == 3"
    with pytest.raises(Undecidable, match="the tests pass the program a function"):
        BOX.passes(program, tests)
    assert BOX.passes_in_its_process(program, tests)
    assert not BOX.passes_in_its_process(program, tests.replace("3", "4"))
    assert not BOX.passes_in_its_process("import os\nos._exit(0)", tests)
    score = code(Config.model_validate({"model": {"path": MODEL}}), sandbox="available")
    assert score.__closure__


@isolating
@pytest.mark.gate
def test_required_refuses_such_tests_and_machines_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsys.core.types import Prompt

    config = Config.model_validate({"model": {"path": MODEL}})
    score = code(config, sandbox="required")
    text = "```python\ndef f(g, x): return g(x)\n```"
    prompt = Prompt(0, "", [1], {"tests": "assert f(lambda v: v + 1, 2) == 3"})
    with pytest.raises(ValueError, match="which sandbox = required does not allow"):
        score(prompt, text)
    assert score(Prompt(0, "", [1], {"tests": "assert f(None, 2) == 3"}), text) == 0
    monkeypatch.setattr(sandbox, "_wrapper", lambda: None)
    with pytest.raises(UserError, match=r"no working bubblewrap: bwrap\); expected these protections"):
        code(config, sandbox="required")
    with pytest.raises(UserError, match="sandbox = 'no': expected available or required"):
        code(config, sandbox="no")


def test_the_metrics_count_protections_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlsys.rollout.run_metrics import RunMetrics

    stats = {"draft_checks": 0, "cached_tokens": 0, "prefilled_tokens": 0, "resumes": 0}
    router = SimpleNamespace(stats=lambda: stats)
    parts: Any = SimpleNamespace(lost_tokens=0, timeouts=0, failures=0, counts={})

    def totals(reward: Any) -> dict[str, float]:
        config = Config.model_validate({"model": {"path": MODEL}, "data": {"reward": reward}})
        return RunMetrics(config, parts, cast(Any, router), parts, parts, dict).totals()

    monkeypatch.setattr(sandbox, "_wrapper", lambda: None)
    monkeypatch.setattr(sandbox, "limiting_group", lambda: None)
    assert totals("code")["sandbox_missing"] == 2
    monkeypatch.setattr(sandbox, "limiting_group", lambda: Path("/"))
    assert totals("code")["sandbox_missing"] == 1
    monkeypatch.setattr(sandbox, "_wrapper", lambda: ("bwrap",))
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    assert totals("code")["sandbox_missing"] == 0
    for other_reward in ("math", [{"name": "code", "params": {"url": "http://127.0.0.1:9"}}]):
        assert "sandbox_missing" not in totals(other_reward)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1.5, "text", 2**70, b"bytes", 1j, [1, [2]], (1, (2,)), {1, 2}, frozenset({1}), {1: {2: [3]}},
        range(1, 9, 2),
    ],
)  # fmt: skip
def test_plain_values_cross_as_they_are(value: Any) -> None:
    crossed = decode(encode(value, []), None)
    assert (crossed, type(crossed)) == (value, type(value))


def test_an_object_of_the_program_equals_no_plain_value() -> None:
    objects: list[Any] = []
    thing = object()
    assert encode([thing], objects) == {"l": [{"o": 0}]} and objects == [thing]
    remote = decode({"o": 0}, lambda place: Remote(None, place, True))  # type: ignore[arg-type]
    plain_values: tuple[Any, ...] = (3, [], None, True)
    assert not any(remote == plain for plain in plain_values)


def test_names_that_tests_do_not_define_are_the_programs() -> None:
    tests = (
        "from math import pi as p\nimport os.path\ndef check(c):\n  y = c(p)\n  return len(y)\ncheck(add)\nos"
    )
    assert free_names(tests) == {"add"}


# -- what it reaches and leaves -----------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = bytearray(2 ** 30)",
        "open('big', 'wb').write(bytes(2 ** 25))",
        "raise SystemExit(3)",
        "import time; time.sleep(60)",
    ],
)
def test_a_program_keeps_to_its_limits(program: str) -> None:
    assert not Sandbox(seconds=1, memory_mb=256).run(program, "").ok


@pytest.mark.gate
def test_a_program_cannot_access_secrets_or_installed_packages(
    monkeypatch: pytest.MonkeyPatch, box: Sandbox
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    outcome = box.run("import os; print(os.environ, os.listdir())", "")
    assert outcome.ok and "secret" not in outcome.output
    assert not box.run("import pydantic", "").ok


@isolating
@pytest.mark.gate
def test_security_a04_a_program_reaches_neither_network_nor_files_nor_processes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.create_server(("127.0.0.1", 0)) as server, victim:
        port = server.getsockname()[1]
        for attack in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 3)",
            f"open({str(key)!r}).read()",
            f"open({str(key)!r}, 'w').write('mine')",
            f"import os\nos.kill({victim.pid}, 9)",
            f"import os\nos.kill({os.getpid()}, 0)",
            "open('/etc/passwd').read()",
            "open('/proc/self/environ').read()",
            "open('/isolated.py', 'w')",
            "import os\nos.setuid(0)",
        ):
            assert BOX.run("print('begun', flush=True)\n" + attack, "") == sandbox.Outcome(
                False, "begun\n"
            ), attack
        assert victim.poll() is None
        victim.kill()
    assert key.read_text() == "secret"


@isolating
@pytest.mark.gate
def test_security_a04_a_program_cannot_fill_memory_and_leaves_no_files() -> None:
    entries_before = set(role_folder().iterdir())
    fill = (
        "def fill(folder):\n  n = 0\n  try:\n    while n < 100:\n"
        "      open(f'{folder}/{n}', 'wb').write(bytes(2 ** 23)); n += 1\n  except OSError: pass\n  return n\n"
        "print(*map(fill, ('/', '/dev', '/dev/shm', '/tmp')))"
    )
    most = FOLDER_BYTES // 2**23
    assert BOX.run(fill, "").output.split() == ["0", "0", str(most), str(most)]
    forks = (
        "import os, time\nn = 0\ntry:\n  while n < 300:\n    if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "    n += 1\nexcept OSError: pass\nprint(n)"
    )
    assert int(BOX.run(forks, "").output) < PROCESSES
    deep = "import os\nfor i in range(3000):\n  os.mkdir('d')\n  os.chdir('d')\nprint('made')"
    assert BOX.run(deep, "").output == "made\n"
    links = "import os\nos.mkfifo('/tmp/.stdout')\nos.symlink('/etc/passwd', '/tmp/program')\nprint('made')"
    assert BOX.run(links, "") == sandbox.Outcome(True, "made\n")
    assert set(role_folder().iterdir()) == entries_before


@isolating
@pytest.mark.gate
def test_security_a04_child_processes_of_a_program_end_with_it() -> None:
    name = f"left-{os.getpid()}"
    leave = (
        "import os, sys, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        f"    os.execv(sys.executable, [{name!r}, '-c', 'import time; time.sleep(600)'])\n  os._exit(0)\n"
        "time.sleep(0.2)\nprint('left')"
    )
    assert BOX.run(leave, "").output == "left\n"
    leftovers = [p for p in psutil.process_iter(["cmdline"]) if name in (p.info["cmdline"] or [])]
    for process in leftovers:
        process.send_signal(signal.SIGKILL)
    assert not leftovers


@isolating
@pytest.mark.gate
def test_security_a04_a_program_makes_no_device_and_finds_none_of_the_machine() -> None:
    make = (
        "import os, stat\n"
        "for folder in ('/tmp', '/dev/shm', '/dev'):\n"
        "  for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 1, 5), (stat.S_IFBLK, 7, 0)):\n"
        "    try: os.mknod(f'{folder}/device', kind | 0o666, os.makedev(major, minor))\n"
        "    except OSError: continue\n"
        "    print('made', folder, major, minor)\n"
        "for folder, _, names in os.walk('/dev'):\n"
        "  for name in names:\n"
        "    mode = os.lstat(f'{folder}/{name}').st_mode\n"
        "    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode): print(f'{folder}/{name}')\n"
    )
    devices = set(BOX.run(make, "").output.splitlines())
    harmless = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx")}
    assert "/dev/null" in devices and devices <= harmless | {"/dev/pts/ptmx"}


# Also where a program can reach the folder of its file: without bubblewrap.

DEEP = "import os\nfor i in range(3000):\n  os.mkdir('d')\n  os.chdir('d')\nprint('made')"
SWAP = """
import os
while True:
  try:
    os.mkdir('x')
    os.rmdir('x')
    os.symlink({victim!r}, 'x')
    os.unlink('x')
    os.symlink({victim!r}, 'program.new')
    os.rename('program.new', 'program.py')
    os.unlink('program.py')
  except OSError: pass
"""


@pytest.mark.gate
@pytest.mark.parametrize(
    "program",
    [
        DEEP,
        "import os\nos.mkfifo('fifo')\nos.mkdir('d', 0)\nprint('made')",
        "import os\nfor i, to in enumerate(('/', '..', '.', 'none')): os.symlink(to, f'link{i}')\nprint('made')",
    ],
    ids=["deep", "FIFO", "links"],
)
def test_security_a04_a_program_leaves_no_files(program: str, box: Sandbox) -> None:
    entries_before = set(role_folder().iterdir())
    assert box.run(program, "") == sandbox.Outcome(True, "made\n")
    assert set(role_folder().iterdir()) == entries_before


@pytest.mark.gate
def test_security_a04_links_that_change_while_a_program_ends_lead_nowhere(
    tmp_path: Path, box: Sandbox
) -> None:
    (tmp_path / "file").write_text("secret")
    name = f"swap-{os.getpid()}"
    code = SWAP.format(victim=str(tmp_path))
    leave = (
        "import os, sys\nif os.fork() == 0:\n  os.setsid()\n"
        f"  os.execv(sys.executable, [{name!r}, '-c', {code!r}])\nprint('left')"
    )
    try:
        for _ in range(5):
            assert box.run(leave, "").output == "left\n"
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if name in (process.info["cmdline"] or []):
                process.kill()
                process.wait()
        for leftover in role_folder().glob("tmp*"):  # made again after its removal, without bubblewrap
            remove_tree(leftover)
    assert (tmp_path / "file").read_text() == "secret"


_opened: list[Path] | None = None


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], str | Path):
        _opened.append(Path(args[0]))


@functools.cache
def _begin_to_hear() -> None:
    """Once: an audit hook stays."""
    sys.addaudithook(_hear)


@pytest.mark.gate
def test_security_a04_no_file_of_a_program_is_read_after_it_began(box: Sandbox) -> None:
    """So no link that the program puts in its place is followed."""
    global _opened
    folder = role_folder()
    _begin_to_hear()
    for sandboxes, verdict in (
        (1, lambda: box.run("def f(): return 3\nprint(f())", "").ok),
        (2, lambda: box.passes("def f(): return 3", "assert f() == 3")),
        (1, lambda: box.passes_in_its_process("def f(): return 3", "assert f() == 3")),
    ):
        _opened = []
        try:
            assert verdict()
        finally:
            opened, _opened = _opened, None
        assert [p.name for p in opened if folder in p.parents] == ["program.py"] * sandboxes
