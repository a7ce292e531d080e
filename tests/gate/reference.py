"""Write the generated references in docs/: all config fields, all commands with their options, all recipes.

python -m tests.gate.reference
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlsys.cli.main import GROUPS, make_parser
from rlsys.config import Config

ROOT = Path(__file__).resolve().parents[2]
CONFIG_PAGE, COMMANDS_PAGE = ROOT / "docs" / "config.md", ROOT / "docs" / "commands.md"
RECIPES_PAGE = ROOT / "docs" / "recipes.md"
CONFIG_HEAD = """# Config fields

All fields of a config, with type, bounds and default, from the code. `python -m tests.gate.reference` writes this
page.

A config is a YAML file with these sections. `base: FILE` (or the name of a shipped config) is the config that it
changes. Any field can be set on a command line, as `trainer.lr=2e-4`. `rlsys explain CONFIG --config` prints the
resolved config. [cluster.md](cluster.md#which-fields-may-change) lists the fields that may change when a run
continues.
"""
COMMANDS_HEAD = """# Commands

All commands and options of `rlsys`, from the code. `python -m tests.gate.reference` writes this page;
`rlsys COMMAND --help` prints the same. CONFIG is a YAML file or the name of a shipped config, RUN a run folder;
`SECTION.FIELD=VALUE` changes [a field of the config](config.md).
"""
SCORES_PAGE = ROOT / "examples" / "recipes" / "README.md"
RECIPES_HEAD = """# Recipes

All recipes with scores, and all shipped configs of methods, with the first sentences of each file.
`python -m tests.gate.reference` writes this page. [algorithms.md](algorithms.md) describes the plug-ins that they
name.

## Recipes with scores

Tasks with data, reward, configs and measured scores. [examples/recipes](../examples/recipes/README.md) explains the
columns and the commands.

{scores}
"""
RECIPE_FOLDERS = {
    "algorithms": "`rlsys train FILE` trains with one of them.",
    "preferences": "`rlsys sft FILE` fine-tunes on compared answers ([sft.md](sft.md)).",
    "imitation": "`rlsys sft FILE` fine-tunes on answers.",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
}
_INT_LIMIT = 2**31
"""Bound of every integer, which the page omits."""


def config_page() -> str:
    """Return the reference of all config fields."""
    definitions = Config.model_json_schema()["$defs"]
    lines = [CONFIG_HEAD]
    for name, info in Config.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        lines += [f"## {name}", "", info.description or "", ""]
        section = definitions[info.annotation.__name__]
        lines += _field_lines(section)
        for path, title in _nested(name, section, definitions):
            lines += [f"### {path}", "", *_field_lines(definitions[title])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _field_lines(section: Mapping[str, Any]) -> list[str]:
    """Return one list item for each field of a section."""
    required = section.get("required", ())
    lines = []
    for name, field in section["properties"].items():
        default = "required" if name in required else f"default {_default(field)}"
        text = " ".join(field.get("description", "").split()).replace("*", "\\*")
        lines.append(f"- **`{name}`** ({_type(field)}; {default}): {text}")
    return [*lines, ""]


def _nested(
    path: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the path and the definition of each section inside a section, each definition once."""
    titles: set[str] = set()
    for name, field in schema["properties"].items():
        for title in _references(field):
            if title not in titles and "properties" in definitions[title]:
                titles.add(title)
                yield f"{path}.{name}", title


def _references(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the definitions that a field's type refers to."""
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2]
    for part in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        yield from _references(part)


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type and the bounds of a field in words."""
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "$ref" in schema:
        title = schema["$ref"].rpartition("/")[2]
        return "plug-in" if title == "Spec" else "section"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        parts = schema.get("prefixItems") or [schema["items"]]
        return "list of " + ", ".join(map(_type, parts))
    kind = "path" if schema.get("format") == "path" else _TYPES[schema["type"]]
    bounds = [
        f"{words} {schema[key]:,g}"
        for key, words in _BOUNDS.items()
        if schema.get(key, _INT_LIMIT) != _INT_LIMIT
    ]
    return ", ".join([kind, *bounds])


def _default(field: Mapping[str, Any]) -> str:
    """Return a default as YAML on one line. The schema omits empty defaults of factories."""
    if "$ref" in field and _type(field) == "section":
        return "as listed below"
    empty: dict[str, Any] = {"array": [], "object": {}}
    default = field.get("default", empty.get(field.get("type", "")))
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def recipes_page() -> str:
    """Return the recipes with scores, as their own page lists them, and the configs of methods."""
    _, _, figures = SCORES_PAGE.read_text(encoding="utf-8").partition("<!-- figures")
    table = [line for line in figures.partition("<!-- end")[0].splitlines() if line.startswith("|")]
    scores = "\n".join(table).replace("](", "](../examples/recipes/")
    lines = [RECIPES_HEAD.format(scores=scores)]
    for folder, command in RECIPE_FOLDERS.items():
        lines += [f"## {folder}", "", command, "", "| recipe | content |", "|---|---|"]
        for path in sorted((ROOT / "configs" / folder).glob("*.yaml")):
            comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
            text = _sentence(" ".join(line.removeprefix("#") for line in comment))
            lines.append(f"| [{path.stem}](../configs/{folder}/{path.name}) | {text} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def commands_page() -> str:
    """Return the reference of the command line."""
    commands = _subcommands(make_parser())
    lines = [COMMANDS_HEAD]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += _command_lines(f"rlsys {name}", commands[name], "")
    return "\n".join(lines).rstrip("\n") + "\n"


def _command_lines(name: str, parser: argparse.ArgumentParser, help_text: str) -> list[str]:
    """Return the section of a command, followed by those of its subcommands."""
    lines = [f"### {name}", "", _sentence(parser.description or help_text), ""]
    rows = [
        f"| {_names(action)} | {_sentence(_help(action, parser))} |"
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    subcommands = _subcommands(parser)
    if rows:
        lines += ["| argument | meaning |", "|---|---|", *rows, ""]
    helps = _subcommand_helps(parser)
    for sub, subparser in subcommands.items():
        lines += _command_lines(f"{name} {sub}", subparser, helps.get(sub, ""))
    return lines


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: sub for action in actions for name, sub in action.choices.items()}


def _subcommand_helps(parser: argparse.ArgumentParser) -> dict[str, str]:
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {choice.dest: choice.help or "" for action in actions for choice in action._choices_actions}


def _names(action: argparse.Action) -> str:
    """Return the names of an option with its value, or of a positional argument."""
    metavar = action.metavar if isinstance(action.metavar, str) else None
    choices = "|".join(map(str, action.choices)) if action.choices else None
    value = "" if action.nargs == 0 else metavar or choices or action.dest.upper()
    names = [f"{name} {value}".strip() for name in action.option_strings]
    if not names:
        optional = f"[{value}]" if action.nargs in ("?", "*") else value
        names = [f"{optional} ..." if action.nargs in ("*", "+") else optional]
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    return (action.help or "") % values


def _sentence(text: str) -> str:
    """Return the text as table cell: one line, capitalised."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    CONFIG_PAGE.write_text(config_page(), encoding="utf-8")
    COMMANDS_PAGE.write_text(commands_page(), encoding="utf-8")
    RECIPES_PAGE.write_text(recipes_page(), encoding="utf-8")
