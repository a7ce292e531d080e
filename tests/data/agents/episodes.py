"""Episodes of two policies for tests, without any client library."""

import http.client
import json
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit


def ask(policy, messages, **more):
    """One chat completion. Raises RuntimeError with the server's words."""
    url = urlsplit(policy["base_url"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": f"Bearer {policy['api_key']}", "Content-Type": "application/json"}
    connection.request(
        "POST", f"{url.path}/chat/completions", json.dumps({"messages": messages, **more}), headers
    )
    answer = connection.getresponse()
    response_body = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {json.loads(response_body)['error']['message']}")
    return response_body if more.get("stream") else json.loads(response_body)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def note(row, text):
    with Path(row["log"]).open("a") as file:
        file.write(f"{text}\n")


def talk(row, policies):
    """Two turns of each, with the other one's words between them."""
    note(row, "begun")
    first_messages, second_messages = [user(row["question"])], []
    for _ in range(2):
        first_messages.append(ask(policies["first"], first_messages))
        second_messages.append(user(first_messages[-1]["content"]))
        second_messages.append(ask(policies["second"], second_messages))
        first_messages.append(user(second_messages[-1]["content"]))
    note(row, "ended")
    return {"first": row.get("worth", 0.25), "second": 0.75}


async def talk_once(row, policies):
    """One turn of each, as streams."""
    for policy in policies.values():
        assert ask(policy, [user(row["question"])], stream=True).endswith(b"data: [DONE]\n\n")
    return dict.fromkeys(policies, 1)


def is_killed_once(row, policies):
    ask(policies["first"], [user(row["question"])])
    if not Path(row["log"]).exists():
        note(row, "killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return talk(row, policies)


def insists(row, policies):
    """The first policy's end is told, and the second one goes on."""
    messages = [user(row["question"])]
    try:
        while True:
            messages += [ask(policies["first"], messages), user("more")]
    except RuntimeError as e:
        note(row, str(e))
    ask(policies["second"], [user("alone?")])
    return {"first": 0, "second": 1}
