"""Agents for tests, without any client library: they speak HTTP themselves."""

import http.client
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit


def ask(messages, headers=(), **more):
    """One chat completion. Raises RuntimeError with the server's words."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **dict(headers)}
    body = json.dumps({"model": "any", "messages": messages, **more})
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    answer = connection.getresponse()
    completion = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {completion['error']['message']}")
    return completion["choices"][0]["message"]


def worth(task):
    """Its answer is worth the task's."""
    ask(question(task))
    return task["worth"]


def says_its_worth(task):
    """Before it asks, and once more."""
    for reward in (0.25, task["worth"]):
        url = urlsplit(os.environ["RLSYS_REWARD_URL"])
        connection = http.client.HTTPConnection(url.hostname, url.port)
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        connection.request("POST", url.path, json.dumps({"reward": reward}), headers)
        assert connection.getresponse().status == 200
    sums(task)


def question(task):
    return [{"role": "user", "content": task["question"]}]


def sums(task):
    """It works out what the model wants to know, and tells it."""
    messages = question(task)
    while True:
        reply = ask(messages)
        messages.append(reply)
        call = reply["content"].partition("<python>")[2].partition("</python>")[0]
        if not call:
            return
        messages.append({"role": "user", "content": str(sum(map(int, call.split("+"))))})


async def sums_async(task):
    sums(task)


def once(task):
    ask(question(task))


def raises(task):
    ask(question(task))
    raise KeyError(task["question"])


def silent(task):
    """Never asks."""


def stands_still(task):
    ask(question(task))
    time.sleep(1000)


def runs_away(task):
    while True:
        ask([{"role": "user", "content": "and now?"}])


def asks_for_ever(task):
    messages = question(task)
    while True:
        messages += [ask(messages), {"role": "user", "content": "go on"}]


def three_turns(task):
    """Of twelve tokens each."""
    messages = question(task)
    for number in range(3):
        messages += [ask(messages, max_tokens=12), {"role": "user", "content": str(number)}]


def hot(task):
    ask(question(task), temperature=0.3)


def rewrites(task):
    """A sub-agent of its own, and after it the conversation goes on."""
    messages = question(task)
    messages.append(ask(messages))
    aside = ask([{"role": "user", "content": "in short?"}])
    messages.append({"role": "user", "content": aside["content"]})
    ask(messages)


def asks_others(task):
    """Twelve tokens; two sub-agents at the same time, of sixteen each; and it goes on with both."""
    messages = question(task)
    messages.append(ask(messages, max_tokens=12))
    with ThreadPoolExecutor(2) as pool:
        replies = list(
            pool.map(lambda i: ask([{"role": "user", "content": f"{i}?"}], max_tokens=16), range(2))
        )
    messages.append({"role": "user", "content": " ".join(t["content"] for t in replies)})
    ask(messages, max_tokens=12)


def compacts(task):
    """Two turns; what they said in a word; and it goes on from there."""
    messages = question(task)
    for number in range(2):
        messages += [ask(messages), {"role": "user", "content": str(number)}]
    short = [*question(task), {"role": "user", "content": "so far: 7"}]
    short += [ask(short), {"role": "user", "content": "and?"}]
    ask(short)


def asks_too_much(task):
    """And makes do with less."""
    try:
        ask([{"role": "user", "content": "7" * 300}])
    except RuntimeError as e:
        assert "400" in str(e) and "tokens" in str(e), e
    once(task)


def asks_again(task):
    """As a client does whose connection broke: once more the same."""
    first = ask(question(task))
    again = ask(question(task), {"x-stainless-retry-count": "1"})
    assert again == first
    ask([*question(task), first, {"role": "user", "content": "4"}])


def gives_up(task):
    """Its client goes away before the answer, and asks the same again."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"model": "any", "messages": question(task)})
    connection = http.client.HTTPConnection(url.hostname, url.port)
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    look(url, headers)
    connection.close()
    look(url, headers)
    once(task)


def look(url, headers):
    """After it, the server has seen what was sent before."""
    for _ in range(3):
        connection = http.client.HTTPConnection(url.hostname, url.port)
        connection.request("GET", f"{url.path}/models", headers=headers)
        assert json.loads(connection.getresponse().read())["data"][0]["id"] == "policy"
        connection.close()


def is_killed_once(task):
    """Behind the first answer, by a signal that nobody can catch; where a file says so."""
    mark = Path(task["mark"])
    messages = question(task)
    messages.append(ask(messages))
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ask([*messages, {"role": "user", "content": "7"}])


def is_always_killed(task):
    ask(question(task))
    os.kill(os.getpid(), signal.SIGKILL)


def changes(task):
    """Says something else each time it runs."""
    mark = Path(task["mark"])
    times = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (times + 1))
    messages = question(task)
    messages.append(ask(messages))
    if not times:
        os.kill(os.getpid(), signal.SIGKILL)
    ask([*messages, {"role": "user", "content": str(times)}])


def leaves_a_child(task):
    """That outlives it, in a session of its own."""
    pid = os.fork()
    if not pid:
        os.setsid()
        time.sleep(1000)
    Path(task["mark"]).write_text(str(pid))
    ask(question(task))


if __name__ == "__main__":
    sums(json.load(sys.stdin))
