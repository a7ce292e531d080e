"""A weight transport and a group policy that only this file has train the quickstart: they touch no file of rlsys."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rlsys.obs.metrics import read_metrics
from tests.helpers.runs import RLSYS, ROOT

pytestmark = pytest.mark.integration

TRANSPORT = '''
"""Every engine opens memory of trainer rank 0, in buckets of a quarter of a megabyte."""

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.weight_calls import load_from_memory
from rlsys.weights.buckets import FlatBucket, StagingBuffers, send_in_buckets
from rlsys.weights.receivers import Receivers
from rlsys.weights.transports import flattened_payload, serializer
from rlsys.weights.weight_transport import GatheredTransport, Tensors


class OneHost(GatheredTransport):
    buckets = 0

    @classmethod
    def check(cls, config: Config) -> None:
        if config.launch.nodes > 1:
            raise UserError(f"launch.nodes = {config.launch.nodes}: expected 1 with OneHost")

    def push(self, tensors: Tensors, update: WeightUpdate) -> int:
        self.excluded, self.buckets = {}, 0
        if self.rank != 0:
            for _ in tensors:
                pass
            return 0
        with Receivers(update.engines, self.config.work_seconds) as receivers:

            def load(flat: FlatBucket) -> None:
                self.buckets += 1
                serialize, payload = serializer(), flattened_payload(flat)
                handles = [[serialize(payload) for _ in range(e.tp)] for e in receivers.present]
                receivers.wait_all(receivers.post_all([load_from_memory(ranks) for ranks in handles]))

            sent_bytes = send_in_buckets(tensors, 2**18, StagingBuffers(shared=True), load)
        self.excluded = receivers.excluded
        return sent_bytes

    @property
    def metrics(self) -> dict[str, float]:
        return {"push_buckets": self.buckets}
'''

POLICY = '''
"""The best sample of a group has to be right."""

from rlsys.algo.planners import Accept, Decision, Drop, Planner, rewards_of
from rlsys.core.types import SampleGroup


class OneRight(Planner):
    def decide(self, group: SampleGroup) -> Decision:
        return Accept() if max(rewards_of(group), default=0) > 0 else Drop("none right")
'''


def rlsys(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "transport.py").write_text(TRANSPORT)
    (tmp_path / "policy.py").write_text(POLICY)
    command = [
        *RLSYS, words[0], "configs/quickstart.yaml", f"run.dir={tmp_path}/run", "engine.count=2", "parallel.dp=2",
        f"weights.method={tmp_path}/transport.py:OneHost", f"algo.planners=[{tmp_path}/policy.py:OneRight]",
        *words[1:],
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_transport_and_a_group_policy_of_a_test_train(tmp_path: Path) -> None:
    small = ("trainer.steps=2", "rollout.groups_per_step=4", "eval.prompts=4", "engine.start_timeout=300")
    process = rlsys(tmp_path, "train", *small)
    assert process.returncode == 0, process.stderr[-3000:]
    steps = read_metrics(tmp_path / "run").steps
    assert [s["step"] for s in steps] == [1, 2]
    for step in steps:
        assert step["push_buckets"] > 1 and step["push_bytes"] > 2**18
        assert step["push_tensors_equal"] > 0 == step["push_tensors_unknown"]
        assert step["reward"] > 0 == step["lost"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["launch.nodes=2", "launch.backend=slurm"], "launch.nodes = 2: expected 1 with OneHost"),
        (["weights.method=TMP/transport.py:Absent"], "expected a subclass of .* found nothing of this name"),
        (["weights.method=TMP/policy.py:OneRight"], "expected a subclass of .*WeightTransport, found <class"),
        (
            ["weights.method=rlsys.weights.weight_transport:GatheredTransport"],
            "GatheredTransport does not implement push",
        ),
    ],
)
def test_a_transport_that_cannot_work_is_refused_before_the_start(
    overrides: list[str], told: str, tmp_path: Path
) -> None:
    process = rlsys(tmp_path, "explain", *(word.replace("TMP", str(tmp_path)) for word in overrides))
    assert process.returncode == 2, process.stdout[-2000:]
    assert re.search(told, process.stderr), process.stderr
