"""A chat template of a published folder is bounded in time and size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.core.errors import RowError
from rlsys.data import Tokenizer

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
GROWS = (
    "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set n.s = CHANGE %}{% endfor %}"
    "{{ n.s | length }}"
)
TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops of a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 1000
    + "{% endfor %}{% endfor %}",
    "~": GROWS.replace("CHANGE", "n.s ~ n.s"),
    "+": GROWS.replace("CHANGE", "n.s + n.s"),
    "list +": GROWS.replace("'xxxxxxxx'", "[1]").replace("CHANGE", "n.s + n.s"),
    "join": GROWS.replace("CHANGE", "[n.s, n.s] | join"),
    "replace": GROWS.replace("CHANGE", "n.s | replace('x', 'xx')"),
    "method": GROWS.replace("CHANGE", "n.s.replace('x', 'xx')"),
    "format": GROWS.replace("CHANGE", "'%s%s' | format(n.s, n.s)"),
    "nested": GROWS.replace("CHANGE", "[n.s, n.s]").replace("n.s | length", "n.s"),
    "*": "{{ 'x' * 10 ** 12 }}",
    "* list": "{{ ([0] * 10 ** 12) | length }}",
    "**": "{{ 10 ** 10 ** 9 }}",
    "ljust": "{{ 'x'.ljust(10 ** 12) }}",
    "center": "{{ 'x' | center(10 ** 12) }}",
    "indent": "{{ ('x\n' * 1000) | indent(10 ** 12) }}",
    "%": "{{ '%999999999999d' % 1 }}",
    "format method": "{{ '{:>999999999999}'.format(1) }}",
    "json": "{{ messages | tojson(indent=999999999999) }}",
}
RUN = """
import json, resource, sys, time
from rlsys.core.errors import RowError
from rlsys.data import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
for name, template in json.load(sys.stdin).items():
    tokenizer = Tokenizer(sys.argv[1])
    tokenizer._template_text = template
    start = time.thread_time()
    try:
        said = tokenizer.apply_chat([{"role": "user", "content": "1"}])[:40]
    except RowError as e:
        said = "refused"
    except BaseException as e:
        said = type(e).__name__
    print(json.dumps([name, said, time.thread_time() - start]), flush=True)
"""


@pytest.mark.gate  # a process of its own, whose memory and time are limited
def test_a_template_without_bounds_is_refused() -> None:
    process = subprocess.run(
        [sys.executable, "-c", RUN, str(MODEL)], input=json.dumps(TEMPLATES), capture_output=True, text=True
    )
    results = [json.loads(line) for line in process.stdout.splitlines()]
    assert {name: outcome for name, outcome, _ in results} == dict.fromkeys(TEMPLATES, "refused"), (
        process.stderr[-2000:]
    )
    assert max(seconds for _, _, seconds in results) < 20


HALF = "\ud83d"
HALVES = {
    "a literal": r"{{ '\ud83d' }}",
    "raw text": HALF,
    "a number as a character": "{{ '%c' % 55357 }}",
    "after the message": "{{ messages[0].content }}" + HALF,
    "a half in front of a letter": HALF + "a",
}


@pytest.mark.parametrize("template", HALVES.values(), ids=HALVES)
def test_a_template_that_writes_half_of_a_character_is_refused_in_one_line(template: str) -> None:
    tokenizer = Tokenizer(MODEL)
    tokenizer._template_text = template
    with pytest.raises(RowError) as exc_info:
        tokenizer.apply_chat([{"role": "user", "content": "1"}])
    line = str(exc_info.value)
    assert line.startswith(f"{MODEL}: the chat template") and "lone UTF-16 surrogate" in line, line
    line.encode()
    assert tokenizer.turn_end_id == tokenizer.eos_id


def test_two_halves_of_one_character_are_the_character() -> None:
    tokenizer = Tokenizer(MODEL)
    tokenizer._template_text = r"{{ '\ud83d' }}{{ '\ude00' }}"
    assert tokenizer.apply_chat([{"role": "user", "content": "1"}]) == "\N{GRINNING FACE}"
