"""Seeds of samples, and a hash that is the same in every process."""

from __future__ import annotations

import hashlib
import json


def sample_seed(run_seed: int, group_id: int, index: int) -> int:
    """Return the seed of a sample, 1 .. 2**31 - 1: the same in every process and every run with this run.seed."""
    return 1 + stable_hash(run_seed, group_id, index) % (2**31 - 1)


def stable_hash(*parts: object, bits: int = 31) -> int:
    """Return a non-negative integer of `bits` bits: the same for the same parts in every process, unlike hash()."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
