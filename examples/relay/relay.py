"""An episode of two policies: the first works out one half of a sum, the second goes on from where it says it came.

The second starts from the last digit of what the first has said. So the end is right only if both were.
"""

import re

import openai.resources.chat.completions  # noqa: F401  (the client would import it in each episode: once is cheaper)
from openai import APIStatusError, OpenAI

TERM = re.compile(r"[+-]?\d+")


def play(row: dict, policies: dict[str, dict[str, str]]) -> dict[str, float]:
    """`policies`: by name, what OpenAI's client needs to ask it. Returns what each response was worth."""
    terms = TERM.findall(row["question"])
    half = len(terms) // 2
    began = ask(policies["first"], "".join(terms[:half]))
    ended = ask(policies["second"], f"{last_digit(began)}{''.join(terms[half:])}")
    right = last_digit(sum(map(int, terms[:half]))) + sum(map(int, terms[half:]))
    worth = float(ended == right)
    return {"first": worth, "second": worth}


def ask(policy: dict[str, str], sum_: str) -> int | None:
    """Its answer; None for none."""
    messages = [{"role": "user", "content": f"{sum_}="}]
    try:
        said = OpenAI(**policy).chat.completions.create(model="policy", messages=messages)
    except APIStatusError:  # its response has ended
        return None
    found = re.search(r"<answer>(-?\d+)</answer>", said.choices[0].message.content)
    return None if found is None else int(found[1])


def last_digit(number: int | None) -> int:
    return abs(number or 0) % 10
