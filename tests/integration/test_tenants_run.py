"""`rlsys tenants` as a user starts it, with Tinker's own client in a venv of its own: two tenants train at once, each
learns its own task, and the server is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.ports import free_ports
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS, command_line
from tests.helpers.venvs import venv

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

MODEL = "quickstart-moe"
PROMPT = [4, 12, 13, 14, 5]
ANSWERS = {"alice": [15, 16, 17, 2], "bob": [18, 11, 13, 2]}
"""Digits, which the model knows. Each ends with the model's end of a sequence."""
MOST_STEPS = 250
PATIENCE = 300.0
"""A guard, no claim."""


class Server:
    """`rlsys tenants` on a folder."""

    def __init__(self, run: Path, tenants: list[str]) -> None:
        self.run, port = run, free_ports("127.0.0.1", 1)[0]
        self.url = f"http://127.0.0.1:{port}"
        words = [word for name in tenants for word in ("--tenant", name)]
        command = [*RLSYS, "tenants", "configs/quickstart_lora.yaml", f"run.dir={run}", "--port", str(port)]
        self._log = (run.parent / "tenants.log").open("wb")
        self._process = subprocess.Popen(
            [*command, *words, "launch.grace_seconds=10"],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.wait()

    def wait(self) -> None:
        until = time.monotonic() + PATIENCE
        while not self.healthy():
            assert self._process.poll() is None and time.monotonic() < until, self.told()
            time.sleep(0.2)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self, *words: str) -> None:
        """-9 to the innermost process whose command line has the words."""
        started = psutil.Process(self._process.pid).children(recursive=True)
        [p for p in started if set(words) <= set(command_line(p))][-1].send_signal(signal.SIGKILL)

    def told(self) -> str:
        logs = [self.run.parent / "tenants.log", self.run / "logs/trainer.log"]
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def key_file(self, tenant: str) -> Path:
        return self.run / "tenants" / tenant / "key"


