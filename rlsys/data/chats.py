"""Rows with answers, for `rlsys sft`: chats to imitate, pairs of answers to compare, answers labelled good or bad.

Rows have the formats of TRL, by source of the traces:
    chats: `messages`, or `prompt` and `completion`.
    pairs: `chosen` and `rejected`, and `prompt` unless they are whole chats.
    labels: `prompt`, `completion` and `label`.

An answer is a text that the model should generate after its turn was opened, or messages, which the chat template
renders. If a row also has token ids (`prompt_ids`, `completion_ids`, ...), like the rows that `rlsys samples --rows`
writes, the ids are used instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import NonNegative, Positive, Section
from rlsys.core.errors import UserError
from rlsys.core.seeds import stable_hash
from rlsys.data.row_files import of_field
from rlsys.data.row_source import Paths
from rlsys.data.rows import Entry, Message, check_texts, describe_type, read_messages, read_row, tools_of
from rlsys.data.tables import read_rows
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.trace import Trace

Batches = Callable[[int], list[Trace]]
"""Function that returns the traces of a 0-based step, the same ones for each call with this step."""
_LARGEST_MARGIN = 1e6
"""Bound of the absolute value of a margin; it also excludes NaN and infinity."""


class AnswerParams(Section):
    path: Paths
    """A file (JSON lines, a JSON array or Parquet), a folder or glob of files, or a list of these."""
    batch: Positive = 64
    """Number of rows of one train step."""
    shuffle_seed: NonNegative = 0
    """Seed of the order of the rows, in addition to data.seed and run.seed. The order changes with each epoch."""


class ChatParams(AnswerParams):
    train: Literal["all", "last"] = "all"
    """Turns of the assistant to imitate: all, or only the last one."""


def chats(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Return the batches of rows with a chat that ends with the assistant's turn, or with a prompt and a completion.

    `params` are those of ChatParams.
    """
    p = parse_params("sft.params", ChatParams, params)

    def traces(row: Entry, location: str) -> list[Trace]:
        key = "completion" if "completion" in row else "messages"
        return [_answer(row, key, location, config, tokenizer, all_turns=p.train == "all")]

    return _Rows(config, p, ("completion", "messages"), traces).batch


