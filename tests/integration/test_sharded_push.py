"""A sharded push: the trainer ranks that own tensors send them, all at once, to engines that are elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.helpers.servers import ROOT, running_engine, tiny_moe_model
from tests.helpers.sharded_cases import PUSHES, RANKS, config_of
from tests.helpers.sharded_ranks import CASES
from tests.integration.test_colocated_push import run

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_eight_ranks_push_their_own_tensors_to_two_engines(tmp_path: Path) -> None:
    """tp 2, pp 2, ep 2 to two engines of tp 2. Every tensor is attested; no rank sends, or holds, much more than its
    share. In the second push the group is that of the first."""
    model = tmp_path / "model"
    # SGLang on a CPU pads each rank's part of an expert to 32 units, which no checksum could foretell.
    tiny_moe_model(seed=0, moe_intermediate_size=64, num_hidden_layers=4).save_pretrained(model)
    config = config_of(model, tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with (
        running_engine(config, tmp_path / "one") as first_engine,
        running_engine(config, tmp_path / "two") as second_engine,
    ):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
        ]
        command += [
            "-m",
            "tests.helpers.sharded_cases",
            str(model),
            str(tmp_path),
            first_engine,
            second_engine,
        ]
        code, output = run(command, tmp_path / "ranks.log")
    assert code == 0, output[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{i}.json").read_text()) for i in range(RANKS)]
    print([{k: rank[k] for k in ("tcp", "given", "most")} for rank in ranks], ranks[0]["metrics"])
    for metrics in ranks[0]["metrics"]:
        assert metrics["push_tensors_equal"] == sum(ranks[0]["expected"]) > 0
        assert metrics["push_tensors_unknown"] == 0
        assert metrics["push_canary_mean"] <= 1e-6
    for push in range(PUSHES):
        sent_bytes = [rank["tcp"][push] for rank in ranks]
        assert max(sent_bytes) <= 2 * sum(sent_bytes) / RANKS, sent_bytes
    given_bytes = [rank["given"] / PUSHES for rank in ranks]
    assert max(given_bytes) <= 2 * sum(given_bytes) / RANKS, given_bytes
    assert max(rank["most"] for rank in ranks) <= 2 * sum(given_bytes) / RANKS


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """URLs of four scripted ones: two that take everything, one that dies at its fifth bucket, one that refuses its
    fourth."""
    command = [sys.executable, "-m", "tests.helpers.receiving_engine"]
    failures: list[list[str]] = [[], [], ["dies", "5"], ["refuses", "4"]]
    started = [
        subprocess.Popen([*command, *f], cwd=ROOT, stdout=subprocess.PIPE, text=True) for f in failures
    ]
    try:
        yield [f"http://127.0.0.1:{int(process.stdout.readline())}" for process in started if process.stdout]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.full
def test_each_tensor_is_sent_once_by_its_owner(tmp_path: Path, engines: list[str]) -> None:
    """Four gloo ranks in several layouts, real groups, scripted engines. An engine that dies in the middle of a push,
    or refuses, is left out of the rest; the others get everything, and keep their group for the next push."""
    for name in {model for model, _, _ in CASES.values()}:
        tiny.write(tmp_path / name, tiny.TINY[name], **tiny.TINY[name].served)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "tests.helpers.sharded_ranks", str(tmp_path), *engines]
    code, output = run(command, tmp_path / "ranks.log")
    assert code == 0, output[-6000:]
    *wholes, failing, next_push, last = json.loads((tmp_path / "seen.json").read_text())
    assert [report["case"] for report in wholes] == list(CASES)
    for report in [*wholes, next_push, last]:
        assert report["left_out"] == {}
        for tensors in report["got"].values():
            assert sorted(map(tuple, tensors)) == sorted(report["expected"].items()), report["case"]
    assert set(failing["left_out"]) == {"2", "3"}
    assert "size mismatch" in failing["left_out"]["3"]
    assert set(failing["got"]) == {"0"}
    assert {tuple(item) for item in failing["got"]["0"]} == set(failing["expected"].items())
    assert last["joined"] == next_push["joined"], "the group is kept while the same engines take part"
