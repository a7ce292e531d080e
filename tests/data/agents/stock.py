"""Agents for tests, with OpenAI's client as it is installed."""

import asyncio
import json

from openai import AsyncOpenAI, OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a sum",
        "parameters": {
            "type": "object",
            "properties": {"terms": {"type": "array", "items": {"type": "number"}}},
        },
    },
}


def add(call):
    return str(sum(json.loads(call.function.arguments)["terms"]))


def with_tools(task):
    client = OpenAI()
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": task["question"]}]
    while True:
        said = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0]
        if said.finish_reason != "tool_calls":
            return
        messages.append(said.message)
        for call in said.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call)})


def streamed(task):
    client = OpenAI()
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": task["question"]}]
    while True:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
            said = stream.get_final_completion().choices[0]
        if said.finish_reason != "tool_calls":
            return
        messages.append({"role": "assistant", "content": said.message.content, "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": "add", "arguments": c.function.arguments}}
            for c in said.message.tool_calls
        ]})  # fmt: skip
        for call in said.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call)})


async def with_tools_async(task):
    client = AsyncOpenAI()
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": task["question"]}]
    while True:
        said = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0]
        if said.finish_reason != "tool_calls":
            return
        messages.append(said.message.model_dump())
        calls = said.message.tool_calls
        for call, found in zip(calls, await asyncio.gather(*(later(c) for c in calls)), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


async def later(call):
    return add(call)


def parallel(task):
    """Two sub-agents at the same time, before it goes on."""

    async def run():
        client = AsyncOpenAI()
        first = [{"role": "user", "content": task["question"]}]
        said = (await client.chat.completions.create(model="m", messages=first)).choices[0].message
        asides = [[{"role": "user", "content": text}] for text in ("a", "b")]
        found = await asyncio.gather(*(client.chat.completions.create(model="m", messages=m) for m in asides))
        told = " ".join(sorted(f.choices[0].message.content for f in found))
        await client.chat.completions.create(
            model="m", messages=[*first, said.model_dump(), {"role": "user", "content": told}]
        )

    asyncio.run(run())
