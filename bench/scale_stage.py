"""Processes of bench/scale.py: engines that respond at once, a rollout process, and its workers.

python bench/scale_stage.py --engines N --port P ...     serve N engines on ports from P on, until it is ended
python bench/scale_stage.py --coordinator --port P ...   run a rollout process on these engines; prints JSON
python bench/scale_stage.py --worker I --port P ...      run a worker; the rollout process starts it
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import resource
import sqlite3
import sys
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from aiohttp import web
from numpy.typing import NDArray

from rlsys.config import Config, identity
from rlsys.core.messages import encode
from rlsys.core.types import Prompt
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.worker.remote_worker import RemoteWorker
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import Workers, direct_workers, remote_workers

PROMPT, VOCAB, EOS = 32, 100_000, 1
"""Tokens of a prompt; size of the vocabulary; stop id."""
CHUNK = 32
"""Response lengths are multiples of this. Also the tokens of an event, for older rlsys without a stream interval."""
TOKEN, LOGP = 54_321, -0.123456
"""The id and the log-prob of all response tokens."""
TAIL = (1, 1, 1, 1, 2, 2, 3, 8)
"""Relative response lengths: a long-tailed distribution."""


def length_of(seed: int, mean: int) -> int:
    """Return the length of the response with this seed in tokens; over all seeds the mean is about `mean`."""
    return max(CHUNK, TAIL[seed % len(TAIL)] * mean * 8 // sum(TAIL) // CHUNK * CHUNK)


# The engines. Events are cached, so that the engines' process does not limit the throughput.


@cache
def event(tokens: int, reason: str | None, routes: int) -> bytes:
    """Return an event of a stream, in which LABEL stands for the weight version.

    Args:
        tokens: number of new tokens.
        reason: finish reason; None: the response continues.
        routes: number of bytes of the experts; 0: no experts.
    """
    meta: dict[str, Any] = {
        "finish_reason": None if reason is None else {"type": reason}, "weight_version": "LABEL",
        "prompt_tokens": PROMPT, "cached_tokens": 0, "completion_tokens": tokens,
        "output_token_logprobs": [[LOGP, TOKEN, None]] * tokens,
    }  # fmt: skip
    if routes:
        meta["routed_experts"] = base64.b64encode(bytes([7, 0, 0, 0]) * (routes // 4)).decode()
    return f"data: {json.dumps({'output_ids': [TOKEN] * tokens, 'meta_info': meta})}\n\n".encode()


@cache
def constant_experts(rows: int, layers: int, topk: int) -> NDArray[np.int32]:
    """Return the experts of `rows` tokens, `[rows, layers, topk]`: always the same one."""
    return np.full((rows, layers, topk), 7, np.int32)


class Engine:
    """A scripted engine that speaks SGLang's HTTP API and answers at once.

    Args:
        name: name of the engine in its run.
        mean: mean length of a response, in tokens.
        layers: number of layers of each token's routes; 0: no routes.
        topk: number of experts of a token in each layer.
    """

    def __init__(self, name: str, mean: int, layers: int, topk: int) -> None:
        self._name, self._mean = name, mean
        self._shape = layers, topk
        self._writer: Any = None
        self._interval = CHUNK
        self._label = b"0"
        self._stop: dict[str, asyncio.Event] = {}
        self._generated = 0

    def app(self) -> web.Application:
        """Return the engine's HTTP server."""
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/health", self._succeed)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weight_version", self._version)
        app.router.add_post("/weights_checker", self._checksums)
        app.router.add_post("/run", self._run)
        app.router.add_post("/{any}", self._succeed)
        return app

    async def _succeed(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _run(self, request: web.Request) -> web.Response:
        """Assign the engine to a run: its folder, for requested routes, and its stream interval."""
        # Imported here, because the rollout process of an older checkout also runs this file.
        from rlsys.engine.hooks.route_writer import RouteWriter

        body = await request.json()
        self._interval = body["interval"]
        segments = Path(body["folder"]) / "segments"
        segments.mkdir(exist_ok=True)
        self._writer = RouteWriter(segments, 0, self._name, 1, 0)
        return web.json_response({"success": True})

    async def _checksums(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True, "ranks": [{"checksums": {"w": self._label.decode()}}]})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._label.decode()})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"sglang:generation_tokens_total {self._generated}\n")

    async def _version(self, request: web.Request) -> web.Response:
        self._label = str((await request.json())["new_version"]).encode()
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, stop in self._stop.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                stop.set()
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Score the input, or stream a response until its length is reached or it is aborted."""
        body = await request.json()
        input_tokens = len(body["input_ids"])
        if not body.get("stream"):
            self._generated += 1
            entries = [[None, 5, None], *[[LOGP, 5, None]] * (input_tokens - 1)]
            meta = {"input_token_logprobs": entries, "weight_version": self._label.decode()}
            return web.json_response({"meta_info": meta})
        stop = self._stop[body["rid"]] = asyncio.Event()
        length = length_of(body["sampling_params"]["sampling_seed"], self._mean)
        remaining = length - (input_tokens - PROMPT)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        sent = 0
        while sent + self._interval < remaining and not stop.is_set():
            await stream.write(event(self._interval, None, 0).replace(b"LABEL", self._label))
            sent += self._interval
            await asyncio.sleep(0)
        final_tokens = min(remaining - sent, CHUNK if stop.is_set() else self._interval)
        sent += final_tokens
        self._generated += sent
        del self._stop[body["rid"]]
        reason = "abort" if sent < remaining else "stop"
        rows = input_tokens + sent - 1 - body.get("routed_experts_start_len", 0)
        await stream.write(self._last_event(body, final_tokens, reason, rows))
        await stream.write_eof()
        return stream

    def _last_event(self, body: dict[str, Any], tokens: int, reason: str, rows: int) -> bytes:
        """Return the last event of a stream, with the experts or the location of the file that contains them.

        Args:
            body: the request.
            tokens: number of new tokens.
            reason: finish reason.
            rows: number of tokens whose experts are requested.
        """
        layers, topk = self._shape
        wants_routes = bool(body.get("return_routed_experts"))
        to_file = wants_routes and "rlsys_routes" in body["sampling_params"].get("custom_params", {})
        inline_bytes = 4 * layers * topk * rows if wants_routes and not to_file else 0
        last = event(tokens, reason, inline_bytes).replace(b"LABEL", self._label)
        if to_file:
            experts = constant_experts(rows, layers, topk)
            location = self._writer.append(experts, body["routed_experts_start_len"])
            routes_field = b'"routed_experts": "' + base64.b64encode(location) + b'", "weight_version"'
            last = last.replace(b'"weight_version"', routes_field)
        return last


async def serve_engines(count: int, port: int, mean: int, layers: int, topk: int) -> None:
    """Serve `count` engines until the process is ended. Prints `ready` when all listen (see Engine)."""
    for i in range(count):
        runner = web.AppRunner(Engine(f"engine-{port + i}", mean, layers, topk).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port + i, backlog=4096).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


# The rollout: manager, router, buffer and ledger of one process, over real sockets.


class Lag:
    """Measures the delay of the event loop every 10 ms.

    Attributes:
        delays: the measured delays in seconds.
    """

    def __init__(self) -> None:
        self.delays: list[float] = []

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            self.delays.append(loop.time() - due)


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def total_cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU seconds of all processes together."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


class Numbers:
    """A source of prompts with different token ids."""

    def train(self, index: int) -> Prompt:
        return Prompt(index, "", [2 + (index + i) % 1000 for i in range(PROMPT)], {})

    def heldout(self, n: int) -> list[Prompt]:
        return [self.train(10**6 + i) for i in range(n)]


def write_history(file: tuple[Path, str, int], steps: int, config: Config) -> None:
    """Write the ledger of a run after `steps` train steps: rows without tokens, as after the tokens were deleted.

    Args:
        file: path, identity and largest group of the ledger (arguments of RolloutBuffer).
        steps: number of train steps.
        config: the run's config.
    """
    RolloutBuffer(*file).close()
    groups, size = config.rollout.groups_per_step, config.rollout.group_size
    ids = np.arange(PROMPT, dtype="<i4").tobytes()
    db = sqlite3.connect(file[0], isolation_level=None)
    db.execute("BEGIN")
    for step in range(1, steps + 1):
        group_ids = range((step - 1) * groups, step * groups)
        db.executemany(
            "INSERT INTO groups VALUES (?, ?, 'trained', ?, ?, ?, ?)",
            ((g, g, step, g, ids, size) for g in group_ids),
        )
        db.executemany(
            "INSERT INTO samples (sample_id, group_id, place, seed, status, tokens, mu_sum, spans, reward, resumes, "
            "cached_tokens, prefilled_tokens, engine, observed, deaths, faults, own_prompt, last_turn, "
            "inherited_tokens, discarded) "
            "VALUES (?, ?, ?, 1, 'finished', 512, -99.5, '[[1,0,300],[2,300,512]]', 0.5, 1, 0, 32, 'http://x', '[]', "
            "0, 0, 0, 0, 0, 0)",
            ((g * file[2] + i, g, i) for g in group_ids for i in range(size)),
        )
        db.execute("INSERT INTO takes VALUES (?, ?, ?, '[]')", (step, step, json.dumps(list(group_ids))))
        db.execute("INSERT INTO pushes VALUES (?, ?)", (step, step - 1))
    meta_values = {
        "issued": steps * groups,
        "completed": steps * groups,
        "weight_version": steps,
        "pruned_to": steps,
    }
    db.executemany("UPDATE meta SET value = ? WHERE key = ?", ((n, key) for key, n in meta_values.items()))
    db.execute("COMMIT")
    db.close()


async def reward(_: Prompt, text: str) -> float:
    """Return a reward that depends on the length of the text."""
    return len(text) % 64 / 64


def make_router(args: argparse.Namespace, session: aiohttp.ClientSession) -> Router:
    """Return a router of all engines; in a worker, of the engines that this worker gets."""
    engine_indices = range(getattr(args, "worker", None) or 0, args.engines, getattr(args, "workers", 1))
    return Router(
        [EngineClient(f"http://127.0.0.1:{args.port + i}", session) for i in engine_indices],
        vocab_size=VOCAB, context_length=20 * args.mean, stop_ids={EOS}, bounds=Bounds(1e-3, 1e-3),
        routes=args.layers > 0,
    )  # fmt: skip


def make_scorer() -> Scorer:
    """Return a scorer with `reward`, without a tokenizer."""
    return Scorer(lambda: nullcontext(reward), lambda ids: "x" * len(ids), 60)


def make_workers(config: Config, args: argparse.Namespace) -> Workers:
    """Return workers in separate processes, which run this file."""
    (args.folder / "config.json").write_text(config.model_dump_json())
    names = ("engines", "port", "mean", "layers", "topk", "workers", "folder")
    common = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    return remote_workers(
        config, [[sys.executable, __file__, *common, "--worker", str(i)] for i in range(args.workers)]
    )


async def run_worker(args: argparse.Namespace) -> None:
    """Run a worker. At its end it writes the delays of its event loop to `args.folder`, without the first tenth."""
    from rlsys.worker.worker import Worker, WorkerParts, exit_now, standard_input

    config, lag = Config.model_validate_json((args.folder / "config.json").read_text()), Lag()

    def end() -> None:
        delays = lag.delays[len(lag.delays) // 10 :]
        (args.folder / f"lag-{args.worker}.json").write_text(json.dumps(delays))
        exit_now()

    async with make_session() as session:
        router = make_router(args, session)
        watch = asyncio.create_task(lag.watch())
        parts = WorkerParts(
            config,
            router,
            make_scorer(),
            None,
            lambda url, tp, _pool: EngineClient(url, session),
        )
        await Worker(parts, end).serve(standard_input())
        watch.cancel()


class Rollout:
    """The parts of rlsys.rollout.service without its HTTP server, and the trainer's calls of a push."""

    def __init__(self, args: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        sizes = {
            "groups_per_step": args.samples // 16,
            "group_size": 8,
            "over_provision": 2,
            "max_staleness": 4,
        }
        if args.workers > 1:
            sizes["workers"] = args.workers
        self.config = Config.model_validate(
            {
                "run": {"dir": args.folder}, "model": {"path": args.folder},
                "rollout": {**sizes, "max_response_tokens": 16 * args.mean},
                "engine": {
                    "count": args.engines, "max_total_tokens": 20 * args.mean, "return_routes": args.layers > 0,
                },
                "trainer": {"token_budget": 20 * args.mean},
                "launch": {"placement": "colocated"},
            }
        )  # fmt: skip
        source: Any = Numbers()
        workers = getattr(args, "workers", 1)
        buffer_options: dict[str, Any] = {} if workers == 1 else {"holds_tokens": False}
        self.workers = (
            direct_workers(self.config, make_router(args, session), make_scorer())
            if workers == 1
            else make_workers(self.config, args)
        )
        planning = Planning(self.config, source, None)
        self._file = args.folder / "rollouts.sqlite", identity(self.config), planning.largest
        if args.history:
            write_history(self._file, args.history, self.config)
        self.buffer = RolloutBuffer(*self._file, **buffer_options)
        self._source, self._planning = source, planning

    async def begin(self) -> None:
        """Start the workers, and create the manager."""
        await self.workers.start(self.buffer)
        self.manager = RolloutManager(
            self.config, self.buffer, self.workers, self._source, make_scorer(), self._planning
        )

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are separate processes."""
        return [w.pid for w in self.workers.workers if isinstance(w, RemoteWorker)]

    def stats(self) -> dict[str, float]:
        """Return the counts of the routers."""
        return self.workers.engines.stats()

    async def push(self) -> float:
        """Push without tensors. Return the seconds from the interrupt to attested weights."""
        start = time.monotonic()
        update = await self.manager.begin_push()
        canaries = [Canary(ids, [LOGP] * (len(ids) - 1)) for ids in update.canaries]
        await self.manager.end_push(update, canaries, [])
        return time.monotonic() - start

    async def close(self) -> float:
        """Close the ledger. Return the seconds to open it again."""
        await self.manager.close()
        await self.workers.close()
        self.buffer.close()
        start = time.monotonic()
        RolloutBuffer(*self._file).close()
        return time.monotonic() - start


async def run_rollout(args: argparse.Namespace) -> dict[str, float]:
    """Run a rollout process for `args.steps` train steps. Return its figures."""
    async with make_session() as session:
        rollout, lag = Rollout(args, session), Lag()
        await assign_engines(args, session, rollout.config)
        await rollout.begin()
        gc.freeze()  # as the service does
        background = [asyncio.create_task(watch) for watch in (*rollout.workers.watches(), lag.watch())]
        await rollout.manager.restore(args.history)
        await rollout.push()
        lag.delays.clear()
        figures = await measure_steps(rollout, args.history, args.steps)
        figures |= await measure_repeated_take(rollout, args.history + args.steps)
        for task in background:
            task.cancel()
        figures["reopen_seconds"] = await rollout.close()
    delays = sorted(lag.delays)
    worker_delays = [
        delay for file in args.folder.glob("lag-*.json") for delay in json.loads(file.read_text())
    ]
    stream_delays = sorted(worker_delays) or delays
    files = [file for file in args.folder.rglob("*") if file.is_file()]
    return figures | {
        "streams_lag_p99_ms": 1e3 * stream_delays[int(0.99 * len(stream_delays))],
        "loop_lag_p99_ms": 1e3 * delays[int(0.99 * len(delays))],
        "loop_lag_max_ms": 1e3 * delays[-1],
        "disk_bytes_per_token": sum(file.stat().st_size for file in files) / figures["tokens"],
    }


async def assign_engines(args: argparse.Namespace, session: aiohttp.ClientSession, config: Config) -> None:
    """Assign all engines to the run: its folder, and its stream interval."""
    run = {"folder": str(args.folder), "interval": getattr(config, "stream_interval", CHUNK)}
    for i in range(args.engines):
        async with session.post(f"http://127.0.0.1:{args.port + i}/run", json=run) as answer:
            answer.raise_for_status()


async def measure_steps(rollout: Rollout, history: int, steps: int) -> dict[str, float]:
    """Take and push `steps` times after the step `history`.

    Returns:
        received tokens, CPU time per token, and memory.
    """
    workers = [psutil.Process(pid) for pid in rollout.pids()]
    pushes = []
    start_time, cpu_before = time.monotonic(), own_cpu_seconds()
    workers_cpu_before = total_cpu_seconds(workers)
    for step in range(history + 1, history + steps + 1):
        await rollout.manager.take(step)
        pushes.append(await rollout.push())
    coordinator_cpu, seconds = own_cpu_seconds() - cpu_before, time.monotonic() - start_time
    rollout_cpu = coordinator_cpu + total_cpu_seconds(workers) - workers_cpu_before
    received = rollout.stats()["received_tokens"]
    memory = sum(p.memory_info().rss for p in (psutil.Process(), *workers))
    return {
        "tokens": received, "seconds": seconds, "rollout_us_per_token": 1e6 * rollout_cpu / received,
        "coordinator_us_per_token": 1e6 * coordinator_cpu / received,
        "tokens_per_cpu_second": received / rollout_cpu, "push_seconds_max": max(pushes),
        "rss_mb": memory / 2**20, "rss_kb_per_slot": memory / 2**10 / rollout.config.slots,
        "slots": rollout.config.slots,
    }  # fmt: skip


async def measure_repeated_take(rollout: Rollout, step: int) -> dict[str, float]:
    """Take the step again, which only reads it, and commit.

    Returns:
        seconds of both, and size of the answer.
    """
    start = time.monotonic()
    batch = await rollout.manager.take(step)
    take_seconds = time.monotonic() - start
    assert batch is not None
    start = time.monotonic()
    await rollout.manager.commit(step)
    commit_seconds = time.monotonic() - start
    samples = sum(len(group.samples) for group in batch.groups)
    return {
        "take_again_seconds": take_seconds, "commit_seconds": commit_seconds,
        "take_bytes_per_sample": len(encode(batch)) / samples,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", action="store_true", help="run a rollout process")
    parser.add_argument("--worker", type=int, metavar="I", help="run the worker with this index")
    parser.add_argument("--workers", type=int, default=1, help="number of rollout workers")
    parser.add_argument("--engines", type=int, required=True, help="number of engines")
    parser.add_argument("--port", type=int, required=True, help="port of the first engine")
    parser.add_argument("--mean", type=int, required=True, help="mean number of tokens of a response")
    parser.add_argument(
        "--layers", type=int, default=0, help="number of layers of a token's routes; 0: no routes"
    )
    parser.add_argument("--topk", type=int, default=8, help="number of experts of a token in each layer")
    parser.add_argument("--samples", type=int, default=0, help="number of samples in flight")
    parser.add_argument("--steps", type=int, default=3, help="number of train steps")
    parser.add_argument(
        "--history", type=int, default=0, help="number of train steps that the ledger has at the start"
    )
    parser.add_argument("--folder", type=Path, help="the run folder")
    args = parser.parse_args()
    if args.worker is not None:
        asyncio.run(run_worker(args))
    elif args.coordinator:
        json.dump(asyncio.run(run_rollout(args)), sys.stdout)
    else:
        asyncio.run(serve_engines(args.engines, args.port, args.mean, args.layers, args.topk))


if __name__ == "__main__":
    main()
