"""The agent of agent.py with OpenAI's Agents SDK, which runs the loop of requests and tool calls."""

import openai.resources.chat.completions  # noqa: F401  (see agent.py)
from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from rlsys.environments.client import RemoteEpisode

set_tracing_disabled(True)  # otherwise the SDK sends a trace of each run to OpenAI


async def solve(task: dict) -> None:
    """Run the SDK's loop until the model answers without a tool call."""
    with RemoteEpisode.for_agent(task) as episode:
        agent = Agent(
            name="adder",
            model=OpenAIChatCompletionsModel("policy", AsyncOpenAI()),
            tools=[as_function(tool["function"], episode) for tool in episode.tools],
        )
        await Runner.run(agent, task["question"], max_turns=None)


def as_function(function: dict, episode: RemoteEpisode) -> FunctionTool:
    """Return a tool of the SDK whose calls the environment executes."""

    async def invoke(context, arguments: str) -> str:
        call = {"id": context.tool_call_id, "name": function["name"], "arguments": arguments}
        return episode.step("", [call])["messages"][0]["content"]

    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )
