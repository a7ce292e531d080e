"""Commands to view runs: `rlsys samples` in the terminal, `rlsys dash` in a browser, `rlsys track` in trackers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rlsys.cli.cluster import Add, check_run_folder
from rlsys.config import Config, load_run_config
from rlsys.core.errors import UserError
from rlsys.core.imports import module_command
from rlsys.core.run_files import ANSWERS_FILE
from rlsys.core.types import Status
from rlsys.ledger.samples import Order, SampleQuery, SampleView, check_query
from rlsys.obs.role import without_ignored
from rlsys.viewer.answers import KINDS, AnswerRows, RowKind
from rlsys.viewer.reading import Part, RunTexts, arrays_of, parts_of, sequences_of, turns_of
from rlsys.viewer.server import serve
from rlsys.viewer.trackers.follow import follow
from rlsys.viewer.trackers.tracker import PACKAGES

TRACKER_SECONDS = 60.0
"""Time limit after the end of a run for sending the remaining lines to trackers."""
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""Colours of the weight versions of a sample, in order."""


def add_view_commands(add: Add) -> None:
    """Add `rlsys samples`, `dash` and `track`."""
    sub = add("samples", show_samples, "show responses of a run with their rewards")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
    sub.add_argument(
        "--step", type=int, metavar="N", help="show samples of this train step (default: the last one)"
    )
    sub.add_argument("--group", type=int, metavar="ID", help="show samples of this group")
    sub.add_argument("--sample", type=int, metavar="ID", help="show this sample")
    group = sub.add_mutually_exclusive_group()
    group.add_argument("--worst", action="store_true", help="sort by reward, lowest first")
    group.add_argument("--best", action="store_true", help="sort by reward, highest first")
    group.add_argument("--longest", action="store_true", help="sort by length, longest first")
    sub.add_argument(
        "--resumed", action="store_true", help="show only samples that were resumed after an interruption"
    )
    sub.add_argument(
        "--status",
        metavar="S",
        help="show only samples with this status: parked, finished, truncated or censored",
    )
    sub.add_argument("--grep", metavar="REGEX", help="show only samples whose response matches")
    sub.add_argument("--n", type=int, default=8, metavar="N", help="maximum number of samples (default: 8)")
    sub.add_argument("--json", action="store_true", help="print one JSON object per line")
    sub.add_argument(
        "--rows",
        choices=KINDS,
        help="print training rows for `rlsys sft` instead, from all samples with stored tokens",
    )
    sub = add("dash", show_dashboard, "serve a web page about runs: curves, engines, samples")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    sub.add_argument(
        "--port", type=int, default=0, metavar="P", help="port on 127.0.0.1; 0 chooses a free one"
    )
    sub = add("track", track, "send missing metrics of a run to its trackers (run.trackers)")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
    sub.add_argument(
        "--to",
        choices=sorted(PACKAGES),
        action="append",
        help="tracker to use instead of the config's; may be repeated",
    )


def show_samples(args: argparse.Namespace) -> int:
    """Run `rlsys samples` on a running run, an ended run, or an evaluation.

    Raises:
        UserError: an option is invalid, or does not apply to an evaluation.
    """
    check_run_folder(args.run)
    pattern = _pattern(args.grep)
    if args.n < 1:
        raise UserError(f"--n {args.n}: expected 1 or more")
    orders: tuple[Order, ...] = ("worst", "best", "longest")
    order: Order = next((name for name in orders if getattr(args, name)), "newest")
    query = SampleQuery(
        sample=args.sample, group=args.group, step=args.step, status=args.status, resumed=args.resumed, order=order
    )  # fmt: skip
    check_query(query)
    if (args.run / ANSWERS_FILE).is_file():
        if args.rows or query != SampleQuery(order=order):
            raise UserError(
                f"{args.run}: an evaluation; expected --worst, --best, --longest, --grep, --n or --json only"
            )
        return show_answers(args.run / ANSWERS_FILE, order, pattern, args.n, as_json=args.json)
    texts = RunTexts(args.run)
    if args.rows:
        _print_rows(texts, args.rows, query, pattern)
        return 0
    if query == SampleQuery() and pattern is None and (last := texts.reader.last_step()):
        query = SampleQuery(step=last)
    stored_samples = texts.iterate(query, pattern, args.n)
    if args.json:
        for stored_sample in stored_samples:
            print(json.dumps(texts.describe(stored_sample) | arrays_of(stored_sample)))
    else:
        _print_samples(Console(), texts, stored_samples)
    return 0


