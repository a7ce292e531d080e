"""Strategies of property tests for what others wrote: texts by their classes of bytes, JSON by its types and nesting.

bytes         ASCII, controls, line ends of Unicode, other scripts, emoji, half an emoji, byte order marks, markup
sizes         empty, one, some; integers and floats from small ones to 6,000 digits and the infinities
nesting       values in lists and objects, up to a depth of 3
order         permutations of rows, keys, files and tensors
duplication   equal rows, equal prompts, one name in two files
types         null, boolean, number, text, list, object in the place of each other
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

BYTE_CLASSES = {
    "ascii": "aZ09 +-=.,:;!?",
    "controls": "\x00\x01\x0b\x0c\x1c\x1d\x1e\x1f\x7f\t\r",
    "line ends": "\n\u0085\u2028\u2029",
    "scripts": "éßЖשمन่你ｱ한",
    "emoji": "\U0001f600\u200d\u2764\ufe0f",
    "halves": "\ud83d",
    "marks": "\ufeff\ufffe\u202e\u00ad",
    "quotes": "\"'\\/{}[]<>",
}
MARKUP = ("<image>", "<|im_start|>", "<eos>", "</think>", "{% if %}", "{{ x }}", "${HOME}", "~", "%s")


def texts(*, halves: bool = True, most: int = 12) -> st.SearchStrategy[str]:
    """`halves`: half of a character, a lone surrogate, too."""
    classes = [c for name, c in BYTE_CLASSES.items() if halves or name != "halves"]
    character = st.one_of(*(st.sampled_from(c) for c in classes))
    return st.lists(st.one_of(character, st.sampled_from(MARKUP)), max_size=most).map("".join)


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 300),
    st.sampled_from((2**31, 2**53 + 1, 2**63, -(2**64), 10**400)),
    st.floats(),
    st.sampled_from((0.0, -0.0, 1e-320, 1e308)),
)
ATOMS: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), NUMBERS, texts())


def values(depth: int = 3) -> st.SearchStrategy[Any]:
    """Any JSON value, as Python's json reads it."""
    strategy = ATOMS
    for _ in range(depth):
        strategy = st.one_of(
            ATOMS,
            st.lists(strategy, max_size=3),
            st.dictionaries(texts(most=3), strategy, max_size=3),
        )
    return strategy


def instead(right: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`right` with one or two of its values replaced by any other, or left out."""
    sentinel = object()
    changed = st.dictionaries(
        st.sampled_from(sorted(right)), st.one_of(values(2), st.just(sentinel)), min_size=1, max_size=2
    )
    return changed.map(lambda new: {k: v for k, v in (right | new).items() if v is not sentinel})
