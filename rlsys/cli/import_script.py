"""`rlsys import verl|slime SCRIPT`: translation of a launch script or YAML into a config.

Exit code 0: every setting that determines the method is translated. 3: a setting is missing or has no
counterpart; it is listed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.core.yaml_text import parse_yaml
from rlsys.data.rows import MEDIA
from rlsys.importers import slime, verl
from rlsys.importers.draft import Draft, Row, UnsupportedRunError, to_yaml
from rlsys.importers.rows import count_rows, find_media_column
from rlsys.importers.shell import MAX_SCRIPT
from rlsys.importers.sizes import set_heldout_prompts
from rlsys.rewards import REWARDS

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
READERS = {"verl": verl, "slime": slime}
INCOMPLETE = UnsupportedRunError.exit_code
_LONGEST = 8 * MAX_SCRIPT
"""Maximum characters of a file; a verl config with all defaults has 30,000."""


def add_import(add: Add) -> None:
    sub = add("import", import_script, "translate a launch script or YAML of verl or slime")
    sub.add_argument("framework", choices=sorted(READERS), help="framework of the script")
    sub.add_argument("script", type=Path, metavar="SCRIPT", help="bash script or YAML file")
    sub.add_argument(
        "--out", type=Path, metavar="FILE", help="file for the new config (default: SCRIPT's name with .yaml)"
    )


def import_script(args: argparse.Namespace) -> int:
    """Run `rlsys import`."""
    out = args.out or Path(f"{args.script.stem}.yaml")
    if out.exists():
        raise UserError(f"{out}: already exists; use --out for another file")
    draft = translate_file(args.framework, args.script)
    _write(out, to_yaml(draft, args.script.name))
    try:
        load_config(out, [])
    except UserError as e:
        if draft.is_complete:  # otherwise the error may be a field that was omitted
            draft.missing.append(Row("", "", f"the config does not load: {e}"))
            _write(out, to_yaml(draft, args.script.name))
    print_result(draft, out)
    return 0 if draft.is_complete else INCOMPLETE


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{out}: {e.strerror}") from None


def translate_file(framework: str, script: Path) -> Draft:
    """Translate a file of another framework.

    Raises:
        UserError: the file is not one of the framework, or a value has the wrong type.
        UnsupportedRunError: the file starts no RL run.
    """
    try:
        with script.open(encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{script}: {getattr(e, 'strerror', None) or 'not a text file'}") from None
    if len(text) > _LONGEST:
        raise UserError(f"{script}: has more than {_LONGEST:,} characters; expected a script or a config")
    reader, data = READERS[framework], None
    if script.suffix in (".yaml", ".yml"):
        data = parse_yaml(text, str(script))
        if not isinstance(data, dict):
            raise UserError(f"{script}: expected a mapping of settings, found {type(data).__name__}")
    try:
        settings = reader.read_settings(text, data, dict(os.environ), script.absolute())
        draft = reader.translate(settings, REWARDS)
    except UserError as e:
        raise type(e)(f"{script}: {e}") from None
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
        ("NOT translated, changes the method", draft.rejected),
        ("MISSING", draft.missing),
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
        print(f"{out}: written; next: rlsys explain {out}")
    else:
        print(
            f"{out}: written, but not complete: {len(draft.missing)} missing, {len(draft.rejected)} not translated"
        )
