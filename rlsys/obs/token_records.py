"""Token records of a train step, for people to read (RunReader): RUN/trained/NNNNNN.msgpack.

A record has the values that the trainer computed for each token of a sample. A file has the groups of
`readable_groups`, also if the ledger has deleted their tokens. Trainer rank 0 writes it atomically, so a
repeated step replaces it.
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
    """Values of the response tokens of one sample, little-endian: `ids` int32, the others float32; NaN: not computed.

    Attributes:
        ids: token ids.
        mu: the engine's log-probs.
        logp: the trainer's log-probs before the step's first update; empty for a sample without a gradient.
        advantages: advantages as the loss used them; empty for a sample without a gradient.
    """

    ids: bytes
    mu: bytes
    logp: bytes = b""
    advantages: bytes = b""


def readable_groups(group_ids: Iterable[int], limit: int) -> set[int]:
    """Return the groups of a step that remain readable when no checkpoint needs their tokens.

    `limit`: rollout.keep_groups.
    """
    return set(sorted(group_ids)[:limit])


def to_floats(values: Sequence[float]) -> bytes:
    """Encode floats."""
    return np.asarray(values, dtype="<f4").tobytes()


def read_floats(blob: bytes) -> list[float]:
    """Decode floats."""
    floats: list[float] = np.frombuffer(blob, dtype="<f4").tolist()
    return floats


def write_records(run_dir: Path, train_step: int, records: dict[int, TokenRecord]) -> None:
    """Write the records by sample id.

    Raises:
        RunError: the records cannot be written.
    """
    path = _path(run_dir, train_step)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.msgpack.encode(records))


def read_records(run_dir: Path, train_step: int) -> dict[int, TokenRecord]:
    """Read the records by sample id; empty if the step has none.

    Raises:
        UserError: the file is invalid.
    """
    path = _path(run_dir, train_step)
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=dict[int, TokenRecord])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as e:
        raise UserError(f"{path}: not written by rlsys: {e}") from None


def _path(run_dir: Path, train_step: int) -> Path:
    return run_dir / FOLDER / f"{train_step:06d}.msgpack"
