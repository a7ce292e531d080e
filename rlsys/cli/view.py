"""Commands to look at runs: `rlsys samples` in the terminal, `rlsys dash` in a browser, `rlsys track` elsewhere."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rlsys.cli.cluster import must_hold_run
from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.core.run_files import CONFIG_FILE
from rlsys.core.types import Status
from rlsys.ledger.samples import Order, SampleQuery, Seen, check_query
from rlsys.obs.role import without_ignored
from rlsys.viewer.answers import KINDS, AnswerRows
from rlsys.viewer.reading import Part, RunTexts, arrays_of, parts_of, sequences_of, turns_of
from rlsys.viewer.server import serve
from rlsys.viewer.trackers.follow import follow
from rlsys.viewer.trackers.tracker import PACKAGES

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]

TRACKER_SECONDS = 60.0
"""How long a run that has ended waits for its trackers to take what is left."""
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""Of the weight versions of one sample, in their order."""


def add_look(add: Add) -> None:
    sub = add("samples", show_samples, "show what the model wrote in a run, and what it got for it")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
    sub.add_argument(
        "--step", type=int, metavar="N", help="of this train step; the last one, when nothing is said"
    )
    sub.add_argument("--group", type=int, metavar="ID", help="of this group")
    sub.add_argument("--sample", type=int, metavar="ID", help="this one")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--worst", action="store_true", help="lowest rewards first")
    which.add_argument("--best", action="store_true", help="highest rewards first")
    which.add_argument("--longest", action="store_true", help="most tokens first")
    sub.add_argument("--resumed", action="store_true", help="only those that went on after an interruption")
    sub.add_argument("--status", metavar="S", help="only parked, finished, truncated or censored ones")
    sub.add_argument("--grep", metavar="REGEX", help="only those whose response has this")
    sub.add_argument("--n", type=int, default=8, metavar="N", help="show at most so many; 8")
    sub.add_argument("--json", action="store_true", help="print them as JSON, one a line")
    sub.add_argument(
        "--rows",
        choices=KINDS,
        help="print rows for `rlsys sft` instead, of all samples whose tokens are kept",
    )
    sub = add("dash", show_dashboard, "serve a page about runs, for a browser: curves, engines, samples")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    sub.add_argument("--port", type=int, default=0, metavar="P", help="of 127.0.0.1; 0 finds a free one")
    sub = add("track", track, "give a run's trackers what they lack of it (run.trackers)")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder")
    sub.add_argument("--to", choices=sorted(PACKAGES), action="append", help="other ones than the config's")


def show_samples(args: argparse.Namespace) -> int:
    """Decoded by the run's tokenizer; of a run that lives or has ended."""
    must_hold_run(args.run)
    pattern = _pattern(args.grep)
    if args.n < 1:
        raise UserError(f"--n {args.n}: expected 1 or more")
    orders: tuple[Order, ...] = ("worst", "best", "longest")
    order: Order = next((name for name in orders if getattr(args, name)), "newest")
    query = SampleQuery(
        sample=args.sample, group=args.group, step=args.step, status=args.status, resumed=args.resumed, order=order
    )  # fmt: skip
    check_query(query)
    texts = RunTexts(args.run)
    if args.rows:
        rows = AnswerRows(texts.tokenizer.decode)
        for row in rows.of(args.rows, texts.every(query, pattern, sys.maxsize)):
            print(json.dumps(row))
        if rows.left_out:
            print(f"{rows.left_out} samples have no kept tokens, or several turns: left out", file=sys.stderr)
        return 0
    if query == SampleQuery() and pattern is None and (last := texts.reader.last_step()):
        query = SampleQuery(step=last)
    shown, console = 0, Console()
    prompt_of = -1
    for seen in texts.every(query, pattern, args.n):
        shown += 1
        if args.json:
            print(json.dumps(texts.described(seen) | arrays_of(seen)))
            continue
        if seen.sample.group_id != prompt_of:  # the prompt of a whole group is shown once
            prompt_of = seen.sample.group_id
            console.print(Rule(f"group {seen.sample.group_id}, {seen.fate}", align="left"))
            console.print(Text(_harmless(texts.prompt(seen)), style="dim"))
        _print_sample(console, texts, seen)
    if not shown and not args.json:
        console.print("no sample fulfils all of this" if texts.reader.last_step() else "no samples yet")
    return 0


