"""Agents for tests, with the clients of OpenAI and Anthropic as they are installed."""

import asyncio
import json

from anthropic import Anthropic
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


TOOL = {"name": "add", "description": "a sum", "input_schema": ADD["function"]["parameters"]}


def anthropics(task):
    _anthropics(task, lambda client, **asked: client.messages.create(**asked))


def anthropics_streamed(task):
    def create(client, **asked):
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    _anthropics(task, create)


def _anthropics(task, create):
    client = Anthropic()
    messages = [{"role": "user", "content": task["question"]}]
    while True:
        said = create(client, model="m", max_tokens=500, system="add", messages=messages, tools=[TOOL])
        if said.stop_reason != "tool_use":
            return
        messages.append({"role": "assistant", "content": said.content})
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": str(sum(b.input["terms"]))}
            for b in said.content
            if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def by_responses(task):
    _by_responses(task, lambda client, **asked: client.responses.create(**asked))


def by_responses_streamed(task):
    def create(client, **asked):
        with client.responses.stream(**asked) as stream:
            return stream.get_final_response()

    _by_responses(task, create)


def _by_responses(task, create):
    client, tool = OpenAI(), {"type": "function", **ADD["function"]}
    items = [{"role": "user", "content": task["question"]}]
    while True:
        said = create(client, model="m", instructions="add", input=items, tools=[tool])
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return
        for c in calls:
            found = str(sum(json.loads(c.arguments)["terms"]))
            items.append({"type": "function_call_output", "call_id": c.call_id, "output": found})
