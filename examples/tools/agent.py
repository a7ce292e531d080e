"""An agent with OpenAI's client and a tool: the model calls the tool, and an environment executes the calls.

Each response is one run of `solve`. The tool runs in a separate process. If that process is killed, it is started
again, and the earlier calls are repeated.
"""

import openai.resources.chat.completions  # noqa: F401  (the client imports it lazily, in each run; here, only once)
from openai import OpenAI

from rlsys.environments.client import RemoteEpisode


def solve(task: dict) -> None:
    """Query the model until it answers without a tool call."""
    client = OpenAI()
    messages: list = [{"role": "user", "content": task["question"]}]
    with RemoteEpisode.for_agent(task) as episode:
        while True:
            choice = client.chat.completions.create(
                model="policy", messages=messages, tools=episode.tools
            ).choices[0]
            if choice.finish_reason != "tool_calls":
                return
            calls = [
                {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
                for c in choice.message.tool_calls
            ]
            messages += [choice.message, *episode.step("", calls)["messages"]]
