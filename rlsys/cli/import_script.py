"""`rlsys import verl|slime SCRIPT`: translation of a launch script or YAML into a config.

Exit codes:

    0   every setting that determines the method is translated
    3   a setting is missing, or has no counterpart; the output lists it
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path

from rlsys.cli.cluster import Add
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.core.row_counts import count_rows, find_media_column
from rlsys.core.yaml_text import parse_yaml
from rlsys.data.rows import MEDIA
from rlsys.importers import slime, verl
from rlsys.importers.arguments import MAX_TEXT, read_arguments
from rlsys.importers.draft import Draft, Row, to_yaml
from rlsys.importers.namespace import open_file
from rlsys.importers.sizes import set_heldout_prompts
from rlsys.rewards import REWARDS

READERS = {"verl": verl, "slime": slime}
"""Name of a framework -> the module that translates its settings."""
INCOMPLETE = 3
"""Exit code if the config lacks a setting."""


def add_import(add: Add) -> None:
    """Add `rlsys import`."""
    sub = add("import", import_script, "translate a launch script or YAML of verl or slime")
    sub.add_argument("framework", choices=sorted(READERS), help="framework of the script")
    sub.add_argument(
        "script",
        metavar="FILE",
        help="script, resolved command, or YAML; - reads a command from the standard input",
    )
    sub.add_argument(
        "--out", type=Path, metavar="FILE", help="file for the new config (default: FILE's name with .yaml)"
    )
    sub.add_argument(
        "--arguments",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="arguments of the script, as in a shell",
    )
    sub.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the script"
    )
    sub.add_argument(
        "--gpus", type=int, default=8, metavar="N", help="GPUs that nvidia-smi lists (default: 8)"
    )


def import_script(args: argparse.Namespace) -> int:
    """Run `rlsys import`.

    Raises:
        UserError: the script cannot be translated, or the config cannot be written.
    """
    name = "imported" if args.script == "-" else Path(args.script).name
    output = args.out or Path(f"{Path(name).stem}.yaml")
    if output.exists():
        raise UserError(f"{output}: already exists; use --out for another file")
    variables = dict(variable.partition("=")[::2] for variable in args.env)
    draft = translate_file(args.framework, args.script, args.arguments, variables, args.gpus)
    _write(output, to_yaml(draft, name))
    try:
        load_config(output, [])
    except UserError as e:
        if draft.is_complete:  # an incomplete config may fail to load because of the missing setting
            draft.missing.append(Row("", "", f"the config does not load: {e}"))
            _write(output, to_yaml(draft, name))
    print_result(draft, output)
    return 0 if draft.is_complete else INCOMPLETE


def _write(file: Path, text: str) -> None:
    """Write a text file. Raises UserError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{file}: cannot write: {e.strerror}") from None


def translate_file(
    framework: str,
    file: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    gpus: int = 8,
) -> Draft:
    """Translate a script, command line or YAML file of another framework.

    Args:
        framework: a key of READERS.
        file: path of the file; `-` for a command line on the standard input.
        arguments: arguments of the script.
        variables: environment variables of the script.
        gpus: number of GPUs that nvidia-smi lists to the script.

    Raises:
        UserError: the file does not contain settings of the framework, or a value has the wrong type.
    """
    path = None if file == "-" else Path(file)
    try:
        with nullcontext(sys.stdin) if path is None else TextIOWrapper(open_file(path), "utf-8") as stream:
            text = stream.read(MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"{file}: {getattr(e, 'strerror', None) or 'expected a text file in UTF-8'}"
        ) from None
    if len(text) > MAX_TEXT:
        raise UserError(
            f"{file}: the file has more than {MAX_TEXT:,} characters; expected a script or a config"
        )
    reader = READERS[framework]
    try:
        if path is not None and path.suffix in (".yaml", ".yml"):
            settings = reader.read_yaml(parse_yaml(text, "the file"))
        else:
            settings = reader.read_settings(
                read_arguments(text, path, reader.program_index, reader.EXPECTED, arguments, variables, gpus)
            )
        draft = reader.translate(settings, REWARDS)
    except UserError as e:
        raise UserError(f"{file}: {e}") from None
    params = draft.get_field("data.params", {})
    if "path" in params and "heldout_path" not in params:
        draft.warnings.append(
            "data.params: the run holds out one row in eight, and does not train it; the script trains all rows"
        )
    if not draft.is_fine_tuning and draft.has_evaluation:
        _add_evaluation(draft)
    return draft


def _add_evaluation(draft: Draft) -> None:
    """Set the numbers of prompts of evaluations from the data files, and reject training rows with media."""
    params = draft.get_field("data.params", {})
    heldout_path, path = params.get("heldout_path"), params.get("path")
    rows = count_rows(heldout_path or path)
    if rows is not None and heldout_path is None:
        rows = max(
            1, rows // 16
        )  # about one row in eight is held out; half of this number is a safe lower bound
    set_heldout_prompts(draft, heldout_path or path, rows)
    for eval_set in draft.get_field("eval.sets", []):
        set_path = eval_set.get("data", {}).get("params", {}).get("heldout_path", heldout_path)
        eval_set["prompts"] = min(128, count_rows(set_path) or 30)
    if column := find_media_column(path, MEDIA):
        draft.rejected.append(
            Row("data", str(path), f"its rows have `{column}`; only text prompts are supported")
        )


def print_result(draft: Draft, output: Path) -> None:
    """Print the result for each setting, one per line, because a table would truncate paths.

    Args:
        draft: the translation.
        output: path of the config.
    """
    for title, rows in (
        ("translated", draft.mapped),
        ("default here", draft.defaults),
        ("MISSING", [*draft.rejected, *draft.missing]),
    ):
        if rows:
            print(f"{title}:")
            for row in rows:
                print(f"  {' '.join(str(row).split())}")
    if draft.speed:
        names = ", ".join(row.setting for row in draft.speed)
        print(f"warning: no counterpart, changes speed, memory or logging: {names}")
    for line in draft.warnings:
        print(f"check: {line}")
    if draft.is_complete:
        print(f"{output}: written; next: rlsys {'sft' if draft.is_fine_tuning else 'explain'} {output}")
    else:
        count = len(draft.missing) + len(draft.rejected)
        print(f"{output}: written, but not complete: {count} missing")
