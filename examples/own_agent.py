"""A custom agent: an ordinary program that uses OpenAI's client.

    rlsys train examples/own_agent.yaml

Each response is one run of the program. Environment variables that the client reads contain the address and the key
of the response. The model's answers are trained; the agent's messages are not. This agent checks an answer: after a
wrong one the model may try once more.
"""

import openai.resources  # noqa: F401  (the client imports it lazily, in each run of the agent; here, once for all runs)
from openai import OpenAI


def second_chance(task: dict) -> None:
    """Ask the model a question, and once again if the answer is wrong.

    Args:
        task: the row of the data, plus `question`, the user's message.
    """
    client = OpenAI()
    messages = [{"role": "user", "content": task["question"]}]
    reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    if f"<answer>{task['answer']}</answer>" in reply.content:
        return
    messages += [reply, {"role": "user", "content": "again"}]
    client.chat.completions.create(model="policy", messages=messages)
