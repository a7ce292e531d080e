"""What other people's files get wrong: `bad` of a row says what. Other rows are answered as usual."""

import http.client
import json
import os
from urllib.parse import urlsplit

from rlsys.environments.contract import Opening, Step, as_messages

HALF = "\ud83d"
"""Half an emoji."""


def reward(config):
    def score(prompt, text):
        bad = prompt.entry.get("bad")
        if bad == "reward raises":
            raise ValueError(HALF * 100_000)
        if bad == "reward is none":
            return None
        if bad == "reward is not a number":
            return float("nan")
        return float(f"<answer>{prompt.entry['answer']}</answer>" in text)

    return score


def turns(config, tokenizer, speak):
    """A generator of one's own that asks a search server, which breaks the connection now and then."""

    async def generate(sample, prompt):
        if prompt.entry.get("bad") == "generator raises" and sample.index == 1:
            raise ConnectionResetError("the search server is away")
        await speak(sample)

    return generate


def add(terms):
    """A function that the model calls. What it says is cut in the middle of a character now and then."""
    total = sum(int(term) for term in terms)
    if total % 3 == 1:
        return f"{total}{HALF}"
    if total % 3 == 2:
        raise ValueError(HALF)
    return total


def ask(body):
    """One chat completion, whatever its status."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    answer = connection.getresponse()
    response = json.loads(answer.read())
    connection.close()
    return answer.status, response


def solve(task):
    """An agent that asks what cannot be answered, and gives up, or asks once more as it should."""
    chat = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}]}
    bad = task.get("bad")
    if bad == "agent raises":
        raise RuntimeError(HALF)
    odd = {
        "agent stops at nothing": {"stop": [""]}, "agent stops at a number": {"stop": 5},
        "agent calls a number": {"messages": [{"role": "assistant", "tool_calls": 3}]},
        "agent says half an emoji": {"messages": [{"role": "user", "content": HALF}]},
    }.get(bad)  # fmt: skip
    if odd is not None:
        status, response = ask(json.dumps({**chat, **odd}))
        assert status == 400, (status, response)
        if bad != "agent stops at a number":  # which this one survives
            raise RuntimeError(response["error"]["message"])
    status, response = ask(json.dumps(chat))
    assert status == 200, response


class Tries:
    """A sum, with a second try."""

    def open(self, task, seed):
        return Try(task)


class Try:
    opening = Opening()

    def __init__(self, task):
        self.task, self.turns = task, 0

    def step(self, action):
        self.turns += 1
        bad = self.task.get("bad")
        if bad == "environment raises":
            raise RuntimeError(HALF)
        if bad == "environment says text":
            return Step("hello", 0.0)
        if bad == "environment says an image":
            image = {"type": "image_url", "image_url": {"url": "x"}}
            return Step([{"role": "user", "content": [image]}], 0.0)
        if bad == "environment rewards with none":
            return Step(as_messages("again"), None)
        right = f"<answer>{self.task['answer']}</answer>" in action.text
        parts = [{"type": "text", "text": "ag"}, {"type": "text", "text": "ain"}]
        return Step([{"role": "user", "content": parts}], right / self.turns, right or self.turns == 2)

    def close(self):
        pass