def show_dashboard(args: argparse.Namespace) -> int:
    """Until Ctrl-C. Reads only."""
    for run in args.runs:
        must_hold_run(run)
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port {args.port}: expected 0 to 65535")

    def say(link: str) -> None:
        port = urlsplit(link).port
        print(link, flush=True)
        print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in without_ignored(signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(args.runs, args.port, say, stop)

    asyncio.run(until_stopped())
    return 0


def track(args: argparse.Namespace) -> int:
    """Every line of metrics that they do not have yet; nothing twice."""
    must_hold_run(args.run)
    names = args.to or load_config(args.run / CONFIG_FILE).run.trackers
    if not names:
        raise UserError(
            f"{args.run}: run.trackers is empty; name one with --to, of {', '.join(sorted(PACKAGES))}"
        )
    for name, lines in follow(args.run, names, until=None).items():
        print(f"{name}: {lines} lines written")
    return 0


@contextlib.contextmanager
def followed_by_trackers(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """While a run goes on, a process beside it feeds its trackers. What goes wrong there ends no run."""
    run = config.run.dir
    if not config.run.trackers:
        yield
        return
    command = [sys.executable, "-m", "rlsys.viewer.trackers.follow", str(run)]
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
        process.stdin.close()  # it writes what is left
        try:
            code = process.wait(TRACKER_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            say(f"not all is with the trackers, see {path}; `rlsys track {run}` writes what they lack")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as e:
        raise UserError(f"--grep {text}: not a regular expression: {e}") from None


def _print_sample(console: Console, texts: RunTexts, seen: Seen) -> None:
    sample = seen.sample
    advantage = next((a for a in arrays_of(seen)["advantages"] if a is not None), None)
    facts = [
        f"sample {sample.sample_id}",
        f"reward {sample.reward:.4g}" if sample.reward is not None else f"no reward: {_why_none(seen)}",
        *(f"{name} {value:.4g}" for name, value in (sample.named_rewards or {}).items()),
        *([f"answer {sample.answer}"] if sample.answer is not None else []),
        *([f"advantage {advantage:+.3g}"] if advantage is not None else []),
        f"{seen.tokens} tokens",
        *(
            [f"branches off place {fork.source} at token {fork.at}"]
            if (fork := sample.fork) is not None
            else []
        ),
        *([f"{turns} turns"] if (turns := turns_of(seen)) > 1 else []),
        *([sample.status.value] if sample.reward is not None else []),
    ]
    console.print(Text(facts[0] + "  ", style="bold").append("  ".join(facts[1:]), style="bold"))
    parts = parts_of(seen)
    versions = sorted({part.version for part in parts})
    style = {version: _STYLES[i % len(_STYLES)] for i, version in enumerate(versions)}
    if seen.kept:
        pieces = texts.tokenizer.pieces(sample.response_ids)
        text = Text()
        for part in parts:
            if part.interrupted:
                text.append(" ⏸ ", style="reverse")
            words = _harmless("".join(pieces[part.start : part.end]))
            text.append(words, style="dim" if part.tool else style[part.version])
        console.print(text, highlight=False)
    else:
        console.print(Text("its tokens are no longer kept (rollout.keep_groups)", style="dim"))
    for other in sequences_of(seen, texts.tokenizer.decode) if seen.kept else []:
        of = (
            " on the side"
            if other["aside"]
            else ""
            if other["parent"] is None
            else f" from {other['parent']}"
        )
        console.print(Text(f"sequence {other['sequence']}{of}: {_harmless(other['prompt'])}", style="dim"))
        console.print(Text(_harmless(other["response"])), highlight=False)
    if len(parts) > 1:
        words = ", ".join(f"{_author(p)} {p.start}-{p.end - 1}" for p in parts)
        console.print(Text(f"tokens by weight version (train steps in it): {words}", style="dim"))


def _harmless(text: str) -> str:
    """What a model writes must not move a terminal's cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _why_none(seen: Seen) -> str:
    status = seen.sample.status
    if status in (Status.FINISHED, Status.TRUNCATED):
        return f"{status.value}, not scored yet"
    return seen.sample.censor_reason or ("not finished" if status is Status.PARKED else status.value)


def _author(part: Part) -> str:
    steps = "?" if part.trained_steps is None else part.trained_steps
    return f"{'⏸ ' if part.interrupted else ''}{'tool' if part.tool else f'v{part.version} ({steps})'}"
