"""What engines hold against what the trainer sent: checksums, tensor by tensor. Pure.

equal     the trainer foretold the engine's checksum
wrong     it did not, though it can for this kind of tensor; or, where it cannot, the negative control says so: what
          an engine holds in an order of its own still follows from the values alone, so its checksum must change
          where the trainer's does, and only there
unknown   neither: nothing but canaries speaks for it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Sums = Sequence[dict[str, str]]
"""Of each tensor-parallel rank: the engine's name of a tensor -> its checksum."""

OTHER, STUCK, MOVED = (
    "holds other values",
    "did not change where the trainer's did",
    "changed where the trainer's did not",
)


@dataclass(frozen=True)
class Match:
    """Counts are tensors of all ranks of one engine."""

    equal: int
    unknown: tuple[str, ...]
    wrong: dict[str, str]
    """Name -> what is wrong with it."""

    @property
    def share_unknown(self) -> float:
        return len(self.unknown) / max(1, self.equal + len(self.unknown) + len(self.wrong))

    def complaint(self) -> str:
        """For people, where something is wrong."""
        first, why = next(iter(self.wrong.items()))
        return f"{why} in {len(self.wrong)} tensor(s), first: {first}"


class Checksums:
    """Compares, and learns which tensors can be compared: where one tensor of a kind has ever agreed (the same name
    in another layer, another engine, an earlier push), the trainer knows how engines hold this kind, and a difference
    means other values. A kind that never agreed is kept in another order or precision by the engine's kernels.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._seen: dict[str, tuple[Sums, Sums]] = {}
        """By engine: what was compared last, expected and reported."""
        self._attested: dict[str, tuple[Sums, Sums]] = {}
        """By engine: of its last push that was right. It outlives the engine's process, whose successor keeps the
        same values in the same order."""

    def compare(self, engine: str, expected: Sums, reported: Sums) -> Match:
        """After a push to `engine`, any name of it."""
        self._seen[engine] = expected, reported
        together = len(expected) == len(reported)
        mine, theirs = _cells(expected, together), _cells(reported, together)
        before = [_cells(sums, together) for sums in self._attested.get(engine, ((), ()))]
        cells = dict.fromkeys([*theirs, *mine])
        equal = {cell for cell in cells if together and mine.get(cell) == theirs.get(cell)}
        self._known |= {_kind(name) for _, name in equal}
        unknown, wrong = [], {}
        for cell in (c for c in cells if c not in equal):
            name = cell[1]
            if _kind(name) in self._known:
                wrong[name] = OTHER
            elif why := _control(*(sums.get(cell) for sums in (mine, theirs, *before))):
                wrong[name] = why
            else:
                unknown.append(name)
        return Match(len(equal), tuple(unknown), wrong)

    def attest(self, engine: str) -> None:
        """What was compared there last is right: the next push is held against it."""
        if engine in self._seen:
            self._attested[engine] = self._seen[engine]


def _cells(sums: Sums, by_rank: bool) -> dict[tuple[int, str], str]:
    """(rank, name) -> checksum. Where an engine reports another number of ranks than was foretold (data-parallel
    attention), all its ranks' checksums of a name together, which can still be held against those of the last push.
    """
    if by_rank:
        return {(rank, name): found for rank, held in enumerate(sums) for name, found in held.items()}
    names = dict.fromkeys(name for held in sums for name in held)
    return {(0, name): " ".join(held.get(name, "") for held in sums) for name in names}


def _control(want: str | None, has: str | None, wanted: str | None, had: str | None) -> str | None:
    """What contradicts: now the trainer's and the engine's checksum, and those of the last push that was right."""
    if want is None or has is None or wanted is None or had is None:
        return None
    if want != wanted and has == had:
        return STUCK
    return MOVED if want == wanted and has != had else None


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
