"""Every group of NCCL that a shipped layout makes has one rank on a GPU, and each engine rank opens memory of its own
GPU. Shown without a GPU: by torch's own groups on a backend that refuses what NCCL refuses (tests/helpers/fake_nccl).
"""

from __future__ import annotations

import base64
import queue
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlsys.config import Config, load_config
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.planner.layout import lay_out, push_plan
from rlsys.trainer import setup
from rlsys.weights import transports
from rlsys.weights.buckets import StagingBuffers
from rlsys.weights.gathered_push import GatheredPush
from rlsys.weights.push_plan import PushPlan
from tests.helpers import fake_nccl
from tests.helpers.servers import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.gate]

EXPERIMENTS = sorted(p for p in (ROOT / "configs/experiments").glob("*.yaml") if p.stem != "base")
COLOCATED, DISAGGREGATED = (
    [p for p in EXPERIMENTS if load_config(p).launch.placement == placement]
    for placement in ("colocated", "disaggregated")
)
SMALL = ROOT / "configs/experiments/qwen3-30b-a3b_8gpu_colocated.yaml"
JOIN, RECEIVE, LEAVE = (
    "/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group",
)  # fmt: skip
as_rank = contextmanager(fake_nccl.as_rank)


def of(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda p: p.stem)


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    """Imported while there is no CUDA to be found."""
    transports.prepare_sglang()
    transports.flattened_payload(StagingBuffers(shared=False).flatten([("weight", torch.zeros(1))]))
    from sglang.srt.utils import init_custom_process_group  # noqa: F401


def sync_of(config: Config, rank: int, plan: PushPlan | None = None) -> GatheredPush:
    """The launch's plan, unless another one is given."""
    return GatheredPush(config, rank, push_plan(config, lay_out(config)) if plan is None else plan)


def push(sync: GatheredPush, engines: list[EngineAddress], rank: int) -> None:
    """Weights that tell whose they are."""
    sync.push([("weight", torch.full((4,), float(rank)))], WeightUpdate(1, engines, []))


@of(EXPERIMENTS)
def test_the_trainers_groups_have_one_rank_on_a_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = fake_nccl.machines(load_config(path), monkeypatch)
    for rank in (0, len(machines.trainer) - 1):
        machines.groups.clear()
        with as_rank(machines, rank, monkeypatch):
            setup.init_distributed(machines.config)
        sizes = {len(group.members) for group in machines.groups}
        assert max(sizes) == len(machines.trainer) and machines.config.parallel.tp in sizes


def test_two_trainer_ranks_of_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the backend sees them: two processes to which a launch gave the same GPU."""
    machines = fake_nccl.machines(load_config(SMALL), monkeypatch)
    machines.trainer[3] = machines.trainer[2]
    with (
        as_rank(machines, 0, monkeypatch),
        pytest.raises(dist.DistBackendError, match="Duplicate GPU detected : rank 3 and rank 2"),
    ):
        setup.init_distributed(machines.config)


@of(DISAGGREGATED)
def test_a_group_with_engines_has_one_rank_on_a_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = fake_nccl.machines(load_config(path), monkeypatch)
    with as_rank(machines, 0, monkeypatch):
        setup.init_distributed(machines.config)
        sync = sync_of(machines.config, 0)
        push(sync, machines.engines, 0)
        sync.close()
    engine_gpus = [gpu for gpus in machines.gpus.values() for gpu in gpus]
    assert [group.members for group in machines.groups if group.engines] == [
        [machines.trainer[0], *engine_gpus]
    ]
    urls = [engine.url for engine in machines.engines]
    requested_urls = [
        sorted(url for url, path, _ in machines.requests if path == endpoint)
        for endpoint in (JOIN, RECEIVE, LEAVE)
    ]
    assert requested_urls == [sorted(urls)] * 3
    assert machines.events.count("broadcast nccl") == 1


@of(COLOCATED)
def test_each_engine_rank_opens_memory_of_its_own_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colocated layouts make no group with engines at all."""
    machines = fake_nccl.machines(load_config(path), monkeypatch)
    monkeypatch.setattr(transports, "RankChannel", peers_of_one_process())
    monkeypatch.setattr(transports, "serializer", lambda: whose)
    with as_rank(machines, 0, monkeypatch):
        setup.init_distributed(machines.config)
        everywhere = [sync_of(machines.config, rank) for rank in range(len(machines.trainer))]
        with ThreadPoolExecutor(len(everywhere)) as ranks:
            list(ranks.map(lambda r: push(everywhere[r], machines.engines, r), range(len(everywhere))))
    opened = {
        url: [machines.trainer[int(base64.b64decode(handle))] for handle in body["serialized_named_tensors"]]
        for url, path, body in machines.requests if path == "/update_weights_from_tensor"
    }  # fmt: skip
    assert opened == machines.gpus
    assert not any(path == JOIN for _, path, _ in machines.requests)


