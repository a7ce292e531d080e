"""An agent with OpenAI's client and a tool: the model calls the tool, an environment answers.

Each response is one run of `solve`. The tool runs in a separate process. If that process is killed, it is started
again, and the earlier calls are repeated.
"""

import openai.resources.chat.completions  # noqa: F401  (the client would import it in each run of the agent: once, before, is cheaper)
from openai import OpenAI

from rlsys.environments.client import RemoteEpisode


def solve(task: dict) -> None:
    client = OpenAI()
    messages: list = [{"role": "user", "content": task["question"]}]
    with RemoteEpisode.for_agent(task) as episode:
        while True:
            said = client.chat.completions.create(
                model="policy", messages=messages, tools=episode.tools
            ).choices[0]
            if said.finish_reason != "tool_calls":
                return
            calls = [
                {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
                for c in said.message.tool_calls
            ]
            messages += [said.message, *episode.step("", calls)["messages"]]
