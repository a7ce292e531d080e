"""The agent of agent.py with Anthropic's client."""

import json

import anthropic.resources.messages  # noqa: F401  (see agent.py)
from anthropic import Anthropic

from rlsys.environments.client import RemoteEpisode


def solve(task: dict) -> None:
    """Query the model until it answers without a tool call."""
    client = Anthropic()
    messages: list = [{"role": "user", "content": task["question"]}]
    with RemoteEpisode.for_agent(task) as episode:
        tools = [anthropic_tool(tool["function"]) for tool in episode.tools]
        while True:
            reply = client.messages.create(model="policy", max_tokens=256, messages=messages, tools=tools)
            if reply.stop_reason != "tool_use":
                return
            calls = [b for b in reply.content if b.type == "tool_use"]
            step = episode.step(
                "", [{"id": c.id, "name": c.name, "arguments": json.dumps(c.input)} for c in calls]
            )
            results = [
                {"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}
                for m in step["messages"]
            ]
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results},
            ]


def anthropic_tool(function: dict) -> dict:
    """Return an OpenAI function schema in Anthropic's form."""
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