def pairs(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Return the batches of rows with a chosen and a rejected answer, and optionally a margin between their rewards.

    `params` are those of AnswerParams.
    """

    def traces(row: Entry, location: str) -> list[Trace]:
        answers = [_answer(row, key, location, config, tokenizer) for key in ("chosen", "rejected")]
        answers[0].margin = answers[1].margin = _margin(row.get("margin"), location)
        answers[1].liked = False
        return answers

    return _Rows(
        config, parse_params("sft.params", AnswerParams, params), ("chosen", "rejected"), traces
    ).batch


def labels(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Return the batches of rows with a prompt, a completion and a label, which is true for a good completion.

    `params` are those of AnswerParams.
    """

    def traces(row: Entry, location: str) -> list[Trace]:
        answer = _answer(row, "completion", location, config, tokenizer)
        if row.get("label") not in (True, False):
            raise UserError(f"{location}: label is {row.get('label')!r}; expected true or false")
        answer.liked = bool(row["label"])
        return [answer]

    return _Rows(config, parse_params("sft.params", AnswerParams, params), ("completion",), traces).batch


class _Rows:
    """Rows of files, shuffled anew in each epoch."""

    def __init__(
        self,
        config: Config,
        params: AnswerParams,
        keys: tuple[str, ...],
        traces: Callable[[Entry, str], list[Trace]],
    ) -> None:
        """Read and check the rows.

        Args:
            keys: keys of answers; each row has at least one of them.
            traces: returns the traces of a row; its second argument is the row's location for messages.

        Raises:
            UserError: a file cannot be read, or a row has none of `keys`.
        """
        with of_field("sft.params"):
            self._table = read_rows(params.path)
        for i in range(len(self._table)):
            row = self._table.row(i)
            if not isinstance(row, dict) or not any(row.get(key) for key in keys):
                present = ", ".join(row) if isinstance(row, dict) else describe_type(row)
                raise UserError(f"{self._table.location(i)}: expected {' or '.join(keys)}, found {present}")
            check_texts(row, self._table.location(i))
        self._max_tokens, self._size, self._traces = config.trainer.token_budget, params.batch, traces
        self._seed = ("answers", config.data.seed + config.run.seed, params.shuffle_seed)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def batch(self, step: int) -> list[Trace]:
        """Return the traces of a step.

        Raises:
            UserError: a row is malformed, or too long for trainer.token_budget.
        """
        traces: list[Trace] = []
        for i in range(self._size):
            epoch, index = divmod(step * self._size + i, len(self._table))
            number = self._order(epoch)[index]
            location = self._table.location(number)
            for trace in self._traces(self._table.row(number), location):
                length = len(trace.prompt_ids) + len(trace.response_ids)
                if length > self._max_tokens:
                    raise UserError(
                        f"{location}: {length} tokens; expected at most trainer.token_budget = {self._max_tokens}"
                    )
                trace.pair = i
                traces.append(trace)
        return traces

    def _epoch_order(self, epoch: int) -> list[int]:
        return sorted(range(len(self._table)), key=lambda i: stable_hash(*self._seed, epoch, i, bits=64))


def _answer(
    row: Entry, key: str, location: str, config: Config, tokenizer: Tokenizer, all_turns: bool = False
) -> Trace:
    """Return the trace of a row's answer.

    Args:
        key: key of the answer, or of a chat with prompt and answer if the row has no prompt.
        all_turns: whether to train on all turns of the assistant, or on the last one only.

    Raises:
        UserError: the row is malformed; the message has its location.
    """
    if f"{key}_ids" in row:
        return Trace(
            _ids(row, "prompt_ids", location, tokenizer), _ids(row, f"{key}_ids", location, tokenizer)
        )
    value = row.get(key)
    if not isinstance(value, str | list) or not value:
        raise UserError(f"{location}: {key} is {describe_type(value)}; expected a text or messages")
    answer = value if isinstance(value, str) else read_messages(value, location)
    if config.data.keys.prompt or "prompt" in row:
        prompt_row = read_row(row, config.data.keys, location)
        prompt, tools = prompt_row.messages, prompt_row.tools
    else:
        turns = [i for i, m in enumerate(answer) if isinstance(m, dict) and m["role"] == "assistant"]
        if isinstance(answer, str) or not turns:
            raise UserError(
                f"{location}: the row has no prompt, and {key} has no message with the role assistant; "
                "expected one of them"
            )
        first = turns[0] if all_turns else turns[-1]
        tools = tools_of(row, config.data.keys.tools, location)
        prompt, answer = answer[:first], answer[first:]
    try:
        return encode_answer(tokenizer, prompt, answer, tools, all_turns)
    except UserError as e:
        raise UserError(f"{location}: {e}") from None


def _margin(value: Any, location: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_MARGIN:
        return float(value)
    description = f"{value!r:.80}" if type(value) in (int, float) else describe_type(value)
    limit = f"{_LARGEST_MARGIN:g}"
    raise UserError(f"{location}: margin is {description}; expected a number between -{limit} and {limit}")


def _ids(row: Entry, key: str, location: str, tokenizer: Tokenizer) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        description = "an empty list" if ids == [] else describe_type(ids)
        raise UserError(f"{location}: {key} is {description}; expected a list of token ids, not empty")
    invalid = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
    if invalid is not None:
        raise UserError(f"{location}: {key} has token id {invalid}; expected 0 to {tokenizer.vocab_size - 1}")
    return ids


def encode_answer(
    tokenizer: Tokenizer,
    prompt: list[Message],
    answer: str | list[Message],
    tools: list[dict[str, Any]] | None = None,
    all_turns: bool = False,
) -> Trace:
    """Encode a prompt and the ids that the model should generate for an answer, turn by turn as in a rollout.

    A turn ends with the last stop id that the chat template writes in it, or else with the next role's token if this
    token is a stop id (GLM). If the answer then has no stop id at its end, it gets the tokenizer's turn_end_id.

    Args:
        answer: text of one turn, or turns, of which the last one is the assistant's.
        all_turns: whether to train on all turns of the assistant, or on the last one only.

    Raises:
        UserError: the answer does not end with the assistant's turn, or the chat template changes earlier text when
            a turn is added.
    """
    text = tokenizer.apply_chat(prompt, tools=tools)
    prompt_ids = tokenizer.encode(text)
    if isinstance(answer, str):
        return Trace(prompt_ids, _with_turn_end(tokenizer, tokenizer.encode(answer)))
    if answer[-1]["role"] != "assistant":
        raise UserError(f"the answer ends with the turn of {answer[-1]['role']}; expected the assistant's")
    ids: list[int] = []
    trained: list[bool] = []
    stop_ids = tokenizer.stop_ids
    for i, message in enumerate(answer):
        is_assistant = message["role"] == "assistant"
        earlier_text = text
        text = tokenizer.apply_chat([*prompt, *answer[: i + 1]], generate=not is_assistant, tools=tools)
        if not text.startswith(earlier_text):
            raise UserError(_changed_text_error(earlier_text, len(prompt) + i + 1, answer_turn=i))
        turn_ids = tokenizer.encode(text[len(earlier_text) :])
        starts_with_stop = bool(turn_ids) and turn_ids[0] in stop_ids
        trained_tokens = 0
        if is_assistant and (all_turns or i == len(answer) - 1):
            trained_tokens = _length_to_last_stop(turn_ids, stop_ids)
        elif not is_assistant and starts_with_stop and trained and trained[-1] and ids[-1] not in stop_ids:
            trained_tokens = 1  # the token of this role ends the assistant's turn
        ids += turn_ids
        trained += [True] * trained_tokens + [False] * (len(turn_ids) - trained_tokens)
    while not trained[-1]:  # the template's text after the end of the last turn
        ids.pop()
        trained.pop()
    ids = _with_turn_end(tokenizer, ids)
    return Trace(prompt_ids, ids, trained + [True] * (len(ids) - len(trained)))


def _changed_text_error(earlier_text: str, turn: int, answer_turn: int) -> str:
    """Return the message for a template that changes earlier text.

    Args:
        turn: 1-based number of the added turn in the chat.
        answer_turn: 0-based number of the added turn in the answer.
    """
    last = "; or imitate only the last turn (sft.params: {train: last})" if answer_turn else ""
    return (
        f"the chat template changes earlier text when turn {turn} is added, so the text that the model would "
        f"generate is undefined: the chat no longer starts with ...{earlier_text[-30:]!r}; use the earlier turns as "
        f"prompt, and the text that the model generates after them as completion{last}"
    )


def _length_to_last_stop(ids: list[int], stop_ids: frozenset[int]) -> int:
    """Return the number of ids up to and including the last stop id; all of them if none is a stop id."""
    return next((i + 1 for i in reversed(range(len(ids))) if ids[i] in stop_ids), len(ids))


def _with_turn_end(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the ids of an answer, followed by the tokenizer's turn_end_id unless they end with a stop id."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.turn_end_id]
