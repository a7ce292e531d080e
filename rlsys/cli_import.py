"""`rlsys import verl|slime SCRIPT`: a launch script or YAML of theirs becomes a config of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsys.config import load_config
from rlsys.errors import UserError
from rlsys.foreign import slime, verl
from rlsys.foreign.draft import Draft, Row, as_yaml
from rlsys.foreign.sizes import put_held_out
from rlsys.rewards import REWARDS

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
READERS = {"verl": verl, "slime": slime}


def add_import(add: Add) -> None:
    sub = add("import", import_script, "translate a launch script or YAML of verl or slime")
    sub.add_argument("framework", choices=sorted(READERS), help="whose it is")
    sub.add_argument("script", type=Path, metavar="SCRIPT", help="bash script, or YAML file")
    sub.add_argument(
        "--out", type=Path, metavar="FILE", help="new config; SCRIPT's name with .yaml when not given"
    )


def import_script(args: argparse.Namespace) -> int:
    out = args.out or Path(f"{args.script.stem}.yaml")
    if out.exists():
        raise UserError(f"{out}: is there already; --out names another file")
    draft = translated(args.framework, args.script)
    try:
        out.write_text(as_yaml(draft, args.script.name), encoding="utf-8")
    except OSError as e:
        raise UserError(f"{out}: {e.strerror}") from None
    try:
        load_config(out, [])
    except UserError as e:
        raise UserError(f"{out}: written, but it needs a hand: {e}") from None
    tell(Console(), draft, out)
    return 0


def translated(framework: str, script: Path) -> Draft:
    """Raises UserError for a file that is not theirs."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{script}: {getattr(e, 'strerror', None) or 'not a text file'}") from None
    reader, data = READERS[framework], None
    if script.suffix in (".yaml", ".yml"):
        data = _yaml(text, script)
    try:
        settings = reader.settings_of(text, data, dict(os.environ))
        draft = reader.translate(settings, REWARDS)
    except UserError as e:
        raise UserError(f"{script}: {e}") from None
    except (ValueError, TypeError) as e:
        raise UserError(f"{script}: a value is not what {framework} expects there: {e}") from None
    held = draft.config["data"]["params"].get("heldout_path")
    put_held_out(draft, held, rows_of(held or draft.config["data"]["params"]["path"], part=held is None))
    for chosen in draft.config["eval"].get("sets", []):
        path = chosen.get("data", {}).get("params", {}).get("heldout_path", held)
        chosen["prompts"] = min(128, rows_of(path, part=False) or 30)
    return draft


def _yaml(text: str, script: Path) -> Any:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise UserError(f"{script}: not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{script}: expected a mapping of settings, found {type(data).__name__}")
    return data


def rows_of(path: Any, *, part: bool) -> int | None:
    """Rows of the files, or of what is held out of them (one in eight, less to be sure); None: one is missing."""
    files = [Path(p) for p in (path if isinstance(path, list) else [path])]
    if not path or not all(file.is_file() for file in files):
        return None
    rows = sum(_rows(file) for file in files)
    return max(1, rows // 16) if part else rows


def _rows(file: Path) -> int:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)
    with file.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def tell(console: Console, draft: Draft, out: Path) -> None:
    for title, rows in (
        ("translated", draft.mapped),
        ("not needed here", draft.needless),
        ("NOT translated", draft.refused),
    ):
        if rows:
            console.print(_table(title, rows))
    for line in draft.odd:
        console.print(f"look at: {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{out}: written; next: rlsys explain {out}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(Text(f"{row.theirs} = {row.value}"), Text(row.ours))
    return table
