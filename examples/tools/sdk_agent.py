"""The agent of agent.py with OpenAI's Agents SDK, which asks, calls and asks again by itself."""

import openai.resources.chat.completions  # noqa: F401  (once, before: see agent.py)
from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from rlsys.environments.client import RemoteEpisode

set_tracing_disabled(True)  # else it sends what happened to OpenAI


async def solve(task: dict) -> None:
    with RemoteEpisode.for_agent(task) as episode:
        agent = Agent(
            name="adder",
            model=OpenAIChatCompletionsModel("policy", AsyncOpenAI()),
            tools=[as_function(tool["function"], episode) for tool in episode.tools],
        )
        await Runner.run(agent, task["question"], max_turns=None)


def as_function(function: dict, episode: RemoteEpisode) -> FunctionTool:
    """A tool whose answers are the environment's."""

    async def call(context, arguments: str) -> str:
        made = {"id": context.tool_call_id, "name": function["name"], "arguments": arguments}
        return episode.step("", [made])["messages"][0]["content"]

    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=call,
        strict_json_schema=False,
    )
