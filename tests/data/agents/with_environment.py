"""An agent with OpenAI's client whose tool is an environment in a process of its own."""

import openai.resources  # noqa: F401
from openai import OpenAI

from rlsys.environments.client import RemoteEpisode


def solve(task):
    client = OpenAI()
    messages = [{"role": "user", "content": task["question"]}]
    with RemoteEpisode.for_agent(task) as episode:
        while True:
            message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            step = episode.step(message.content)
            if step["done"]:
                return
            messages += [message, *step["messages"]]
