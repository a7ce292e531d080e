"""Translate all launch scripts of a framework in folders: `python -m bench.import_scripts verl FOLDER ...`.

The bench prints the number of scripts by exit status of `rlsys import`. For each reason of an incomplete translation
it prints the number of scripts with this reason, and the number of scripts with this reason alone. Each script runs
in its sealed namespace from the root of its folder. `--records FILE` saves the recorded commands, so that another run
translates them without running the scripts. `--arguments TEXT` sets arguments for scripts that start no training
command without arguments.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rlsys.cli.import_script import translate_file
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.importers.draft import Draft, Row, to_yaml
from rlsys.importers.namespace import ScriptRun, run_script

PATTERNS = {
    "slime": r"train(_async)?\.py",
    "verl": r"main_ppo|main_dapo|actor_rollout_ref\.",
}
"""Regular expression that a training script contains, by framework."""


def find_scripts(framework: str, folders: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield (folder, script) for each training script."""
    for folder in folders:
        for script in sorted(folder.rglob("*.sh")):
            if re.search(PATTERNS[framework], script.read_text(errors="replace")):
                yield folder, script


def translate(
    framework: str, script: Path, out: Path, variables: dict[str, str], arguments: Sequence[str] = ()
) -> tuple[str, set[str]]:
    """Translate a script, and write the config to `out`.

    Args:
        framework: key of PATTERNS.
        script: the script.
        out: YAML file to write.
        variables: environment variables of the script.
        arguments: arguments of the script.

    Returns:
        exit status of `rlsys import`, and the reasons of an incomplete translation.
    """
    try:
        draft = translate_file(framework, str(script), arguments, variables)
        out.write_text(to_yaml(draft, script.name))
        try:
            load_config(out)
        except UserError as e:
            if draft.is_complete:
                draft.missing.append(Row("", "", f"does not load: {e}"))
        out.write_text(to_yaml(draft, script.name))
    except UserError as e:
        return str(e.exit_code), {str(e).removeprefix(f"{script}: ")}
    return ("0" if draft.is_complete else "3"), reasons(draft)


def reasons(draft: Draft) -> set[str]:
    """Return the settings that the import rejects or lists as MISSING."""
    return {row.setting or row.result for row in (*draft.rejected, *draft.missing)}


@contextmanager
def recorded_runs(file: Path | None) -> Iterator[None]:
    """Make the importer run each script only once during the context.

    Args:
        file: file of the recorded runs, which is read if it exists and written at the end; None: no file.
    """
    file = file and file.absolute()  # the working directory changes during the context
    records: dict[Any, ScriptRun] = {}
    if file and file.exists():
        records = pickle.loads(file.read_bytes())

    def run_once(script: Path, *rest: Any) -> ScriptRun:
        key = (str(script), str(rest))
        if key not in records:
            records[key] = run_script(script, *rest)
        return records[key]

    with patch("rlsys.importers.arguments.run_script", run_once):
        yield
    if file:
        file.write_bytes(pickle.dumps(records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=sorted(PATTERNS))
    parser.add_argument("folders", nargs="+", type=Path, help="folders that contain scripts")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of all scripts"
    )
    parser.add_argument(
        "--arguments",
        type=shlex.split,
        action="append",
        default=[],
        metavar="TEXT",
        help="arguments for scripts that start no training command without arguments; may be repeated",
    )
    parser.add_argument("--records", type=Path, metavar="FILE", help="file of the recorded commands")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder in which the configs are saved")
    args = parser.parse_args()
    variables = dict(assignment.partition("=")[::2] for assignment in args.env)
    statuses, counts, sole_reasons = Counter[str](), Counter[str](), Counter[str]()
    slowest = 0.0
    with TemporaryDirectory() as temporary, recorded_runs(args.records):
        out = args.out.absolute() if args.out else Path(temporary)
        out.mkdir(exist_ok=True)
        for folder, script in list(find_scripts(args.framework, [f.absolute() for f in args.folders])):
            os.chdir(folder)
            start = time.monotonic()
            name = str(script.relative_to(folder.parent)).replace("/", "+")
            for arguments in [(), *args.arguments]:
                status, script_reasons = translate(
                    args.framework, script, out / f"{name}.yaml", variables, arguments
                )
                if not any("no training command" in reason for reason in script_reasons):
                    break
            slowest = max(slowest, time.monotonic() - start)
            statuses[status] += 1
            counts.update(script_reasons)
            if len(script_reasons) == 1:
                sole_reasons.update(script_reasons)
            print(f"{status} {name}: {'; '.join(sorted(script_reasons))[:600]}", flush=True)
    print(f"scripts by exit status: {dict(sorted(statuses.items()))}; slowest {slowest:.1f} s")
    print("scripts with a reason, scripts with this reason alone, reason:")
    for reason, count in counts.most_common():
        print(f"{count:5} {sole_reasons[reason]:5} {reason[:150]}")


if __name__ == "__main__":
    main()
