"""A process that parses the model's turns as SGLang's server does: `python -m rlsys.engine.turn_parser`.

Messages are JSON objects with these keys:

    first message       tool_call_parser, reasoning_parser, model, trust_remote_code
    each later message  text, before, tools
    each response       text, reasoning, calls

Only this process imports SGLang's parsers and torch, which takes seconds and half a GB of memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rlsys.core.process_pool import serve
from rlsys.engine.cpu.platform import declare_torchvision_ops

if not torch.cuda.is_available():
    declare_torchvision_ops()  # otherwise transformers cannot import a torchvision that is built for CUDA

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import AutoTokenizer


def prepare(message: bytes) -> Callable[[bytes], dict[str, Any]]:
    """Load the tokenizer of the first message, and return the function that handles later messages."""
    names = json.loads(message)
    tokenizer = AutoTokenizer.from_pretrained(names["model"], trust_remote_code=names["trust_remote_code"])

    def parse(message: bytes) -> dict[str, Any]:
        """Parse a turn like SGLang's server without streaming (serving_chat.py, _build_chat_response)."""
        turn = json.loads(message)
        text, reasoning, items = turn["text"], None, []
        tools = [Tool.model_validate(t) for t in turn["tools"]] if names["tool_call_parser"] else []
        if names["reasoning_parser"]:
            text, reasoning = separate(text, turn["before"], calls=bool(tools))
        if tools:
            parser = FunctionCallParser(tools, names["tool_call_parser"], tokenizer=tokenizer)
            if parser.has_tool_call(text):
                text, items = parser.parse_non_stream(text)
        calls = [{"name": call.name, "arguments": call.parameters} for call in items]
        return {"text": text, "reasoning": reasoning or "", "calls": calls}

    def separate(text: str, prompt: str, *, calls: bool) -> tuple[str, str | None]:
        """Split a turn into answer and reasoning.

        If the prompt ends with the token that starts reasoning, the turn begins with reasoning, without this token.
        """

        def parser(force: bool | None) -> ReasoningParser:
            return ReasoningParser(
                names["reasoning_parser"], stream_reasoning=False, force_reasoning=force, tokenizer=tokenizer,
                tool_call_parser_active=calls,
            )  # fmt: skip

        splitter = parser(None)
        if prompt.rstrip().endswith(splitter.detector.think_start_token):
            splitter = parser(True)
        reasoning, answer = splitter.parse_non_stream(text)
        return answer or "", reasoning

    return parse


if __name__ == "__main__":
    serve(prepare, lambda error: "")