@of(COLOCATED)
def test_a_trainer_and_an_engine_rank_of_one_gpu_are_refused_before_anything_is_sent(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan that is not the launch's: one group for all. Every engine is left out of the push, with NCCL's words."""
    machines = fake_nccl.machines(load_config(path), monkeypatch)
    with as_rank(machines, 0, monkeypatch):
        setup.init_distributed(machines.config)
        sync = sync_of(machines.config, 0, PushPlan({}, group=True, sender=0))
        push(sync, machines.engines, 0)
    why = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"
    messages = [r.getMessage() for r in caplog.records if "excluded from a weight update" in r.getMessage()]
    assert len(messages) == len(machines.engines) and all(why in line for line in messages)
    assert not any("broadcast" in event or RECEIVE in event for event in machines.events)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_group_with_an_engine_that_died_is_aborted(noticed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's end of a group waits for the kernel that hangs on the dead engine, until the watchdog ends the trainer.
    The others get the weights by a new group, which they and the trainer leave together: each side waits for the
    other. Nor does the watchdog end the trainer for what happens to an engine."""
    machines = fake_nccl.machines(load_config(DISAGGREGATED[-1]), monkeypatch)
    machines.failing_engine, machines.failure_is_detected = machines.engines[0].url, noticed
    remaining_urls = [engine.url for engine in machines.engines[1:]]
    with as_rank(machines, 0, monkeypatch):
        setup.init_distributed(machines.config)
        sync = sync_of(machines.config, 0)
        push(sync, machines.engines, 0)
        sync.close()
        events = list(machines.events)
    ends = [e for e in events if e.endswith(LEAVE) or e.split()[0] in ("abort", "destroy")]
    assert ends[0] == "abort nccl"
    # Both sides at once, so in any order (tests/unit/weights/test_group_transport.py: engines are asked first).
    assert sorted(ends[1:]) == sorted(["destroy nccl", *(url + LEAVE for url in remaining_urls)])
    assert [e for e in events if "broadcast" in e] == ["broadcast nccl"] * 2
    assert {group.watched for group in machines.groups if group.engines} == {False}
    assert {group.watched for group in machines.groups if not group.engines} == {True}


def whose(tensors: dict[str, torch.Tensor]) -> bytes:
    """Instead of a handle: the rank that the weights tell."""
    return str(int(tensors["flattened_tensor"].view(torch.float32)[0])).encode()


def peers_of_one_process() -> type:
    """rlsys.weights.rank_channel between threads: made in the order of the ranks."""
    lines: defaultdict[tuple[int, int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
    ranks: Iterator[int] = iter(range(10**6))

    class Channel:
        def __init__(self, seconds: float) -> None:
            self._rank = next(ranks)

        def send(self, message: bytes, to: int, tag: int) -> None:
            lines[self._rank, to, tag].put(message)

        def receive(self, source: int, tag: int) -> bytes:
            return lines[source, self._rank, tag].get(timeout=60)

        def flush(self) -> None: ...

    return Channel
