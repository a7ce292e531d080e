"""Seeds of samples, and a hash that is the same in every process."""

from __future__ import annotations

import hashlib
import json


def sample_seed(run_seed: int, group_id: int, index: int) -> int:
    """Return the seed of a sample, from 1 to 2**31 - 1. It depends on the arguments only.

    Args:
        run_seed: run.seed.
        group_id: id of the sample's group.
        index: number of the sample in the group.
    """
    return 1 + stable_hash(run_seed, group_id, index) % (2**31 - 1)


def stable_hash(*parts: object, bits: int = 31) -> int:
    """Return a hash of JSON values. Unlike `hash`, it is the same in each process.

    Args:
        bits: size of the hash, at most 64.

    Returns:
        an integer from 0 to 2**bits - 1.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)
