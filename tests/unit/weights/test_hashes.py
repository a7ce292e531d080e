"""SGLang's hash of a GPU tensor in plain torch, fed in parts; what a push keeps while its tensors are hashed."""

from __future__ import annotations

import hashlib
import itertools
import random
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.convert.table import entries
from rlsys.weights.checksums import EngineChecksums, merge_checksums
from rlsys.weights.hashes import TILE, ByteHash, TileHash, final_hash
from tests.helpers.golden_hashes import GOLDEN, sample
from tests.unit.weights.test_weights import LAYER, TINY


@pytest.mark.parametrize(("n", "dtype"), GOLDEN)
@pytest.mark.parametrize("parts", [1, 2, 9])
def test_the_hash_of_a_gpu_tensor_is_sglangs_however_it_is_cut(n: int, dtype: str, parts: int) -> None:
    tensor, state = sample(n, dtype), TileHash()
    rng = random.Random(parts)
    boundaries = [0, *sorted(rng.randrange(n + 1) for _ in range(parts - 1)), n]
    for start, end in itertools.pairwise(boundaries):
        state.update(tensor[start:end])
    assert state.digest() == GOLDEN[n, dtype]


def test_a_tensor_without_elements() -> None:
    assert TileHash().digest() == "0" * 16
    assert ByteHash().digest() == hashlib.sha256().hexdigest()[:16]


def test_rounds_of_many_tiles_add_up() -> None:
    big, state = sample(4 * (512 * TILE + 3 * TILE + 5), "uint8"), TileHash()
    state.update(big)
    pieces = TileHash()
    for piece in big.split(1_000_003):
        pieces.update(piece)
    assert state.digest() == pieces.digest()


def test_a_matrix_slice_hashes_like_its_contiguous_copy() -> None:
    matrix, state, reference = sample(600, "float32").view(20, 30), TileHash(), TileHash()
    state.update(matrix[:, 7:19])
    reference.update(matrix[:, 7:19].clone())
    assert state.digest() == reference.digest()


@pytest.mark.parametrize(("n", "dtype"), [case for case in GOLDEN if case[1] == "float32"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_that_have_parts_find_the_hash_of_the_whole_together(n: int, dtype: str, ranks: int) -> None:
    """Each hashes what it has, begun at its place; some tiles are shared by two of them, or by all."""
    tensor, rng, parts = sample(n, dtype), random.Random(ranks), []
    boundaries = [0, *sorted(rng.randrange(n + 1) for _ in range(ranks - 1)), n]
    for start, end in itertools.pairwise(boundaries):
        state, middle = TileHash(start), rng.randint(start, end)
        state.update(tensor[start:middle])
        state.update(tensor[middle:end])
        parts.append(state.part(n))
    assert final_hash(parts) == final_hash(parts[::-1]) == GOLDEN[n, dtype]
    assert ranks == 1 or final_hash([part for part in parts if part.word_count][1:]) is None, "one is missing"


@pytest.mark.parametrize("seed", range(4))
def test_experts_of_a_layer_may_be_spread_over_trainer_ranks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.manual_seed(0)
    tensors = [(name, torch.randn(shape)) for entry in entries(TINY) for name, shape in entry.hf.items()]
    reference, ranks = EngineChecksums(TINY, 2), [EngineChecksums(TINY, 2) for _ in range(3)]
    assert len(list(reference.watch(tensors))) == len(tensors)
    rng = random.Random(seed)
    of_rank: list[list[tuple[str, Tensor]]] = [[], [], []]
    for name, tensor in tensors:
        sender = rng.randrange(3) if ".experts." in name else 1
        of_rank[sender].append((name, tensor))
    for rank, rank_tensors in zip(ranks, of_rank, strict=True):
        assert len(list(rank.watch(rank_tensors))) == len(rank_tensors)
    partials = [rank.partial_digests() for rank in ranks]
    assert merge_checksums(partials) == reference.digests()
    w13 = LAYER + "mlp.experts.w13_weight"
    expert_rank = next(i for i, each in enumerate(partials) if w13 in each[0])
    assert w13 not in merge_checksums(partials[:expert_rank] + partials[expert_rank + 1 :])[0]


@pytest.mark.parametrize("cuda", [False, True])
def test_hashing_keeps_no_tensor_of_a_push_in_memory(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", cuda)  # the GPU's way
    checksums = EngineChecksums(TINY, 2)
    memory: list[weakref.ref[np.ndarray]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for entry in entries(TINY):
            for name, shape in entry.hf.items():
                values = np.zeros(shape, np.float32)
                memory.append(weakref.ref(values))
                yield name, torch.from_numpy(values)
                del values

    live_counts = []
    for _ in checksums.watch(tensors()):
        live_counts.append(sum(ref() is not None for ref in memory))
    assert max(live_counts) <= 2, (
        f"{live_counts[-1]} of {len(memory)} tensors are still held after the last one"
    )
