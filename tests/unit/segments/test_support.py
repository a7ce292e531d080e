"""The ids that sampling had kept: as bytes, in a sample, on the disk, and among a micro-batch's tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from rlsys.config import Config
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.segments import support
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.pack import TrainSample, pack

ROOT = Path(__file__).resolve().parents[3]


def rows_of(data: bytes, drawn: list[int]) -> list[set[int]]:
    out: list[set[int]] = [set() for _ in drawn]
    for row_index, token in zip(*support.decode(data, drawn), strict=True):
        out[row_index].add(int(token))
    return out


@given(st.lists(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=40), max_size=12), st.randoms())
def test_encoded_support_round_trips_in_any_order_and_split(rows: list[set[int]], rng: random.Random) -> None:
    kept_ids = [rng.sample(sorted(row), len(row)) for row in rows]
    drawn = [rng.choice(row) for row in kept_ids]
    data = support.encode(kept_ids, drawn)
    assert data.count(0) == len(rows), "one 0 a row: rows can be counted and joined"
    assert rows_of(data, drawn) == rows
    cut = rng.randint(0, len(rows))
    parts = support.encode(kept_ids[:cut], drawn[:cut]), support.encode(kept_ids[cut:], drawn[cut:])
    assert b"".join(parts) == data


def test_bytes_by_hand() -> None:
    """5 of {2, 5, 300}: 2 is 3 after -1; 300 is 298 after 2, in LEB128 0b10_0101010. 7 alone: nothing but the end."""
    assert support.encode([[300, 5, 2], [7]], [5, 7]) == bytes([3, 0b1010_1010, 0b10, 0, 0])


@pytest.mark.parametrize(
    ("kept", "drawn", "why"),
    [
        (
            [[4], [1, 2]],
            [4, 3],
            "^token 1: its row of allowed ids must contain the sampled id 3 once; found 0 occurrences$",
        ),
        ([[1, 2, 2]], [1], "^token 0: its row of allowed ids contains 2 twice; expected it once$"),
        (
            [[1, 1]],
            [1],
            "^token 0: its row of allowed ids must contain the sampled id 1 once; found 2 occurrences$",
        ),
        ([[5], [1, -4]], [5, 1], "^token 1: its row of allowed ids contains -4; expected ids of 0 or more$"),
        ([[1]], [1, 2], "1 rows of allowed ids for 2 tokens"),
    ],
)
def test_rows_that_cannot_be_are_refused(kept: list[list[int]], drawn: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        support.encode(kept, drawn)


def test_bytes_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 rows of allowed ids for 2 tokens"):
        support.decode(b"\x03\0", [1, 2])
    with pytest.raises(ValueError, match="within a number"):
        support.decode(b"\0\x83", [1])


def test_bytes_a_token() -> None:
    """20 of 151,936 ids take less than 2.2 bytes each, whatever they are; one that is sure takes 1."""
    rng = random.Random(0)
    kept_ids = [rng.sample(range(151_936), 20) for _ in range(500)]
    size = len(support.encode(kept_ids, [row[0] for row in kept_ids])) / 500
    print(f"top_k 20 of 151,936 at random: {size:.1f} bytes a token")
    assert size < 2.2 * 20
    assert len(support.encode([[9]] * 500, [9] * 500)) == 500


def segment(ids: list[int], kept: list[list[int]] | None) -> Segment:
    encoded = None if kept is None else support.encode(kept, ids)
    return Segment(ids, [-1.0] * len(ids), [VersionSpan(1, 0, len(ids))], support=encoded)


def test_a_sample_has_support_for_all_its_tokens_or_none() -> None:
    sample = Sample(1, 0, 0, [1], 0)
    sample.append(segment([5, 6], [[5, 4], [6]]))
    sample.observe([8, 9])
    sample.append(segment([7], [[7, 3]]))
    assert rows_of(bytes(sample.support), sample.response_ids) == [{5, 4}, {6}, {8}, {9}, {7, 3}]
    with pytest.raises(ValueError, match="only some of its tokens"):
        sample.append(segment([7], None))
    with pytest.raises(ValueError, match="2 ids but 1 rows"):
        sample.append(Segment([1, 2], [0.0, 0.0], [VersionSpan(1, 0, 2)], support=b"\0"))
    assert sample.tokens == len(sample.mu) == 5, "nothing changed"
    plain = Sample(1, 0, 0, [1], 0)
    plain.append(segment([5], None))
    with pytest.raises(ValueError, match="only some of its tokens"):
        plain.append(segment([5], [[5]]))


def test_support_is_stored_on_disk_in_pieces(tmp_path: Path) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2)
    version = buffer.versions.new(0)
    group = buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6])
    for part in range(3):
        for s in group.samples:
            s.append(segment([10 + part, 3], [[10 + part, 1 + s.index], [3, 99]]))
            s.spans[-1].version = version
        buffer.save(group.samples)
    buffer.close()
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 2)
    (back,) = buffer.active()
    assert [s.support for s in back.samples] == [s.support for s in group.samples]
    back.samples[0].append(segment([4], [[4, 5]]))
    buffer.save(back.samples)
    (again,) = buffer.read_groups([0])
    assert not again.samples[0].support
    assert [s.support for s in buffer.load(again.samples)] == [s.support for s in back.samples]
    buffer.close()


def packed() -> list[TrainSample]:
    restricted = Sample(1, 0, 0, [1, 2], 0)
    restricted.append(segment([5, 6], [[5, 4], [6]]))
    free = Sample(2, 0, 1, [1, 2, 3, 4, 5], 0)
    free.append(segment([7], None))
    return [TrainSample.of(restricted, 0), TrainSample.of(free, 1)]


def test_packed_tokens_carry_their_support() -> None:
    (batch,) = pack(packed(), 100)
    row_start = int(batch.rows[0] == 1) * 6  # where the sequence of row 0 begins
    assert batch.support_at is not None
    assert batch.support_ids is not None
    support_pairs = sorted(zip(batch.support_at.tolist(), batch.support_ids.tolist(), strict=True))
    assert support_pairs == [(row_start + 2, 4), (row_start + 2, 5), (row_start + 3, 6)]
    assert pack(packed()[1:], 100)[0].support_at is None


@pytest.fixture
def alone(tmp_path: Path) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_share_has_them_where_the_tokens_are_predicted(alone: dist.ProcessGroup) -> None:
    (batch,) = pack(packed(), 100)
    share = Share.of(batch, 4, alone, torch.device("cpu"))
    assert share.support_at is not None
    assert share.support_ids is not None
    for position, token in zip(share.support_at.tolist(), share.support_ids.tolist(), strict=True):
        assert share.predicts[position]
        assert token in {5: {4, 5}, 6: {6}}[int(share.following[position])]
    assert len(share.support_at) == 3


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"rollout": {"top_p": 0.9}}, r"top_p = 0.9 needs top_k: the trainer must know which ids"),
        ({"rollout": {"min_p": 0.1}}, r"min_p = 0.1 needs top_k"),
        (
            {"rollout": {"top_k": 20, "min_p": 0.1}},
            r"rollout.min_p = 0.1 with engine.deterministic = true: SGL",
        ),
        ({"rollout": {"top_k": 1}}, "greater than or equal to 2"),
        (
            {"rollout": {"top_k": 20}, "algo": {"planners": ["lens"], "selectors": ["lens"]}},
            r"rollout.top_k = 20 with algo.planners = lens: lens trains a response on another prompt",
        ),
    ],
)
def test_where_mu_would_not_be_right_it_is_refused(section: dict[str, dict[str, object]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Config.model_validate({"model": {"path": ROOT / "configs/models/quickstart-moe"}, **section})
