"""The agent of agent.py with Anthropic's client."""

import json

import anthropic.resources.messages  # noqa: F401  (once, before: see agent.py)
from anthropic import Anthropic

from rlsys.environments.client import RemoteEpisode


def solve(task: dict) -> None:
    client = Anthropic()
    messages: list = [{"role": "user", "content": task["question"]}]
    with RemoteEpisode.for_agent(task) as episode:
        tools = [in_their_form(tool["function"]) for tool in episode.tools]
        while True:
            said = client.messages.create(model="policy", max_tokens=256, messages=messages, tools=tools)
            if said.stop_reason != "tool_use":
                return
            calls = [b for b in said.content if b.type == "tool_use"]
            told = episode.step(
                "", [{"id": c.id, "name": c.name, "arguments": json.dumps(c.input)} for c in calls]
            )
            results = [
                {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
                for m in told["messages"]
            ]
            messages += [
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": results},
            ]


def in_their_form(function: dict) -> dict:
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
