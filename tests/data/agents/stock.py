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
        choice = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0]
        if choice.finish_reason != "tool_calls":
            return
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call)})


def streamed(task):
    client = OpenAI()
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": task["question"]}]
    while True:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
            choice = stream.get_final_completion().choices[0]
        if choice.finish_reason != "tool_calls":
            return
        messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": "add", "arguments": c.function.arguments}}
            for c in choice.message.tool_calls
        ]})  # fmt: skip
        for call in choice.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call)})


async def with_tools_async(task):
    client = AsyncOpenAI()
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": task["question"]}]
    while True:
        choice = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0]
        if choice.finish_reason != "tool_calls":
            return
        messages.append(choice.message.model_dump())
        calls = choice.message.tool_calls
        for call, tool_result in zip(calls, await asyncio.gather(*(later(c) for c in calls)), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": tool_result})


async def later(call):
    return add(call)


def parallel(task):
    """Two sub-agents at the same time, before it goes on."""

    async def run():
        client = AsyncOpenAI()
        first = [{"role": "user", "content": task["question"]}]
        reply = (await client.chat.completions.create(model="m", messages=first)).choices[0].message
        asides = [[{"role": "user", "content": text}] for text in ("a", "b")]
        completions = await asyncio.gather(
            *(client.chat.completions.create(model="m", messages=m) for m in asides)
        )
        aside_text = " ".join(sorted(f.choices[0].message.content for f in completions))
        await client.chat.completions.create(
            model="m", messages=[*first, reply.model_dump(), {"role": "user", "content": aside_text}]
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
        response = create(client, model="m", max_tokens=500, system="add", messages=messages, tools=[TOOL])
        if response.stop_reason != "tool_use":
            return
        messages.append({"role": "assistant", "content": response.content})
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": str(sum(b.input["terms"]))}
            for b in response.content
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
        response = create(client, model="m", instructions="add", input=items, tools=[tool])
        items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
        ]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return
        for c in calls:
            tool_output = str(sum(json.loads(c.arguments)["terms"]))
            items.append({"type": "function_call_output", "call_id": c.call_id, "output": tool_output})
