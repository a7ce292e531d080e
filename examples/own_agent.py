"""An agent of one's own: a program with OpenAI's client, as it would ask any other server.

    rlsys train examples/own_agent.yaml

Each response is one run of it. An address and a key of its own are in its environment, where the client finds them.
What the model answers is trained; what the agent says in between is not. Here a checker is the agent's tool: after a
wrong answer the model may try once more.
"""

import openai.resources  # noqa: F401  (the client would import it in each run of the agent: once, before, is cheaper)
from openai import OpenAI


def second_chance(task: dict) -> None:
    """`task`: the row of the data, and `question`, what the user says."""
    client = OpenAI()
    messages = [{"role": "user", "content": task["question"]}]
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    if f"<answer>{task['answer']}</answer>" in said.content:
        return
    messages += [said, {"role": "user", "content": "again"}]
    client.chat.completions.create(model="policy", messages=messages)
