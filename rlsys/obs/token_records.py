"""Token records of a train step, which RunReader shows to users: RUN/trained/NNNNNN.msgpack.

A record has the tokens of a sample and the values that the trainer computed for them. The file of a step has the
records of the groups in `readable_groups`, and stays when the ledger deletes their tokens. Trainer rank 0 writes a
file atomically; a repeated step replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rlsys.core.errors import UserError, disk_errors
from rlsys.core.folders import replace_file

FOLDER = "trained"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Values of the response tokens of one sample, little-endian; NaN: not computed.

    Attributes:
        ids: token ids, int32.
        mu: the engine's log-probs, float32.
        logp: the trainer's log-probs before the first update of the step, float32; empty for a sample without a
            gradient.
        advantages: advantages in the loss, float32; empty for a sample without a gradient.
    """

    ids: bytes
    mu: bytes
    logp: bytes = b""
    advantages: bytes = b""


def readable_groups(group_ids: Iterable[int], limit: int) -> set[int]:
    """Return the ids of the groups of a step that have token records.

    Args:
        group_ids: all groups of the step.
        limit: rollout.keep_groups, the maximum number of groups.
    """
    return set(sorted(group_ids)[:limit])


def to_floats(values: Sequence[float]) -> bytes:
    """Encode floats as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def read_floats(blob: bytes) -> list[float]:
    """Decode little-endian float32."""
    floats: list[float] = np.frombuffer(blob, dtype="<f4").tolist()
    return floats


def write_records(run_dir: Path, train_step: int, records: dict[int, TokenRecord]) -> None:
    """Write the records of a train step.

    Args:
        records: sample id -> record.

    Raises:
        RunError: the file cannot be written.
    """
    path = _path(run_dir, train_step)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.msgpack.encode(records))


def read_records(run_dir: Path, train_step: int) -> dict[int, TokenRecord]:
    """Return the records of a train step by sample id; empty if there is no file.

    Raises:
        UserError: the file is invalid.
    """
    path = _path(run_dir, train_step)
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=dict[int, TokenRecord])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as e:
        raise UserError(f"{path}: expected a file of token records: {e}") from None


def _path(run_dir: Path, train_step: int) -> Path:
    return run_dir / FOLDER / f"{train_step:06d}.msgpack"