class Client:
    """One process of Tinker's client."""

    def __init__(self, server: Server, key_file: Path) -> None:
        python = venv("tinker", "tinker==0.38.0")
        script = ROOT / "tests/helpers/tinker_client.py"
        self._process = subprocess.Popen(
            [str(python), str(script), server.url, str(key_file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=key_file.parent,
            env={**os.environ, "TINKER_TELEMETRY": "0"},
        )  # fmt: skip

    def begin(self, method: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def __call__(self, method: str, **arguments: Any) -> Any:
        self.begin(method, **arguments)
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["result"]

    def fails(self, method: str, **arguments: Any) -> str:
        self.begin(method, **arguments)
        return str(self.answer()["error"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def clients(server: Server, *tenants: str) -> Iterator[list[Client]]:
    clients = [Client(server, server.key_file(tenant)) for tenant in tenants]
    try:
        yield clients
    finally:
        for each in clients:
            each.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("tenants") / "run", ["alice", "bob", "carol"])
    yield server
    server.end()


def imitation(answer: list[int]) -> dict[str, Any]:
    """The answer to PROMPT, as the protocol wants it: what each position is to predict."""
    ids = PROMPT + answer
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(answer)
    return {"ids": ids[:-1], "inputs": {"target_tokens": ids[1:], "weights": weights}}


def test_two_tenants_train_concurrently_on_their_own_tasks(server: Server) -> None:
    with clients(server, "alice", "bob") as tenants:
        answers = list(ANSWERS.values())
        for seed, client in enumerate(tenants):
            client("create", model="m", base=MODEL, rank=16, seed=seed)
            client("sampler_of", sampler="base", base_model=MODEL)
        base = [client("logprobs", sampler="base", prompt=PROMPT + ANSWERS["alice"]) for client in tenants]
        assert base[0] == pytest.approx(base[1], abs=1e-6)
        for _ in range(MOST_STEPS):  # both at once
            for client, answer in zip(tenants, answers, strict=True):
                client.begin("train", model="m", data=[imitation(answer)], loss="cross_entropy", lr=4e-3)
            losses = [client.answer()["result"][0] for client in tenants]
            if max(losses) < 0.6:  # each token is then more probable than all others together
                break
        assert max(losses) < 0.6, losses
        alice, bob = tenants
        alice("sampler", sampler="now", model="m")
        bob("sampler", sampler="now", model="m")
        logprobs_before = alice("logprobs", sampler="now", prompt=PROMPT + ANSWERS["alice"])
        for client, answer in zip(tenants, answers, strict=True):
            (sample,) = client("sample", sampler="now", prompt=PROMPT, max_tokens=8, temperature=0.0)
            assert (sample["ids"], sample["reason"]) == (answer, "stop")
        for _ in range(3):
            bob("train", model="m", data=[imitation(answers[1])], loss="cross_entropy", lr=1e-2)
        bob("sampler", sampler="later", model="m")
        logprobs_after = alice("logprobs", sampler="now", prompt=PROMPT + ANSWERS["alice"])
        assert logprobs_after[1:] == pytest.approx(logprobs_before[1:], abs=1e-6), (
            "bob's training does not touch alice's sampling"
        )
        assert alice("logprobs", sampler="base", prompt=PROMPT + ANSWERS["alice"])[1:] == pytest.approx(
            base[0][1:], abs=1e-6
        ), "nor does it touch the model"


def test_engine_and_trainer_logprobs_agree_and_the_reward_rises(server: Server) -> None:
    """At temperature 1, of trained adapters; then the policy gradient on them raises what is rewarded."""
    target_id = 15
    with clients(server, "alice") as (alice,):
        alice("create", model="rl", base=MODEL, rank=16, seed=7)
        rewards: list[float] = []
        gaps: list[float] = []
        while len(rewards) < 40 and max(rewards, default=0) < 0.9:
            alice("sampler", sampler="s", model="rl")
            samples = alice("sample", sampler="s", prompt=PROMPT, n=32, max_tokens=2, temperature=1.0)
            marks = [each["ids"].count(target_id) / 2 for each in samples]
            mean = sum(marks) / len(marks)
            rewards.append(mean)
            data = [_rewarded(each, mark - mean) for each, mark in zip(samples, marks, strict=True)]
            result = alice("run", model="rl", data=data, loss="importance_sampling", only=True)
            for each, logp in zip(samples, result["logprobs"], strict=True):
                trainer_logprobs = logp[len(PROMPT) - 1 :]
                gaps += [abs(a - b) for a, b in zip(trainer_logprobs, each["logprobs"], strict=True)]
            if mean == 0:  # nothing was found that could be rewarded: show it once
                data = [imitation([target_id])]
                alice("train", model="rl", data=data, loss="cross_entropy", lr=3e-3)
            else:
                alice("train", model="rl", data=data, loss="importance_sampling", lr=3e-3)
        print(f"rewards {rewards}; largest gap of log-probs {max(gaps):.1e}")
        assert max(gaps) <= 2e-5
        assert max(rewards) > rewards[0] + 0.5


def _rewarded(made: dict[str, Any], advantage: float) -> dict[str, Any]:
    n, ids = len(PROMPT) - 1, PROMPT + made["ids"]
    tokens = len(made["ids"])
    inputs = {
        "target_tokens": [0] * n + made["ids"],
        "logprobs": [0.0] * n + made["logprobs"],
        "advantages": [0.0] * n + [advantage] * tokens,
    }
    return {"ids": ids[:-1], "inputs": inputs}


def test_a_killed_server_resumes_bit_for_bit(server: Server) -> None:
    """Between a backward pass and its step, and after something was saved: the client notices but the wait."""
    data = [imitation(ANSWERS["alice"]), imitation(ANSWERS["bob"])]
    adam = {"learning_rate": 1e-2, "weight_decay": 0.01, "grad_clip_norm": 1.0}
    with clients(server, "carol", "bob") as (carol, bob):
        records: list[list[Any]] = [[], []]
        for client, record in zip((carol, bob), records, strict=True):
            client("create", model="m", base=MODEL, rank=16, seed=3)
            for step in range(3):
                for portion in data:
                    result = client("run", model="m", data=[portion], loss="cross_entropy")
                    record.append([result["metrics"], result["logprobs"]])
                    if client is carol and step == 1:
                        server.kill("rlsys.tenants.serve")
                record.append(client("step", model="m", **adam))
                if client is carol and step == 1:
                    path = client("save", model="m", name="two")
                    server.kill("rlsys.tenants.serve")
            record.append(client("run", model="m", data=data, loss="cross_entropy", only=True))
        assert records[0] == records[1]
        carol("load", model="again", path=path, optimizer=True)
        at_two = [carol("run", model="again", data=[p], loss="cross_entropy") for p in data]
        assert [[p["metrics"], p["logprobs"]] for p in at_two] == records[1][6:8], "what was saved is there"
        assert carol("step", model="again", **adam) == records[1][8]
        assert ": exists; expected another name" in carol.fails("save", model="m", name="two")
        server.kill("rlsys.engine.server")
        carol("sampler", sampler="s", model="m")
        assert carol("sample", sampler="s", prompt=PROMPT, max_tokens=1)[0]["ids"]


def test_unsupported_client_requests_are_rejected_with_a_reason(server: Server) -> None:
    with clients(server, "alice", "bob") as (alice, bob):
        assert "rank = 32: expected 16, the rank of this server's adapters" in alice.fails(
            "create", model="m", base=MODEL, rank=32, seed=0
        )
        assert "base_model = other: expected quickstart-moe, the model of this server" in alice.fails(
            "create", model="m", base="other", rank=16, seed=0
        )
        alice("create", model="m", base=MODEL, rank=16, seed=0)
        refusal = alice.fails("run", model="m", data=[imitation([500])], loss="cross_entropy")
        assert "target_tokens has the id 500; expected 0 to 127" in refusal
        alice("run", model="m", data=[imitation([50])], loss="cross_entropy")
        assert "expected a forward_backward" not in alice("step", model="m", learning_rate=1e-3)
        assert "expected a forward_backward" in alice.fails("step", model="m", learning_rate=1e-3)
        path = alice("save", model="m", name="mine")
        assert "not found" in bob.fails("load", model="theirs", path=path, optimizer=False)
        alice("sampler_of", sampler="base", base_model=MODEL)
        assert "token id 1000 is outside" in alice.fails(
            "sample", sampler="base", prompt=[1000], max_tokens=1
        )
        assert len(alice("sample", sampler="base", prompt=PROMPT, n=3, max_tokens=4)) == 3, "it still serves"