def _print_rows(texts: RunTexts, kind: RowKind, query: SampleQuery, pattern: re.Pattern[str] | None) -> None:
    """Print training rows for `rlsys sft` from all matching samples, one JSON object per line.

    `kind`: one of rlsys.viewer.answers.KINDS.
    """
    rows = AnswerRows(texts.tokenizer.decode)
    for row in rows.convert(kind, texts.iterate(query, pattern, sys.maxsize)):
        print(json.dumps(row))
    if rows.excluded:
        print(
            f"rlsys: omitted {rows.excluded} samples without stored tokens or with several turns",
            file=sys.stderr,
        )


def _print_samples(console: Console, texts: RunTexts, stored_samples: Iterable[SampleView]) -> None:
    """Print samples. The prompt of consecutive samples of a group is printed once."""
    group = None
    for stored_sample in stored_samples:
        if stored_sample.sample.group_id != group:
            group = stored_sample.sample.group_id
            console.print(Rule(f"group {group}, {stored_sample.outcome}", align="left"))
            console.print(Text(_printable(texts.prompt(stored_sample)), style="dim"))
        _print_sample(console, texts, stored_sample)
    if group is None:
        console.print("no sample matches" if texts.reader.last_step() else "no samples yet")


def show_answers(path: Path, order: Order, pattern: re.Pattern[str] | None, n: int, *, as_json: bool) -> int:
    """Print responses of an evaluation, and return exit code 0.

    Args:
        path: file with the responses.
        order: order of the responses; `newest` is the order of the prompts.
        pattern: a response must match it; None for all responses.
        n: maximum number of responses.
        as_json: whether to print one JSON object per line.
    """
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    entries = [e for e in entries if pattern is None or pattern.search(e["response"])]
    if order == "longest":
        entries.sort(key=lambda e: -e["tokens"])
    elif order in ("worst", "best"):
        entries = [e for e in entries if e["reward"] is not None]
        entries.sort(key=lambda e: _total(e["reward"]), reverse=order == "best")
    console = Console()
    for entry in entries[:n]:
        if as_json:
            print(json.dumps(entry))
            continue
        reward = f"no reward: {entry['reason']}" if entry["reward"] is None else f"reward {entry['reward']}"
        verdict = "correct" if entry["correct"] else "not correct"
        console.print(Rule(f"{reward}, {verdict}, {entry['tokens']} tokens, {entry['status']}", align="left"))
        console.print(Text(_printable(entry["prompt"]), style="dim"))
        console.print(Text(_printable(entry["response"])))
    if not entries and not as_json:
        console.print("no response matches")
    return 0


def _total(reward: float | dict[str, float]) -> float:
    """Return a reward as one number: the sum of named rewards."""
    return sum(reward.values()) if isinstance(reward, dict) else reward


