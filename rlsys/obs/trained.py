"""RUN/trained/NNNNNN.msgpack: samples of train step NNNNNN, with what the trainer computed of each token, for people
to read (RunReader).

It holds the groups that `kept_groups` names, also when the ledger has forgotten their tokens. Trainer rank 0 writes
it as a whole, so a step that is trained again replaces what it wrote before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rlsys.core.errors import UserError, disk_errors
from rlsys.obs.coordinator import replace

FOLDER = "trained"


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Of the response tokens of one sample, little-endian: `ids` int32, the others float32; NaN: not computed.

    `logp`: the trainer's log-prob before the step's first update. `advantages`: as the loss saw them. Both are empty
    for a sample that gave no gradient.
    """

    ids: bytes
    mu: bytes
    logp: bytes = b""
    advantages: bytes = b""


def kept_groups(group_ids: Iterable[int], most: int) -> set[int]:
    """Which groups of a step people can still read when no checkpoint needs their tokens (rollout.keep_groups)."""
    return set(sorted(group_ids)[:most])


def to_floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def read_floats(blob: bytes) -> list[float]:
    floats: list[float] = np.frombuffer(blob, dtype="<f4").tolist()
    return floats


def write_trained(run_dir: Path, train_step: int, figures: dict[int, TokenFigures]) -> None:
    """`figures` by sample id. Raises RunError when the disk refuses."""
    path = _path(run_dir, train_step)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, msgspec.msgpack.encode(figures))


def read_trained(run_dir: Path, train_step: int) -> dict[int, TokenFigures]:
    """By sample id; empty where the step wrote nothing. Raises UserError for a file that is not ours."""
    path = _path(run_dir, train_step)
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=dict[int, TokenFigures])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as e:
        raise UserError(f"{path}: not written by rlsys: {e}") from None


def _path(run_dir: Path, train_step: int) -> Path:
    return run_dir / FOLDER / f"{train_step:06d}.msgpack"
