"""Churn: engines join, leave and die while a run continues.

A seed and the number of completed steps determine the events and their times. No event depends on a clock.
"""

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

Action = Literal["join", "drain", "terminate", "kill", "vanish"]
"""drain: `rlsys engines drain`; terminate: SIGTERM to the joiner, the process that started the engine; kill: SIGKILL
to the engine; vanish: SIGKILL to joiner and engine, as when their machine fails."""
MAX_JOINED = 2
"""Maximal number of engines that join. A host with few cores cannot serve more."""


@dataclass(frozen=True)
class ChurnEvent:
    """An event that is due after `step` steps."""

    step: int
    kind: float
    """Number in [0, 1) that selects one of the possible actions."""
    target: float
    """Number in [0, 1) that selects the engine."""


def draw_events(seed: int, steps: int, mean_interval: int) -> Iterator[ChurnEvent]:
    """Yield random events from step 1 to `steps`, `mean_interval` steps apart on average."""
    rng = random.Random(seed)
    step = 1
    while step < steps:
        yield ChurnEvent(step, rng.random(), rng.random())
        step += rng.randint(1, 2 * mean_interval - 1)


@dataclass
class Churn:
    """Apply events to a run."""

    run: Path
    """Run folder."""
    start: Callable[[], object]
    """Starts another engine on a node of the cluster."""
    is_running: Callable[[], bool]
    """Returns whether the run continues."""
    event_counts: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    """Applied events, for messages of failed tests."""
    _initial_urls: frozenset[str] = frozenset()
    """URLs of the launch's own engines."""
    _drained: set[str] = field(default_factory=set)
    """URLs of the launch's own engines that are drained."""

    def run_events(self, events: Iterator[ChurnEvent]) -> None:
        """Apply events until they or the run end."""
        self._wait_until(lambda: len(self.states()) > 0)
        self._initial_urls = frozenset(self.states())
        for event in events:
            if not self._wait_until(partial(self._apply, event)):
                return

    def _apply(self, event: ChurnEvent) -> bool:
        """Apply an event if it is due and an action is possible. Return whether it was applied."""
        if steps_done(self.run) < event.step:
            return False
        states = self.states()
        serving = sorted(url for url, state in states.items() if state["serving"])
        joined = [url for url in serving if url not in self._initial_urls]
        candidates: dict[Action, list[str]] = {}
        if len(self.joiners()) < MAX_JOINED:
            candidates["join"] = [""]
        if len(serving) > 1:  # one engine must remain
            candidates |= {"drain": serving, "kill": serving, "terminate": joined, "vanish": joined}
        possible = [action for action, urls in candidates.items() if urls]
        if not possible:
            return False
        fewest = min(self.event_counts[action] for action in possible)  # prefer actions that are rare so far
        rare = [action for action in possible if self.event_counts[action] == fewest]
        action = rare[int(event.kind * len(rare))]
        if action == "join":
            return self._undo_drain(min(away)) if (away := self._drained - states.keys()) else self._join()
        return self._remove_engine(action, candidates[action][int(event.target * len(candidates[action]))])

    def _join(self) -> bool:
        pids_before = {p.pid for p in self.joiners()}
        self._record("join", "")
        self.start()
        return self._wait_until(lambda: any(p.pid not in pids_before for p in self.joiners()))

    def _undo_drain(self, url: str) -> bool:
        success = main(["engines", "drain", str(self.run), url, "--undo"]) == 0
        self._drained.discard(url)
        self._record("drain undone" if success else "drain undone too late", url)
        return success

    def _remove_engine(self, action: Action, url: str) -> bool:
        if action == "drain":
            success = main(["engines", "drain", str(self.run), url]) == 0
            self._drained |= {url} & self._initial_urls if success else set()
            self._record("drain" if success else "drain refused", url)
            return success
        server = engine_process(url)
        if server is None:  # it has died
            return False
        joiner = next((p for p in server.parents() if is_joiner(p)), None)
        if action == "terminate":
            assert joiner is not None
            joiner.send_signal(signal.SIGTERM)
        else:
            engine_tree = [*server.children(recursive=True), server]
            # The joiner first: otherwise it would notice the engine's death and leave cleanly.
            for process in [*([joiner] if joiner is not None and action == "vanish" else []), *engine_tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._record(action, url)
        return True

    def _record(self, name: str, url: str) -> None:
        self.event_counts[name] += 1
        self.log.append(f"step {steps_done(self.run)}: {name} {url}")

    def states(self) -> dict[str, dict[str, object]]:
        """Return the states of the run's engines by URL; empty while the coordinator is unreachable."""
        try:
            return engines(self.run)
        except CoordinatorUnreachable:
            return {}

    def joiners(self) -> list[psutil.Process]:
        """Return the processes that started an engine for the run. They end with the run."""
        return [p for p in psutil.process_iter() if is_joiner(p) and str(self.run) in p.cmdline()]

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition. Return False if the run ends first."""
        while not condition():
            if not self.is_running():
                return False
            time.sleep(0.2)
        return True


def engine_process(url: str) -> psutil.Process | None:
    """Return the engine process that listens at the port of `url`, or None."""
    port = str(urlsplit(url).port)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            arguments = process.cmdline()
            serves = "rlsys.engine.server" in arguments and arguments[arguments.index("--port") + 1] == port
            if serves and "launch.keeper" not in arguments and "srun" not in arguments[0]:
                return process
    return None


def is_joiner(process: psutil.Process) -> bool:
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    return "join" in arguments and "engines" in arguments and "srun" not in arguments[0]
