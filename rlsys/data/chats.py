"""Rows with answers, for `rlsys sft`: chats to imitate, pairs of answers to compare, answers labelled good or bad.

Rows have TRL's formats: `messages`; or `prompt` with `completion`, with `chosen` and `rejected`, or with
`completion` and `label`. An answer is a text that the model should generate after its turn was opened, or messages,
which the chat template renders. If a row also has ids (`prompt_ids`, `completion_ids`, ...), as rows of `rlsys
samples --rows` do, the ids are used.
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
"""Function from a 0-based step to its traces, which are always the same."""
_LARGEST_MARGIN = 1e6
"""Bound of the difference of two rewards, which also excludes NaN and infinity."""


class AnswerParams(Section):
    path: Paths
    """File of JSON lines, JSON array or Parquet file, a folder or glob of them, or a list of these."""
    batch: Positive = 64
    """Rows of one train step."""
    shuffle_seed: NonNegative = 0
    """Seed of the order, which changes with each epoch, in addition to data.seed and run.seed."""


class ChatParams(AnswerParams):
    train: Literal["all", "last"] = "all"
    """Turns of the assistant to imitate: all, or only the last one."""


def chats(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Return batches of rows with `messages` that end with the assistant's turn, or with `prompt` and
    `completion`."""
    p = parse_params("sft.params", ChatParams, params)

    def traces(row: Entry, location: str) -> list[Trace]:
        key = "completion" if "completion" in row else "messages"
        return [_answer(row, key, location, config, tokenizer, all_turns=p.train == "all")]

    return _Rows(config, p, ("completion", "messages"), traces).batch


def pairs(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Return batches of rows with `chosen` and `rejected`, with a `prompt` or as whole chats, and optional
    `margin`."""

    def traces(row: Entry, location: str) -> list[Trace]:
        answers = [_answer(row, key, location, config, tokenizer) for key in ("chosen", "rejected")]
        answers[0].margin = answers[1].margin = _margin(row.get("margin"), location)
        answers[1].liked = False
        return answers

    return _Rows(
        config, parse_params("sft.params", AnswerParams, params), ("chosen", "rejected"), traces
    ).batch


def labels(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Return batches of rows with `prompt`, `completion` and `label`, which is true for a good answer."""

    def traces(row: Entry, location: str) -> list[Trace]:
        answer = _answer(row, "completion", location, config, tokenizer)
        if row.get("label") not in (True, False):
            raise UserError(f"{location}: label is {row.get('label')!r}; expected true or false")
        answer.liked = bool(row["label"])
        return [answer]

    return _Rows(config, parse_params("sft.params", AnswerParams, params), ("completion",), traces).batch


class _Rows:
    """Rows of files, in another order in each epoch."""

    def __init__(
        self,
        config: Config,
        params: AnswerParams,
        keys: tuple[str, ...],
        traces: Callable[[Entry, str], list[Trace]],
    ) -> None:
        """Read and check the rows.

        Args:
            keys: a row has at least the first of them.
            traces: (row, its location for messages) -> its traces.
        """
        with of_field("sft.params"):
            self._table = read_rows(params.path)
        for i in range(len(self._table)):  # now, not in the middle of the run
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
        out: list[Trace] = []
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
                out.append(trace)
        return out

    def _epoch_order(self, epoch: int) -> list[int]:
        return sorted(range(len(self._table)), key=lambda i: stable_hash(*self._seed, epoch, i, bits=64))


def _answer(
    row: Entry, key: str, location: str, config: Config, tokenizer: Tokenizer, all_turns: bool = False
) -> Trace:
    """Return the trace of the answer under `key` to the row's `prompt`; without one, `key` is the whole chat."""
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
                f"{location}: {key} has no turn of the assistant; expected one, or a prompt in the row"
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
    description = value if isinstance(value, float) else describe_type(value)
    raise UserError(f"{location}: margin is {description}; expected a number below {_LARGEST_MARGIN:g}")


def _ids(row: Entry, key: str, location: str, tokenizer: Tokenizer) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{location}: {key} is {describe_type(ids)}; expected a list of token ids, not empty")
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
    """Return the ids that the model should generate for an answer; each turn ends with its stop id.

    The end of a turn is the last stop id that the chat template writes in it, or else the next role's token if that
    is a stop id (GLM). An answer without either gets the tokenizer's turn_end_id. Turns are encoded one by one, as
    in a rollout.

    Args:
        all_turns: train on all turns of the assistant in `answer`, else on the last one.

    Raises:
        UserError: the chat template changes earlier text when a turn is added.
    """
    so_far = tokenizer.apply_chat(prompt, tools=tools)
    prompt_ids = tokenizer.encode(so_far)
    if isinstance(answer, str):
        return Trace(prompt_ids, _with_turn_end(tokenizer, tokenizer.encode(answer)))
    if answer[-1]["role"] != "assistant":
        raise UserError(f"the answer ends with the turn of {answer[-1]['role']}; expected the assistant's")
    ids: list[int] = []
    trained: list[bool] = []
    stop_ids = tokenizer.stop_ids
    for i, message in enumerate(answer):
        is_answer = message["role"] == "assistant"
        text = tokenizer.apply_chat([*prompt, *answer[: i + 1]], generate=not is_answer, tools=tools)
        if not text.startswith(so_far):
            last = "; or imitate only the last turn (sft.params: {train: last})" if i else ""
            raise UserError(
                f"the chat template changes earlier text when turn {len(prompt) + i + 1} is added, so the text that "
                f"the model would generate is undefined: the chat no longer starts with ...{so_far[-30:]!r}; use the "
                f"earlier turns as prompt, and the text that the model generates after them as completion{last}"
            )
        piece = tokenizer.encode(text[len(so_far) :])
        ends = [k + 1 for k, token in enumerate(piece) if token in stop_ids]
        trained_tokens = (
            (ends[-1] if ends else len(piece)) if is_answer and (all_turns or i == len(answer) - 1) else 0
        )
        if not is_answer and ends[:1] == [1] and trained and trained[-1] and ids[-1] not in stop_ids:
            trained_tokens = 1  # the next role's mark ends the turn before it
        ids += piece
        trained += [True] * trained_tokens + [False] * (len(piece) - trained_tokens)
        so_far = text
    while not trained[-1]:  # text of the template after the end
        ids.pop(), trained.pop()
    ids = _with_turn_end(tokenizer, ids)
    return Trace(prompt_ids, ids, trained + [True] * (len(ids) - len(trained)))


def _with_turn_end(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return an answer with a stop id at its end."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.turn_end_id]
