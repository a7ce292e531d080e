"""Answers in the formats of three APIs: SGLang's /generate, OpenAI's completions and OpenAI's chat completions."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.agents import chat
from rlsys.agents import messages as agents
from rlsys.agents.messages import ToolCall
from rlsys.core.types import Sample
from rlsys.gateway.api_requests import CHAT, COMPLETIONS, ApiRequest
from rlsys.gateway.generation import Generation
from rlsys.gateway.response_text import ResponseText
from rlsys.gateway.served_model import ServedModel
from rlsys.generators.parser_client import TAIL_IDS, Turn, TurnReader

Json = dict[str, Any]


class Answer:
    """The answer to one request, which may ask for several responses."""

    def __init__(self, request: ApiRequest, generations: Sequence[Generation], model: ServedModel) -> None:
        self._request, self._generations, self._model = request, generations, model
        self._name, self._created = uuid.uuid4().hex, int(time.time())
        self._texts = [ResponseText(g.request, model) for g in generations]
        self._sent_tokens = [0] * len(generations)
        """Number of tokens of each response that were sent."""

    def events(self, index: int, *, final: bool) -> AsyncIterator[Json]:
        """Yield the events of a stream for the tokens of a response that arrived since the last call.

        Args:
            index: index of the response.
            final: whether the response is complete.
        """
        raise NotImplementedError

    def closing(self) -> Iterator[Json]:
        """Yield the events at the end of a stream, after the last event of each response."""
        return iter(())

    async def result(self) -> Json | list[Json]:
        """Return the answer as JSON, after all responses are complete."""
        raise NotImplementedError

    def _advance(self, index: int, *, final: bool) -> tuple[str, slice]:
        """Return the new text of a response, and the positions of its new tokens."""
        generation, text = self._generations[index], self._texts[index]
        positions = slice(self._sent_tokens[index], len(generation.ids))
        self._sent_tokens[index] = positions.stop
        if final:
            return text.conclude(generation.ids, at_stop=generation.is_stopped), positions
        return text.advance(generation.ids), positions

    def _text(self, index: int) -> str:
        """Return the text of a complete response."""
        generation = self._generations[index]
        return self._texts[index].final(generation.ids, at_stop=generation.is_stopped)

    def _usage(self) -> Json:
        """Return the token counts of all prompts and responses. A prompt counts once, even with several responses."""
        prompts = {g.request.prompt: len(g.request.prompt_ids) for g in self._generations}
        prompt, completion = sum(prompts.values()), sum(len(g.ids) for g in self._generations)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def _includes_usage(self) -> bool:
        return bool((self._request.body.get("stream_options") or {}).get("include_usage"))

    def _tops(self, index: int, token: int) -> list[tuple[float, int]]:
        """Return (log-prob, token id) of the most probable tokens at position `token` of a response."""
        tops = self._generations[index].tops
        return [] if tops is None else tops.by_token.get(token, [])


class GenerateAnswer(Answer):
    """Answer of SGLang's /generate."""

    async def events(self, index: int, *, final: bool) -> AsyncIterator[Json]:
        text, positions = self._advance(index, final=final)
        if positions.stop > positions.start or final:
            if not self._model.incremental:
                text, positions = self._texts[index].sent_text, slice(0, positions.stop)
            yield self._response(index, text, positions, final=final)

    async def result(self) -> Json | list[Json]:
        results = [
            self._response(i, self._text(i), slice(0, len(g.ids)), final=True)
            for i, g in enumerate(self._generations)
        ]
        return results if self._request.batch else results[0]

    def _response(self, index: int, text: str, tokens: slice, *, final: bool) -> Json:
        result: Json = {"output_ids": list(self._generations[index].ids[tokens])}
        if self._model.tokenizer is not None:
            result = {"text": text, **result}
        if self._request.batch:
            result["index"] = index
        if self._request.body.get("return_prompt_token_ids"):
            result["prompt_token_ids"] = self._generations[index].request.prompt_ids
        return {**result, "meta_info": self._meta(index, tokens, final=final)}

    def _meta(self, index: int, tokens: slice, *, final: bool) -> Json:
        generation = self._generations[index]
        request, sample = generation.request, generation.sample
        labels = [(_label(s.version), s.start, s.end) for s in sample.spans]
        meta: Json = {
            "id": self._name if len(self._generations) == 1 else f"{self._name}-{index}",
            "finish_reason": self._finish_reason(generation) if final else None,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(generation.ids),
            "cached_tokens": sample.cached_tokens,
            "weight_version": labels[-1][0] if labels else None,
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in labels],
        }
        if request.logprobs:
            positions = range(tokens.start, tokens.stop)
            pairs = [(sample.mu[i], generation.ids[i]) for i in positions]
            meta["output_token_logprobs"] = [self._entry(*pair) for pair in pairs]
            if request.top_logprobs:
                meta["output_top_logprobs"] = [
                    [self._entry(*pair) for pair in self._tops(index, i)] for i in positions
                ]
        if final and request.routes:
            meta["routed_experts"] = _routes(sample, self._model.experts_per_token)
        return meta

    def _entry(self, logprob: float, token: int) -> list[Any]:
        with_text = self._request.body.get("return_text_in_logprobs")
        return [logprob, token, self._model.decode([token]) if with_text else None]

    def _finish_reason(self, generation: Generation) -> Json:
        if not generation.is_stopped:
            return {"type": "length", "length": len(generation.ids)}
        text = self._model.decode(generation.ids)
        matched = next((t for t in generation.request.stop_texts if t in text), generation.ids[-1])
        return {"type": "stop", "matched": matched}


