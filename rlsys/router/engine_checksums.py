"""Comparison of the tensors in engines with those that the trainer sent, by checksums. Pure functions.

Each tensor gets one of three results:

    equal      the engine reports the checksum that the trainer predicted
    wrong      the checksums differ, and the trainer can predict this kind of tensor; or only one of the two
               checksums has changed since the last correct push
    unknown    neither of these: only canaries verify the tensor

The second condition of `wrong` holds for any layout: the engine's checksum depends on the values only, so it changes
exactly when the trainer's does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Sums = Sequence[dict[str, str]]
"""For each tensor-parallel rank: the engine's name of a tensor -> its checksum."""

OTHER_VALUES, MISSING_CHANGE, UNEXPECTED_CHANGE = (
    "holds other values",
    "did not change where the trainer's did",
    "changed where the trainer's did not",
)


@dataclass(frozen=True)
class Match:
    """Result of a comparison. Counts are tensors of all ranks of one engine."""

    equal: int
    unknown: tuple[str, ...]
    wrong: dict[str, str]
    """Name -> reason."""

    @property
    def share_unknown(self) -> float:
        return len(self.unknown) / max(1, self.equal + len(self.unknown) + len(self.wrong))

    def mismatch_message(self) -> str:
        """Describe the wrong tensors. `wrong` must not be empty."""
        first, reason = next(iter(self.wrong.items()))
        return f"{reason} in {len(self.wrong)} tensor(s), first: {first}"


class ChecksumVerifier:
    """Compares checksums, and learns which tensors are comparable.

    Tensors of one kind have the same name except for numbers such as the layer. Once a tensor of a kind
    matched, in any engine and push, the trainer can predict the kind, and a difference means other values.
    Kinds that never matched are stored by the engine's kernels in another order or precision.
    """

    def __init__(self) -> None:
        self._comparable_kinds: set[str] = set()
        self._last_comparison: dict[str, tuple[Sums, Sums]] = {}
        """Engine -> expected and reported checksums of its last comparison."""
        self._attested: dict[str, tuple[Sums, Sums]] = {}
        """Engine -> its last correct comparison. It survives a restart, which does not change the order of values."""

    def compare(self, engine: str, expected: Sums, reported: Sums) -> Match:
        """Compare the checksums of an engine after a push.

        Args:
            engine: a name that stays the same across restarts, such as the URL.
            expected: checksums that the trainer predicted.
            reported: checksums of the engine. They may have another number of ranks.
        """
        self._last_comparison[engine] = expected, reported
        same_ranks = len(expected) == len(reported)
        expected_cells, reported_cells = _cells(expected, same_ranks), _cells(reported, same_ranks)
        previous_expected, previous_reported = (
            _cells(sums, same_ranks) for sums in self._attested.get(engine, ((), ()))
        )
        cells = dict.fromkeys([*reported_cells, *expected_cells])
        equal = {
            cell for cell in cells if same_ranks and expected_cells.get(cell) == reported_cells.get(cell)
        }
        self._comparable_kinds |= {_kind(name) for _, name in equal}
        unknown, wrong = [], {}
        for cell in (c for c in cells if c not in equal):
            name = cell[1]
            contradiction = _contradiction(
                expected_cells.get(cell),
                reported_cells.get(cell),
                previous_expected.get(cell),
                previous_reported.get(cell),
            )
            if _kind(name) in self._comparable_kinds:
                wrong[name] = OTHER_VALUES
            elif contradiction is not None:
                wrong[name] = contradiction
            else:
                unknown.append(name)
        return Match(len(equal), tuple(unknown), wrong)

    def attest(self, engine: str) -> None:
        """Accept the engine's last comparison as the reference of the next push."""
        if engine in self._last_comparison:
            self._attested[engine] = self._last_comparison[engine]


def _cells(sums: Sums, by_rank: bool) -> dict[tuple[int, str], str]:
    """Return (rank, name) -> checksum.

    Args:
        by_rank: keep the ranks apart. If False, the key is (0, name), and the value joins the checksums of all ranks.
            With data-parallel attention, the engine reports another number of ranks than the trainer predicts; the
            joined checksums still show whether the tensor has changed since the last push.
    """
    if by_rank:
        return {
            (rank, name): checksum
            for rank, rank_sums in enumerate(sums)
            for name, checksum in rank_sums.items()
        }
    names = dict.fromkeys(name for rank_sums in sums for name in rank_sums)
    return {(0, name): " ".join(rank_sums.get(name, "") for rank_sums in sums) for name in names}


def _contradiction(
    expected: str | None, reported: str | None, previous_expected: str | None, previous_reported: str | None
) -> str | None:
    """Describe the contradiction if exactly one of the two checksums changed since the last correct push.

    Returns:
        MISSING_CHANGE or UNEXPECTED_CHANGE; None if there is no contradiction, or a checksum is unknown.
    """
    if expected is None or reported is None or previous_expected is None or previous_reported is None:
        return None
    if expected != previous_expected and reported == previous_reported:
        return MISSING_CHANGE
    return UNEXPECTED_CHANGE if expected == previous_expected and reported != previous_reported else None


def _kind(name: str) -> str:
    """Return the kind of a tensor: its name with numbers replaced."""
    return re.sub(r"\d+", "#", name)
