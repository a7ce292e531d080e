"""`rlsys import verl|slime SCRIPT`: translation of a launch script or YAML into a config.

Exit code 0: every setting that determines the method is translated. 3: a setting is missing or has no
counterpart; it is listed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path

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

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
READERS = {"verl": verl, "slime": slime}
INCOMPLETE = 3
"""Exit code of a config that lacks a setting."""


def add_import(add: Add) -> None:
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
    """Run `rlsys import`."""
    name = "imported" if args.script == "-" else Path(args.script).name
    out = args.out or Path(f"{Path(name).stem}.yaml")
    if out.exists():
        raise UserError(f"{out}: already exists; use --out for another file")
    variables = dict(variable.partition("=")[::2] for variable in args.env)
    draft = translate_file(args.framework, args.script, args.arguments, variables, args.gpus)
    _write(out, to_yaml(draft, name))
    try:
        load_config(out, [])
    except UserError as e:
        if draft.is_complete:  # otherwise the error may be a field that was omitted
            draft.missing.append(Row("", "", f"the config does not load: {e}"))
            _write(out, to_yaml(draft, name))
    print_result(draft, out)
    return 0 if draft.is_complete else INCOMPLETE


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{out}: {e.strerror}") from None


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
        file: its path; `-` for a command line on the standard input.
        arguments, variables, gpus: those of `run_script`.

    Raises:
        UserError: the file is not one of the framework, or a value has the wrong type.
    """
    path = None if file == "-" else Path(file)
    try:
        with nullcontext(sys.stdin) if path is None else TextIOWrapper(open_file(path), "utf-8") as stream:
            text = stream.read(MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: {getattr(e, 'strerror', None) or 'not a text file'}") from None
    if len(text) > MAX_TEXT:
        raise UserError(f"{file}: has more than {MAX_TEXT:,} characters; expected a script or a config")
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
            "data.params: one row in eight is held out and not trained; the script trains on all"
        )
    if not draft.is_fine_tuning and draft.has_evaluation:
        _add_eval(draft)
    return draft


def _add_eval(draft: Draft) -> None:
    """Add the numbers of held-out prompts, and refuse rows with media."""
    params = draft.get_field("data.params", {})
    heldout_path, path = params.get("heldout_path"), params.get("path")
    rows = count_rows(heldout_path or path)
    if rows is not None and heldout_path is None:
        rows = max(1, rows // 16)  # one row in eight is held out; use half of them as a margin
    set_heldout_prompts(draft, heldout_path or path, rows)
    for eval_set in draft.get_field("eval.sets", []):
        set_path = eval_set.get("data", {}).get("params", {}).get("heldout_path", heldout_path)
        eval_set["prompts"] = min(128, count_rows(set_path) or 30)
    if column := find_media_column(path, MEDIA):
        draft.rejected.append(
            Row("data", str(path), f"its rows have `{column}`; only text prompts are supported")
        )


def print_result(draft: Draft, out: Path) -> None:
    """Print the result for each setting, one per line, since tables would truncate paths."""
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
        print(f"{out}: written; next: rlsys {'sft' if draft.is_fine_tuning else 'explain'} {out}")
    else:
        print(f"{out}: written, but not complete: {len(draft.missing) + len(draft.rejected)} missing")