class CompletionAnswer(Answer):
    """Answer of OpenAI's completions."""

    async def events(self, index: int, *, final: bool) -> AsyncIterator[Json]:
        text, positions = self._advance(index, final=final)
        if text or final or (positions.stop > positions.start and self._generations[index].request.logprobs):
            yield {**self._head, "choices": [self._choice(index, text, positions, final=final)]}

    def closing(self) -> Iterator[Json]:
        if self._includes_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def result(self) -> Json:
        choices = [
            self._choice(i, self._text(i), slice(0, len(g.ids)), final=True)
            for i, g in enumerate(self._generations)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    @property
    def _head(self) -> Json:
        model = str(self._request.body.get("model") or "policy")
        return {
            "id": f"cmpl-{self._name}",
            "object": "text_completion",
            "created": self._created,
            "model": model,
        }

    def _choice(self, index: int, text: str, tokens: slice, *, final: bool) -> Json:
        generation = self._generations[index]
        logprobs = None
        if generation.request.logprobs:
            positions = range(tokens.start, tokens.stop)
            logprobs = {
                "tokens": [self._model.decode([generation.ids[i]]) for i in positions],
                "token_logprobs": [generation.sample.mu[i] for i in positions],
                "top_logprobs": [
                    {self._model.decode([token]): value for value, token in self._tops(index, i)}
                    for i in positions
                ],
                "text_offset": [-1] * len(positions),
            }
        finish = _finish(generation) if final else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class ChatAnswer(Answer):
    """Answer of OpenAI's chat completions.

    A parser of reasoning or tool calls needs the whole response. The stream then has one event each for reasoning,
    content and every tool call.
    """

    def __init__(self, request: ApiRequest, generations: Sequence[Generation], model: ServedModel) -> None:
        super().__init__(request, generations, model)
        calls = model.parses_calls and bool(request.tools)
        reasoning = model.parses_reasoning and request.body.get("separate_reasoning") is not False
        self._reader = model.reader if calls or reasoning else None
        self._opened = [False] * len(generations)
        self._messages: dict[int, agents.Answer] = {}

    async def events(self, index: int, *, final: bool) -> AsyncIterator[Json]:
        if not self._opened[index]:
            self._opened[index] = True
            yield self._chunk(index, chat.OPENING)
        if self._reader is not None and not final:
            return
        text, positions = self._advance(index, final=final)
        logprobs = self._logprobs(index, positions)
        if self._reader is None:
            if text or logprobs:
                yield self._chunk(index, {"content": text}, logprobs=logprobs)
        else:
            for delta in chat.deltas(await self._parse(index)):
                yield self._chunk(index, delta, logprobs=logprobs)
                logprobs = None
        if final:
            answer = await self._parse(index)
            yield self._chunk(index, {}, answer.finish)

    def closing(self) -> Iterator[Json]:
        if self._includes_usage:
            yield {**self._head(chat.CHUNK), "choices": [], "usage": self._usage()}

    async def result(self) -> Json:
        choices = [
            chat.choice(await self._parse(i), i, self._logprobs(i, slice(0, len(g.ids))))
            for i, g in enumerate(self._generations)
        ]
        return {**self._head(chat.COMPLETION), "choices": choices, "usage": self._usage()}

    def _head(self, kind: str) -> Json:
        return chat.head(self._name, self._request.body, kind, self._created)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        finish: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> Json:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return {**self._head(chat.CHUNK), "choices": [choice]}

    def _logprobs(self, index: int, tokens: slice) -> Json | None:
        generation = self._generations[index]
        if not generation.request.logprobs or tokens.start == tokens.stop:
            return None
        rows = [
            {
                **self._token_logprob(generation.sample.mu[i], generation.ids[i]),
                "top_logprobs": [self._token_logprob(*pair) for pair in self._tops(index, i)],
            }
            for i in range(tokens.start, tokens.stop)
        ]
        return {"content": rows, "refusal": None}

    def _token_logprob(self, logprob: float, token: int) -> Json:
        text = self._model.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    async def _parse(self, index: int) -> agents.Answer:
        """Return a complete response as a message, which is parsed once."""
        if index not in self._messages:
            self._messages[index] = await self._read_message(index)
        return self._messages[index]

    async def _read_message(self, index: int) -> agents.Answer:
        generation = self._generations[index]
        if self._reader is None:
            turn = Turn(self._text(index))
        else:
            turn = await self._parse_turn(index, self._reader)
        calls = tuple(
            ToolCall(f"call_{self._name}_{index}_{i}", call.name, call.arguments)
            for i, call in enumerate(turn.calls)
        )
        finish = _finish(generation)
        return agents.Answer(
            self._name,
            turn.text,
            turn.reasoning,
            calls,
            "tool_calls" if calls and finish == "stop" else finish,
            len(generation.request.prompt_ids),
            len(generation.ids),
        )

    async def _parse_turn(self, index: int, reader: TurnReader) -> Turn:
        """Parse reasoning and tool calls of a complete response. Parsers read its special tokens as text."""
        generation = self._generations[index]
        request, ids = generation.request, list(generation.ids)
        if generation.is_stopped and ids and ids[-1] in request.stop_ids:
            ids = ids[:-1]
        text = self._model.decode(ids)
        preceding_text = self._model.decode(request.prompt_ids[-TAIL_IDS:])
        if generation.is_stopped:
            text = text[: self._texts[index].stop_position(text)]
        turn = await reader(text, preceding_text, self._request.tools)
        if not request.skip_special:
            return turn
        tokenizer = self._model.require_tokenizer("messages")
        return Turn(
            tokenizer.without_special(turn.text), tokenizer.without_special(turn.reasoning), turn.calls
        )


def answer_to(request: ApiRequest, generations: Sequence[Generation], model: ServedModel) -> Answer:
    """Create the answer to a request, in the format of the request's API."""
    classes = {COMPLETIONS: CompletionAnswer, CHAT: ChatAnswer}
    return classes.get(request.path, GenerateAnswer)(request, generations, model)


def _finish(generation: Generation) -> str:
    return "stop" if generation.is_stopped else "length"


def _label(version: int) -> str:
    """Return SGLang's label of a weight version: the number, or `default` if the server was started without one."""
    return str(version) if version >= 0 else "default"


def _routes(sample: Sample, experts_per_token: int) -> str | None:
    """Return the routed experts of all positions in SGLang's format; None if those of a position are unknown.

    Args:
        sample: the response, with T positions that the model has computed.
        experts_per_token: number of experts that a token is routed to in all layers together, E.

    Returns:
        base64 of int32 [T, E].
    """
    rows, end = [], 0
    for span in sample.routes:
        positions = span.end - span.start
        width, remainder = divmod(len(span.experts), positions * experts_per_token)
        if span.start != end or remainder or width not in (1, 2):
            return None
        rows.append(np.frombuffer(span.experts, f"<u{width}").astype("<i4"))
        end = span.end
    if not rows or end != len(sample.prompt_ids) + len(sample.response_ids) - 1:
        return None
    return base64.b64encode(np.concatenate(rows).tobytes()).decode()
