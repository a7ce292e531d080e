"""Engines that join a run, are sent away and die while it goes on: what happens and when follows from a seed and from
the steps that the run has made. Nothing here waits for a clock."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from launch.engine_join import engines
from rlsys.cli.main import main
from rlsys.obs.coordinator import CoordinatorUnreachable
from tests.helpers.runs import steps_done

What = Literal["join", "drain", "terminate", "kill", "vanish"]
"""drain: by the command; terminate: SIGTERM to the one that joined; kill: kill -9 of the engine; vanish: of the
engine and of what started it, as when its machine is gone."""
MOST_JOINED = 2
"""Beside the launch's own. A few cores serve no more."""


@dataclass(frozen=True)
class Deed:
    """To be done as soon as the run has made `step` steps and something can be done. `kind` and `target`, both from 0
    to 1, choose among what is possible then."""

    step: int
    kind: float
    target: float


def deeds(seed: int, steps: int, every: int) -> Iterator[Deed]:
    """One every `every` steps or so, from step 1 on."""
    rng = random.Random(seed)
    step = 1
    while step < steps:
        yield Deed(step, rng.random(), rng.random())
        step += rng.randint(1, 2 * every - 1)


@dataclass
class Churn:
    """`start`: begins one engine more, on a node of the cluster. `going`: whether the run goes on."""

    run: Path
    start: Callable[[], object]
    going: Callable[[], bool]
    happened: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    """What was done, by step, for the one who reads a failure."""
    _own: frozenset[str] = frozenset()
    _drained: set[str] = field(default_factory=set)
    """Of the launch's own, those that are away."""

    def go_through(self, plan: Iterator[Deed]) -> None:
        """Until the plan or the run ends."""
        self._until(lambda: len(self.figures()) > 0)
        self._own = frozenset(self.figures())
        for deed in plan:
            if not self._until(partial(self._done, deed)):
                return

    def _done(self, deed: Deed) -> bool:
        """Whether it was its time, and something could be done."""
        if steps_done(self.run) < deed.step:
            return False
        figures = self.figures()
        serving = sorted(url for url, engine_figures in figures.items() if engine_figures["serving"])
        joined = [url for url in serving if url not in self._own]
        victims: dict[What, list[str]] = {}
        if len(self.joiners()) < MOST_JOINED:
            victims["join"] = [""]
        if len(serving) > 1:  # somebody must be left to serve
            victims |= {"drain": serving, "kill": serving, "terminate": joined, "vanish": joined}
        possible = [action for action, urls in victims.items() if urls]
        if not possible:
            return False
        fewest = min(self.happened[action] for action in possible)  # so that all of them come about
        rare = [action for action in possible if self.happened[action] == fewest]
        action = rare[int(deed.kind * len(rare))]
        if action == "join":
            return self._take_back(min(away)) if (away := self._drained - figures.keys()) else self._join()
        return self._harm(action, victims[action][int(deed.target * len(victims[action]))])

    def _join(self) -> bool:
        pids_before = {p.pid for p in self.joiners()}
        self._note("join", "")
        self.start()
        return self._until(lambda: any(p.pid not in pids_before for p in self.joiners()))

    def _take_back(self, url: str) -> bool:
        success = main(["engines", "drain", str(self.run), url, "--undo"]) == 0
        self._drained.discard(url)
        self._note("taken back" if success else "taken back too late", url)
        return success

    def _harm(self, what: What, url: str) -> bool:
        if what == "drain":
            success = main(["engines", "drain", str(self.run), url]) == 0
            self._drained |= {url} & self._own if success else set()
            self._note("drain" if success else "drain refused", url)
            return success
        server = engine_process(url)
        if server is None:  # died since
            return False
        joiner = next((p for p in server.parents() if is_joiner(p)), None)
        if what == "terminate":
            assert joiner is not None
            joiner.send_signal(signal.SIGTERM)
        else:
            started = [*server.children(recursive=True), server]
            # First what would notice: a machine that is gone ends nothing in order.
            for process in [*([joiner] if joiner is not None and what == "vanish" else []), *started]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._note(what, url)
        return True

    def _note(self, what: str, url: str) -> None:
        self.happened[what] += 1
        self.told.append(f"step {steps_done(self.run)}: {what} {url}")

    def figures(self) -> dict[str, dict[str, object]]:
        """Of the run's engines; none while nobody answers."""
        try:
            return engines(self.run)
        except CoordinatorUnreachable:
            return {}

    def joiners(self) -> list[psutil.Process]:
        """The processes that have started an engine for the run, and end with it."""
        return [p for p in psutil.process_iter() if is_joiner(p) and str(self.run) in p.cmdline()]

    def _until(self, true: Callable[[], bool]) -> bool:
        """Whether it came true before the run ended."""
        while not true():
            if not self.going():
                return False
            time.sleep(0.2)
        return True


def engine_process(url: str) -> psutil.Process | None:
    """The server that listens there, started by rlsys."""
    port = str(urlsplit(url).port)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            serves = "rlsys.engine.server" in words and words[words.index("--port") + 1] == port
            if serves and "launch.keeper" not in words and "srun" not in words[0]:
                return process
    return None


def is_joiner(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "join" in words and "engines" in words and "srun" not in words[0]