def show_dashboard(args: argparse.Namespace) -> int:
    """Run `rlsys dash` until Ctrl-C or SIGTERM. It writes nothing into run folders.

    Raises:
        UserError: an option is invalid, or a folder is no run folder.
    """
    for run in args.runs:
        check_run_folder(run)
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port {args.port}: expected 0 to 65535")

    def print_link(link: str) -> None:
        port = urlsplit(link).port
        print(link, flush=True)
        print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in without_ignored(signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(args.runs, args.port, print_link, stop)

    asyncio.run(until_stopped())
    return 0


def track(args: argparse.Namespace) -> int:
    """Run `rlsys track`: send each tracker the lines of metrics that it does not have.

    Raises:
        UserError: the folder is no run folder, or no tracker is named.
    """
    check_run_folder(args.run)
    names = args.to or load_run_config(args.run).run.trackers
    if not names:
        raise UserError(
            f"{args.run}: run.trackers is empty; expected --to with one of {', '.join(sorted(PACKAGES))}"
        )
    for name, lines in follow(args.run, names, end_descriptor=None).items():
        print(f"{name}: {lines} lines written")
    return 0


@contextlib.contextmanager
def feed_trackers(config: Config, report: Callable[[str], None]) -> Iterator[None]:
    """Send metrics to the config's trackers during the context, in a separate process.

    Errors of that process do not stop the run.

    Args:
        config: config of the run.
        report: receives a message if trackers did not receive all metrics.
    """
    run = config.run.dir
    if not config.run.trackers:
        yield
        return
    command = module_command("rlsys.viewer.trackers.follow", str(run))
    path = run / "logs" / "trackers.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the process then sends the remaining lines and exits
        try:
            code = process.wait(TRACKER_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            report(
                f"trackers did not receive all metrics, see {path}; `rlsys track {run}` sends the missing ones"
            )


def _pattern(text: str | None) -> re.Pattern[str] | None:
    """Compile the value of --grep; None without it.

    Raises:
        UserError: it is not a regular expression.
    """
    try:
        return None if text is None else re.compile(text)
    except re.error as e:
        raise UserError(f"--grep {text}: not a regular expression: {e}") from None


def _print_sample(console: Console, texts: RunTexts, stored_sample: SampleView) -> None:
    """Print a sample without its prompt: facts, response, further sequences, and the tokens by weight version."""
    console.print(Text("  ".join(_sample_facts(stored_sample)), style="bold"))
    parts = parts_of(stored_sample)
    if stored_sample.has_tokens:
        pieces = texts.tokenizer.pieces(stored_sample.sample.response_ids)
        console.print(_colour_response(pieces, parts), highlight=False)
        for sequence in sequences_of(stored_sample, texts.tokenizer.decode):
            _print_sequence(console, sequence)
    else:
        console.print(Text("its tokens are no longer stored (rollout.keep_groups)", style="dim"))
    if len(parts) > 1:
        ranges = ", ".join(f"{_author(part)} {part.start}-{part.end - 1}" for part in parts)
        console.print(Text(f"tokens by weight version (train steps in it): {ranges}", style="dim"))


def _sample_facts(stored_sample: SampleView) -> list[str]:
    """Return the facts about a sample: id, reward, advantage, number of tokens, status and others."""
    sample = stored_sample.sample
    facts = [f"sample {sample.sample_id}"]
    if sample.reward is not None:
        facts.append(f"reward {sample.reward:.4g}")
    else:
        facts.append(f"no reward: {_missing_reward_reason(stored_sample)}")
    facts += [f"{name} {value:.4g}" for name, value in (sample.named_rewards or {}).items()]
    if sample.answer is not None:
        facts.append(f"answer {sample.answer}")
    advantage = next((a for a in arrays_of(stored_sample)["advantages"] if a is not None), None)
    if advantage is not None:
        facts.append(f"advantage {advantage:+.3g}")
    facts.append(f"{stored_sample.tokens} tokens")
    if sample.fork is not None:
        facts.append(f"fork of sample {sample.fork.source} of its group at token {sample.fork.at}")
    if (turns := turns_of(stored_sample)) > 1:
        facts.append(f"{turns} turns")
    if sample.reward is not None:
        facts.append(sample.status.value)
    return facts


def _colour_response(pieces: Sequence[str], parts: Sequence[Part]) -> Text:
    """Return the response: a colour per weight version, dim text of tools, and a mark before interrupted parts.

    `pieces`: text of each token.
    """
    versions = sorted({part.version for part in parts})
    styles = {version: _STYLES[i % len(_STYLES)] for i, version in enumerate(versions)}
    text = Text()
    for part in parts:
        if part.interrupted:
            text.append(" ⏸ ", style="reverse")
        part_text = _printable("".join(pieces[part.start : part.end]))
        text.append(part_text, style="dim" if part.tool else styles[part.version])
    return text


def _print_sequence(console: Console, sequence: Mapping[str, Any]) -> None:
    """Print prompt and response of another sequence of a sample (rlsys.viewer.reading.sequences_of)."""
    origin = ""
    if sequence["aside"]:
        origin = " outside the main conversation"
    elif sequence["parent"] is not None:
        origin = f" from {sequence['parent']}"
    title = f"sequence {sequence['sequence']}{origin}: {_printable(sequence['prompt'])}"
    console.print(Text(title, style="dim"))
    console.print(Text(_printable(sequence["response"])), highlight=False)


def _printable(text: str) -> str:
    """Replace control characters, because a model's output must not control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _missing_reward_reason(stored_sample: SampleView) -> str:
    """Return why a sample has no reward."""
    status = stored_sample.sample.status
    if status in (Status.FINISHED, Status.TRUNCATED):
        return f"{status.value}, not scored yet"
    return stored_sample.sample.censor_reason or ("not finished" if status is Status.PARKED else status.value)


def _author(part: Part) -> str:
    """Return what generated a part: a tool, or a weight version and the number of train steps in it."""
    steps = "?" if part.trained_steps is None else part.trained_steps
    return f"{'⏸ ' if part.interrupted else ''}{'tool' if part.tool else f'v{part.version} ({steps})'}"
