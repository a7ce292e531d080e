"""Hypothesis strategies for untrusted input: texts by class of characters, JSON by type and nesting.

characters    ASCII, controls, Unicode line ends, other scripts, emoji, lone surrogates, byte order marks, markup
sizes         empty, one, some; small and large integers and floats up to 400 digits, and the infinities
nesting       values in lists and objects, up to a depth of 3
order         permutations of rows, keys, files and tensors
duplication   equal rows, equal prompts, one name in two files
types         null, boolean, number, text, list and object in place of each other
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

CHARACTER_CLASSES = {
    "ascii": "aZ09 +-=.,:;!?",
    "controls": "\x00\x01\x0b\x0c\x1c\x1d\x1e\x1f\x7f\t\r",
    "line ends": "\n\u0085\u2028\u2029",
    "scripts": "éßЖשمन่你ｱ한",
    "emoji": "\U0001f600\u200d\u2764\ufe0f",
    "surrogates": "\ud83d",
    "marks": "\ufeff\ufffe\u202e\u00ad",
    "quotes": "\"'\\/{}[]<>",
}
MARKUP = ("<image>", "<|im_start|>", "<eos>", "</think>", "{% if %}", "{{ x }}", "${HOME}", "~", "%s")


def texts(*, surrogates: bool = True, max_size: int = 12) -> st.SearchStrategy[str]:
    """Return texts of all character classes. `surrogates`: include lone surrogates."""
    classes = [c for name, c in CHARACTER_CLASSES.items() if surrogates or name != "surrogates"]
    character = st.one_of(*(st.sampled_from(c) for c in classes))
    return st.lists(st.one_of(character, st.sampled_from(MARKUP)), max_size=max_size).map("".join)


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 300),
    st.sampled_from((2**31, 2**53 + 1, 2**63, -(2**64), 10**400)),
    st.floats(),
    st.sampled_from((0.0, -0.0, 1e-320, 1e308)),
)
ATOMS: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), NUMBERS, texts())


def values(depth: int = 3) -> st.SearchStrategy[Any]:
    """Return any JSON value in the form that Python's json reads."""
    strategy = ATOMS
    for _ in range(depth):
        strategy = st.one_of(
            ATOMS,
            st.lists(strategy, max_size=3),
            st.dictionaries(texts(max_size=3), strategy, max_size=3),
        )
    return strategy


def mutated(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return `valid` with one or two of its values replaced by any value or removed."""
    sentinel = object()
    changed = st.dictionaries(
        st.sampled_from(sorted(valid)), st.one_of(values(2), st.just(sentinel)), min_size=1, max_size=2
    )
    return changed.map(lambda new: {k: v for k, v in (valid | new).items() if v is not sentinel})
