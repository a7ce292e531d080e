"""Rows with answers, for `rlsys sft`: chats to imitate, pairs of answers to compare, answers marked good or bad.

Rows are those that TRL knows: `messages`; or `prompt` with `completion`, with `chosen` and `rejected`, or with
`completion` and `label`. An answer is a text, exactly as the model writes it after its turn was opened, or messages,
which the model's chat template writes. Where a row has ids beside (`prompt_ids`, `completion_ids`, ...), as those of
`rlsys samples --rows` have, they are what is learned.
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
from rlsys.data.rows import Entry, Message, check_texts, described, read_messages, read_row, tools_of
from rlsys.data.tables import read_rows
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.trace import Trace

Batches = Callable[[int], list[Trace]]
"""The traces of a 0-based step, always the same ones."""
_LARGEST_MARGIN = 1e6
"""Difference of two rewards; also keeps NaN and infinities out of a loss."""


class AnswerParams(Section):
    path: Paths
    """File of JSON lines, JSON array or Parquet file, a folder or glob of them, or a list of these."""
    batch: Positive = 64
    """Rows of one train step."""
    shuffle_seed: NonNegative = 0
    """Further seed of the order, which changes with each epoch; data.seed and run.seed change it too."""


class ChatParams(AnswerParams):
    train: Literal["all", "last"] = "all"
    """Which turns of the assistant are imitated."""


def chats(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Rows with `messages` that end with the assistant's turn, or with `prompt` and `completion`."""
    p = parse_params("sft.params", ChatParams, params)

    def traces(row: Entry, where: str) -> list[Trace]:
        key = "completion" if "completion" in row else "messages"
        return [_answer(row, key, where, config, tokenizer, every=p.train == "all")]

    return _Rows(config, p, ("completion", "messages"), traces).batch


