"""`data.source: environment`: the prompts of a single-turn `verifiers` environment, as prime-rl uses them.

`data.params.load` names the function that creates the environment. The source reads the environment's data set,
system prompt and few-shot examples; the reward `environment` calls its rubric. rlsys does not import verifiers.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from rlsys.config import Config
from rlsys.config.data import KeysConfig
from rlsys.config.plugins import one_line_errors, parse_params
from rlsys.core.errors import UserError
from rlsys.core.imports import import_attribute
from rlsys.data.row_source import RowParams, RowSource
from rlsys.data.source import PromptSource
from rlsys.data.tables import Arrow
from rlsys.data.tokenizer import Tokenizer

FIELD = "data.params.load"


class EnvironmentParams(RowParams):
    load: str
    """`path/to/file.py:load_environment`, `package.module:load_environment`, or an installed environment's name."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of load_environment."""


def load_environment(params: dict[str, Any]) -> Any:
    """Create the environment of data.params.

    Raises:
        UserError: the function does not exist or fails, or the environment has several turns.
    """
    p = parse_params("data.params", EnvironmentParams, params)
    path = p.load if ":" in p.load else f"{p.load.rpartition('/')[2].replace('-', '_')}:load_environment"
    make = import_attribute(FIELD, path)
    if not callable(make):
        raise UserError(f"{FIELD} = {p.load!r}: there is no function {path.rpartition(':')[2]!r}")
    with one_line_errors(f"{FIELD} = {p.load!r}"):
        environment = make(**p.args)
    turns = getattr(environment, "max_turns", 1)
    if turns != 1:
        raise UserError(
            f"{FIELD} = {p.load!r}: {type(environment).__name__} has max_turns = {turns}; expected 1: an environment "
            "with several turns needs a rollout.generator"
        )
    return environment


def environment(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Build the source from `params` (EnvironmentParams).

    Its held-out prompts are the environment's evaluation set, or else one in eight of its data set.
    """
    verifiers_environment = load_environment(params)
    rows = _rows(verifiers_environment, "dataset")
    if not rows:
        raise UserError(
            f"{FIELD} = {params['load']!r}: {type(verifiers_environment).__name__} has no data set; expected one"
        )
    heldout_rows = _rows(verifiers_environment, "eval_dataset")
    config = config.model_copy(update={"data": config.data.model_copy(update={"keys": KeysConfig()})})
    return RowSource(
        config,
        tokenizer,
        Arrow(rows, f"{params['load']} (dataset)"),
        Arrow(heldout_rows, f"{params['load']} (eval_dataset)") if heldout_rows else None,
        parse_params("data.params", EnvironmentParams, params),
    )


def _rows(environment: Any, name: str) -> list[dict[str, Any]]:
    """Return the rows of a data set of the environment; none if it does not have the data set.

    A row without `prompt` gets one: the system prompt, the few-shot examples, and the row's question.

    Args:
        name: attribute of the environment with the data set.
    """
    dataset = getattr(environment, name, None)
    first_messages = []
    if system := getattr(environment, "system_prompt", None):
        first_messages.append({"role": "system", "content": system})
    first_messages += list(getattr(environment, "few_shot", None) or [])
    rows = []
    for row in dataset if dataset is not None else ():
        row = dict(row)
        if isinstance(info := row.get("info"), str):  # tables keep it as a text
            row["info"] = json.loads(info)
        if "prompt" not in row and isinstance(row.get("question"), str):
            row["prompt"] = [*first_messages, {"role": "user", "content": row["question"]}]
        rows.append(row)
    return rows
