"""An episode of two policies: the first computes the first half of a sum, the second continues with the other half.

The second policy starts from the last digit of the first one's answer, so the result is right only if both answers
are.
"""

import re

import openai.resources.chat.completions  # noqa: F401  (the client imports it lazily, in each episode; here, only once)
from openai import APIStatusError, OpenAI

TERM = re.compile(r"[+-]?\d+")


def play(row: dict, policies: dict[str, dict[str, str]]) -> dict[str, float]:
    """Play one episode.

    Args:
        row: the row of the data, with `question`.
        policies: the arguments of OpenAI's client for each policy, by name.

    Returns:
        The reward of each policy: 1 for the right result, else 0.
    """
    terms = TERM.findall(row["question"])
    half = len(terms) // 2
    intermediate = ask(policies["first"], "".join(terms[:half]))
    result = ask(policies["second"], f"{last_digit(intermediate)}{''.join(terms[half:])}")
    expected = last_digit(sum(map(int, terms[:half]))) + sum(map(int, terms[half:]))
    reward = float(result == expected)
    return {"first": reward, "second": reward}


def ask(policy: dict[str, str], sum_: str) -> int | None:
    """Return a policy's answer to a sum, None if it gives none."""
    messages = [{"role": "user", "content": f"{sum_}="}]
    try:
        completion = OpenAI(**policy).chat.completions.create(model="policy", messages=messages)
    except APIStatusError:  # the policy's response has ended
        return None
    answer = re.search(r"<answer>(-?\d+)</answer>", completion.choices[0].message.content)
    return None if answer is None else int(answer[1])


def last_digit(number: int | None) -> int:
    """Return the last digit of a number, 0 for no number."""
    return abs(number or 0) % 10
