"""Processes of a run for fault injection on the real stack: `python -m tests.helpers.nemesis_roles ROLE ...`.

    launch   `rlsys train` with the plan of a file: the product's supervisor, keepers and rollout process
    engine   a scripted engine on a TCP port; an integer stands for its weights
    trainer  the product's client, owner and metrics; an integer stands for the weights
    rollout  rlsys.rollout.service, unchanged

File locks have no effect in any role, as on a file system where flock works on one machine only. Engine and trainer
log to history/*.jsonl beside the run folder (history.py) before any other process sees the result.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import runpy
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from launch import cgroup
from launch.backends.local import LocalBackend
from launch.plan import LaunchPlan, Role
from launch.rundir import open_run_dir
from launch.stops import StopSignals
from rlsys.config import Config, load_config
from rlsys.core import owner as owner_module
from rlsys.core.identity import Identity, engine_identity
from rlsys.core.owner import owner_of_process
from rlsys.core.types import TrainBatch
from rlsys.core.weight_updates import Canary, EngineAddress
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.rollout.client import RolloutClient
from tests.helpers.file_locks import flock_on_shared_folders
from tests.helpers.history import CheckpointRecord, RequestRecord, StepRecord, to_line
from tests.helpers.loaded import load_tokens
from tests.helpers.nemesis_engine import BUCKETS, INITIAL, weights_state
from tests.helpers.scripted_engine import Request, ScriptedEngine, canary_logprobs, checksums, logprob
from tests.helpers.supervisor_stage import StageSupervisor

FOLDER = "history"
BUCKET_SECONDS = 0.2
"""Pause between two buckets of a push, long enough for a fault in between."""
SEND_SECONDS = 60.0


def role_command(role: str, *args: str) -> list[str]:
    """Return the command line of a role."""
    return [sys.executable, "-m", "tests.helpers.nemesis_roles", role, *args]


# -- launch -------------------------------------------------------------------------------------------------------


class SilentDisplay:
    def phase(self, text: str) -> None:
        print(text, flush=True)

    def entry(self, entry: dict[str, Any], *, live: bool) -> None: ...

    def status(self, status: dict[str, Any]) -> None: ...


def launch(config_file: str, plan_file: str) -> None:
    """Run a launch as if on a machine of its own: it does not see the control groups and sockets of other launches.

    The path of the rollout process's socket is written to `plan_file`.socket.

    Args:
        config_file: path of the run's config.
        plan_file: path of a JSON file [[role, kind, argv, ready_url], ...].
    """
    vars(owner_module)["_remove_sockets"] = lambda *_: None
    vars(cgroup)["group_name"] = lambda _, role: f"rlsys-nemesis-{os.getpid()}-{role}"
    config = load_config(Path(config_file))
    with StopSignals().listening() as stop, open_run_dir(config, print) as run_dir:
        roles = [
            Role(name, kind, argv, ready_url=url, start_timeout=120.0)
            for name, kind, argv, url in json.loads(Path(plan_file).read_text())
        ]
        Path(f"{plan_file}.socket").write_text(str(run_dir.owner.rollout_socket))
        plan = LaunchPlan(roles, run_dir=config.run.dir)
        backend = LocalBackend(config, run_dir.lock_fd)
        StageSupervisor(config, plan, backend, run_dir, SilentDisplay(), stop).run()


# -- engine -------------------------------------------------------------------------------------------------------


class LoggedEngine(ScriptedEngine):
    """A scripted engine that logs each request after every token, before the client reads it."""

    def __init__(self, url: str, identity: Identity, log: Path) -> None:
        super().__init__(url, ends_at=lambda seed: 40 + seed % 30, label=identity.label(0))
        self._identity = identity
        self._log = log.open("a", encoding="utf-8")
        self._buckets = [INITIAL] * BUCKETS

    def _health(self, _: dict[str, Any]) -> tuple[int, str]:
        return 200, ""

    def _tensors(self, body: dict[str, Any]) -> tuple[int, str]:
        if not self.update_open:
            return 400, json.dumps({"success": False, "message": "no weight-update session is open"})
        self._buckets[body["bucket"]] = body["weights"]
        is_uniform = len(set(self._buckets)) == 1
        self.weights = self._buckets[0] if is_uniform else weights_state(*self._buckets)
        return 200, json.dumps({"success": True, "message": ""})

    def write(self, r: Request) -> None:
        mu = [logprob(r.seed, len(r.ids) + i, w) for i, w in enumerate(r.weights)]
        record = RequestRecord(self.url, r.rid, r.ids, r.output_ids, mu, r.weights, r.delivered, r.died)
        self._log.write(to_line(record) + "\n")
        self._log.flush()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        auth_headers = {k: v for k, v in request.headers.items() if k == "Authorization"}
        if request.path != "/health" and auth_headers != self._identity.headers(request.path):
            raise web.HTTPUnauthorized
        body = await request.json() if request.can_read_body else {}
        if not body.get("stream"):
            status, text = await self.answer(request.path, body)
            return web.Response(status=status, text=text)
        response = web.StreamResponse()
        await response.prepare(request)
        async for line in self.stream(body):
            self.write(next(r for r in reversed(self.history) if r.rid == body["rid"]))
            await response.write(line + b"\n")
        await response.write_eof()
        return response


def engine(port: int, url: str, run_dir: Path, log: Path) -> None:
    """Serve a scripted engine on `port`. `url`: its URL for the rollout process."""
    owner, _ = owner_of_process(run_dir)
    app = web.Application()
    scripted = LoggedEngine(url, engine_identity(owner, url), log)
    app.router.add_route("*", "/{any:.*}", scripted.handle)
    web.run_app(app, host="127.0.0.1", port=port, handler_cancellation=True, print=None, access_log=None)


# -- trainer ------------------------------------------------------------------------------------------------------


class Trainer:
    """The loop of rlsys.train with an integer for the weights."""

    def __init__(self, config: Config, rollout_socket: str, proxies: dict[str, str]) -> None:
        """Set up the trainer. `proxies`: an engine's URL for the rollout process -> its URL for the trainer."""
        self._config = config
        self._proxies = proxies
        self._owner, self._start = owner_of_process(config.run.dir)
        self._rollout = RolloutClient(Path(rollout_socket), self._owner.key, self._start)
        self._checkpoints = config.run.dir / "checkpoints"
        self._checkpoints.mkdir(exist_ok=True)
        name = f"trainer-{self._owner.epoch}-{self._start}.jsonl"
        self._log = (config.run.dir.parent / FOLDER / name).open("a", encoding="utf-8")

    def run(self) -> None:
        newest_checkpoint = max(
            (int(p.stem.split("-")[1]), p) for p in [Path("step-0"), *self._checkpoints.glob("step-*.json")]
        )
        step = newest_checkpoint[0]
        self._weights: int = json.loads(newest_checkpoint[1].read_text())["weights"] if step else INITIAL
        self._rollout.wait_ready(self._config.start_seconds)
        self._rollout.restore(step)
        metrics = MetricsWriter(self._config.run.dir, resume_step=step)
        metrics.write("run", step, event="resume" if step else "start")
        self._push()
        while step < self._config.trainer.steps:
            step += 1
            while (batch := self._rollout.take(step)) is None:
                self._push()
            self._learn(batch)
            self._push()
            metrics.write("step", step, **batch.metrics)
            if step % self._config.trainer.checkpoint_every == 0 or step == self._config.trainer.steps:
                self._save(step)
        metrics.write("run", step, event="end")

    def _learn(self, batch: TrainBatch) -> None:
        batch_groups = load_tokens(self._config.run.dir, batch.groups)
        groups = {g.group_id: {s.sample_id: list(s.response_ids) for s in g.samples} for g in batch_groups}
        time.sleep(1.0)
        previous_weights, self._weights = (
            self._weights,
            weights_state(self._weights, batch.train_step, sorted(groups.items())),
        )
        epoch = self._owner.epoch
        self._write(StepRecord(epoch, self._start, batch.train_step, previous_weights, self._weights, groups))

    def _write(self, record: StepRecord | CheckpointRecord) -> None:
        self._log.write(to_line(record) + "\n")
        self._log.flush()

    def _push(self) -> None:
        pending = True
        while pending:
            ticket = self._rollout.begin_push()
            send_errors = {address.url: self._send(address) for address in ticket.engines}
            excluded = {url: error for url, error in send_errors.items() if error}
            canaries = [Canary(ids, canary_logprobs(ids, self._weights)) for ids in ticket.canaries]
            sums = [checksums(self._weights)]
            pending = bool(self._rollout.end_push(ticket, canaries, sums, excluded)["push_left"])

    def _send(self, address: EngineAddress) -> str:
        """Send the weights to an engine. Return the error that excludes it from the push, or an empty string."""
        for bucket in range(BUCKETS):
            body = json.dumps({"bucket": bucket, "weights": self._weights}).encode()
            url = self._proxies.get(address.url, address.url) + "/tensors"
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {address.key}"}
            request = urllib.request.Request(url, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=SEND_SECONDS):
                    pass
            except urllib.error.HTTPError as e:
                return f"{address.url}/tensors: {e.code}"
            except (OSError, http.client.HTTPException) as e:
                return str(e) or type(e).__name__
            time.sleep(BUCKET_SECONDS)
        return ""

    def _save(self, step: int) -> None:
        part = self._checkpoints / f"part-{self._owner.epoch}-{self._start}"
        with part.open("w") as f:
            json.dump({"weights": self._weights}, f)
            f.flush()
            os.fsync(f.fileno())
        self._owner.check()
        self._write(CheckpointRecord(self._owner.epoch, self._start, step, self._weights))
        part.rename(self._checkpoints / f"step-{step}.json")
        self._rollout.commit(step)


def main() -> None:
    fcntl.flock = flock_on_shared_folders  # type: ignore[assignment]
    role, *rest = sys.argv[1:]
    parser = argparse.ArgumentParser()
    if role == "rollout":
        sys.argv = ["rlsys.rollout.service", *rest]
        runpy.run_module("rlsys.rollout.service", run_name="__main__")
        return
    run_selected: Callable[[argparse.Namespace], None]
    if role == "launch":
        parser.add_argument("config")
        parser.add_argument("plan")
        run_selected = lambda a: launch(a.config, a.plan)  # noqa: E731
    elif role == "engine":
        parser.add_argument("port", type=int)
        parser.add_argument("url")
        parser.add_argument("run_dir", type=Path)
        parser.add_argument("log", type=Path)
        run_selected = lambda a: engine(a.port, a.url, a.run_dir, a.log)  # noqa: E731
    else:
        parser.add_argument("config", type=Path)
        parser.add_argument("rollout")
        parser.add_argument("proxies", type=json.loads)
        run_selected = lambda a: Trainer(load_config(a.config), a.rollout, a.proxies).run()  # noqa: E731
    args = parser.parse_args(rest)
    run_role(lambda: run_selected(args))


if __name__ == "__main__":
    main()