def pairs(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Rows with `chosen` and `rejected`, with a `prompt` or as whole chats, and perhaps a `margin`."""

    def traces(row: Entry, where: str) -> list[Trace]:
        made = [_answer(row, key, where, config, tokenizer) for key in ("chosen", "rejected")]
        made[0].margin = made[1].margin = _margin(row.get("margin"), where)
        made[1].liked = False
        return made

    return _Rows(
        config, parse_params("sft.params", AnswerParams, params), ("chosen", "rejected"), traces
    ).batch


def labels(config: Config, tokenizer: Tokenizer, **params: Any) -> Batches:
    """Rows with `prompt`, `completion` and `label`, which is true for a good answer."""

    def traces(row: Entry, where: str) -> list[Trace]:
        made = _answer(row, "completion", where, config, tokenizer)
        if row.get("label") not in (True, False):
            raise UserError(f"{where}: label is {row.get('label')!r}; expected true or false")
        made.liked = bool(row["label"])
        return [made]

    return _Rows(config, parse_params("sft.params", AnswerParams, params), ("completion",), traces).batch


class _Rows:
    """Rows of files, in an order of their own in each epoch."""

    def __init__(
        self,
        config: Config,
        params: AnswerParams,
        keys: tuple[str, ...],
        traces: Callable[[Entry, str], list[Trace]],
    ) -> None:
        """`keys`: a row has the first of them, at least. `traces`: of a row and its place, for messages."""
        with of_field("sft.params"):
            self._table = read_rows(params.path)
        for i in range(len(self._table)):  # now, not in the middle of the run
            row = self._table.row(i)
            if not isinstance(row, dict) or not any(row.get(key) for key in keys):
                found = ", ".join(row) if isinstance(row, dict) else described(row)
                raise UserError(f"{self._table.place(i)}: expected {' or '.join(keys)}, found {found}")
            check_texts(row, self._table.place(i))
        self._longest, self._size, self._traces = config.trainer.token_budget, params.batch, traces
        self._seed = ("answers", config.data.seed + config.run.seed, params.shuffle_seed)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def batch(self, step: int) -> list[Trace]:
        """Raises UserError, one line, for a row that is not as it should be or does not fit."""
        out: list[Trace] = []
        for i in range(self._size):
            epoch, place = divmod(step * self._size + i, len(self._table))
            number = self._order(epoch)[place]
            where = self._table.place(number)
            for trace in self._traces(self._table.row(number), where):
                length = len(trace.prompt_ids) + len(trace.response_ids)
                if length > self._longest:
                    raise UserError(
                        f"{where}: {length} tokens; expected at most trainer.token_budget = {self._longest}"
                    )
                trace.pair = i
                out.append(trace)
        return out

    def _epoch_order(self, epoch: int) -> list[int]:
        return sorted(range(len(self._table)), key=lambda i: stable_hash(*self._seed, epoch, i, bits=64))


def _answer(
    row: Entry, key: str, where: str, config: Config, tokenizer: Tokenizer, every: bool = False
) -> Trace:
    """The answer under `key`, to the row's `prompt`; without one, `key` is the whole chat."""
    if f"{key}_ids" in row:
        return Trace(_ids(row, "prompt_ids", where, tokenizer), _ids(row, f"{key}_ids", where, tokenizer))
    found = row.get(key)
    if not isinstance(found, str | list) or not found:
        raise UserError(f"{where}: {key} is {described(found)}; expected a text or messages")
    answer = found if isinstance(found, str) else read_messages(found, where)
    if config.data.keys.prompt or "prompt" in row:
        asked = read_row(row, config.data.keys, where)
        prompt, tools = asked.messages, asked.tools
    else:
        turns = [i for i, m in enumerate(answer) if isinstance(m, dict) and m["role"] == "assistant"]
        if isinstance(answer, str) or not turns:
            raise UserError(f"{where}: {key} has no turn of the assistant, and there is no prompt beside it")
        first = turns[0] if every else turns[-1]
        tools = tools_of(row, config.data.keys.tools, where)
        prompt, answer = answer[:first], answer[first:]
    try:
        return written(tokenizer, prompt, answer, tools, every)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None


def _margin(value: Any, location: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_MARGIN:
        return float(value)
    words = value if isinstance(value, float) else described(value)
    raise UserError(f"{location}: margin is {words}; expected a number below {_LARGEST_MARGIN:g}")


def _ids(row: Entry, key: str, where: str, tokenizer: Tokenizer) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise UserError(f"{where}: {key} is {described(ids)}; expected a list of ids")
    if (most := max(ids)) >= tokenizer.vocab_size or min(ids) < 0:
        raise UserError(
            f"{where}: {key} has id {most}, of 0 to {tokenizer.vocab_size - 1}: another model's tokens?"
        )
    return ids


def written(
    tokenizer: Tokenizer,
    prompt: list[Message],
    answer: str | list[Message],
    tools: list[dict[str, Any]] | None = None,
    every: bool = False,
) -> Trace:
    """The ids that the model should have written: an answer's own turns, each to the stop id that ends it. `every`:
    all turns of the assistant in `answer`, else the last one.

    A turn ends with the last stop id that the chat template writes in it; where it writes none, with the next role's
    mark if that is a stop id (GLM), and an answer with the tokenizer's turn_end_id.

    Pieces are encoded one by one, as a rollout does it. Raises UserError where the chat template does not write a
    turn behind what stood there when it was opened.
    """
    so_far = tokenizer.apply_chat(prompt, tools=tools)
    prompt_ids = tokenizer.encode(so_far)
    if isinstance(answer, str):
        return Trace(prompt_ids, _ended(tokenizer, tokenizer.encode(answer)))
    if answer[-1]["role"] != "assistant":
        raise UserError(f"the answer ends with the turn of {answer[-1]['role']}; expected the assistant's")
    ids: list[int] = []
    trained: list[bool] = []
    stop_ids = tokenizer.stop_ids
    for i, message in enumerate(answer):
        own = message["role"] == "assistant"
        text = tokenizer.apply_chat([*prompt, *answer[: i + 1]], generate=not own, tools=tools)
        if not text.startswith(so_far):
            last = "; or imitate the last turn alone (sft.params: {train: last})" if i else ""
            raise UserError(
                f"the chat template writes the chat otherwise once turn {len(prompt) + i + 1} is there: what the "
                f"model would have written cannot be told, because it does not begin with {so_far[-30:]!r} any more; "
                f"give the turns before as prompt, and as completion the text that the model writes after them{last}"
            )
        piece = tokenizer.encode(text[len(so_far) :])
        ends = [k + 1 for k, token in enumerate(piece) if token in stop_ids]
        mine = (ends[-1] if ends else len(piece)) if own and (every or i == len(answer) - 1) else 0
        if not own and ends[:1] == [1] and trained and trained[-1] and ids[-1] not in stop_ids:
            mine = 1  # the next role's mark ends the turn before it
        ids += piece
        trained += [True] * mine + [False] * (len(piece) - mine)
        so_far = text
    while not trained[-1]:  # what the template writes behind the end
        ids.pop(), trained.pop()
    ids = _ended(tokenizer, ids)
    return Trace(prompt_ids, ids, trained + [True] * (len(ids) - len(trained)))


def _ended(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """An answer with a stop id at its end."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.turn_end_id]
