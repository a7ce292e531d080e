"""A process that takes turns of the model apart as SGLang's server does: `python -m rlsys.engine.turn_parser`.

The first message is {"tool_call_parser", "reasoning_parser", "model", "trust_remote_code"}, every other one {"text",
"before", "tools"}; both are JSON. Only this process imports SGLang's parsers, and with them torch: seconds, and half
a GB of memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rlsys.core.process_pool import serve
from rlsys.engine.cpu.platform import declare_torchvision_ops

if not torch.cuda.is_available():
    declare_torchvision_ops()  # else transformers cannot import a torchvision that is built for CUDA

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import AutoTokenizer


def prepare(message: bytes) -> Callable[[bytes], dict[str, Any]]:
    names = json.loads(message)
    tokenizer = AutoTokenizer.from_pretrained(names["model"], trust_remote_code=names["trust_remote_code"])

    def parse(message: bytes) -> dict[str, Any]:
        """What SGLang's server answers a chat that is not streamed (serving_chat.py, _build_chat_response)."""
        said = json.loads(message)
        text, reasoning, found = said["text"], None, []
        tools = [Tool.model_validate(t) for t in said["tools"]] if names["tool_call_parser"] else []
        if names["reasoning_parser"]:
            text, reasoning = separate(text, said["before"], calls=bool(tools))
        if tools:
            parser = FunctionCallParser(tools, names["tool_call_parser"], tokenizer=tokenizer)
            if parser.has_tool_call(text):
                text, found = parser.parse_non_stream(text)
        calls = [{"name": call.name, "arguments": call.parameters} for call in found]
        return {"text": text, "reasoning": reasoning or "", "calls": calls}

    def separate(text: str, before: str, *, calls: bool) -> tuple[str, str | None]:
        """The answer and the reasoning before it. Reasoning that the prompt has opened has no mark of its own; else
        the parser's own default holds."""

        def parser(force: bool | None) -> ReasoningParser:
            return ReasoningParser(
                names["reasoning_parser"], stream_reasoning=False, force_reasoning=force, tokenizer=tokenizer,
                tool_call_parser_active=calls,
            )  # fmt: skip

        made = parser(None)
        if before.rstrip().endswith(made.detector.think_start_token):
            made = parser(True)
        reasoning, answer = made.parse_non_stream(text)
        return answer or "", reasoning

    return parse


if __name__ == "__main__":
    serve(prepare, lambda error: "")
