"""The ledger: how many groups, samples and tokens are in each state, and whether they add up (invariant 3).

Counted from the rows, and held against what is kept apart from them: the counter of issued groups, each group's
size, the journal of takes. `rlsys ledger RUN` reads it through RunReader.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field

from rlsys.core.errors import RunError
from rlsys.core.types import GroupState, Status

_TERMINAL = ", ".join(f"'{s}'" for s in Status if s.terminal)


@dataclass(frozen=True)
class Ledger:
    """`issued_groups` is the counter, everything else comes from rows. By state: all of them, also at 0."""

    issued_groups: int
    sizes: dict[str, int]
    """Samples that the groups of each state say they have."""
    groups: dict[str, int]
    samples: dict[str, int]
    tokens: dict[str, int]
    parked_samples: int
    """Samples of active groups that are not terminal: in the file, in flight counts as parked."""
    journal: dict[int, list[int]] = field(repr=False)
    """Train step -> ids of the groups that it took."""
    in_step: dict[int, int] = field(repr=False)
    """Group id -> its train step, of trained groups and of those given back to their step."""
    lost: int
    """Tokens that engines generated and no sample got: measured by the router, never a remainder."""
    given: int
    """Of the tokens: those that begin a sample and were made for another one, or forced (rlsys/core/forks.py)."""
    discarded: int
    """Tokens, beside the others, that engines made for a sample and that were cut off again."""
    torn_bytes: int
    """Bytes of segments that a launch had written and not committed when it was killed."""

    @property
    def trained_twice(self) -> int:
        """Groups in the journal of more than one train step."""
        return sum(n > 1 for n in Counter(g for ids in self.journal.values() for g in ids).values())

    def figures(self) -> dict[str, int | dict[str, int]]:
        """What `rlsys ledger` prints: groups, but for parked and in_flight (samples), lost (tokens), torn_bytes."""
        return {
            "issued": self.issued_groups,
            **self.groups,
            "parked": self.parked_samples,
            "in_flight": 0,
            "lost": self.lost,
            "torn_bytes": self.torn_bytes,
            "trained_twice": self.trained_twice,
            "samples": self.samples,
            "tokens": self.tokens,
            **({"given": self.given, "discarded": self.discarded} if self.given or self.discarded else {}),
        }


def count(db: sqlite3.Connection) -> Ledger:
    meta = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('issued', 'lost', 'torn_bytes')"))
    groups, sizes, samples, tokens = ({s.value: 0 for s in GroupState} for _ in range(4))
    for state, n, size in db.execute("SELECT state, count(*), sum(size) FROM groups GROUP BY state"):
        groups[state], sizes[state] = n, size
    by_state = "FROM samples JOIN groups USING (group_id) GROUP BY state"
    for state, n, length in db.execute(f"SELECT state, count(*), sum(tokens) {by_state}"):
        samples[state], tokens[state] = n, length
    parked = f"WHERE state = 'active' AND status NOT IN ({_TERMINAL})"
    journal = {step: json.loads(ids) for step, ids in db.execute("SELECT train_step, group_ids FROM takes")}
    in_step = dict(db.execute("SELECT group_id, train_step FROM groups WHERE train_step IS NOT NULL"))
    given, discarded = db.execute(
        "SELECT coalesce(sum(given), 0), coalesce(sum(discarded), 0) FROM samples"
    ).fetchone()
    return Ledger(
        issued_groups=meta["issued"],
        sizes=sizes,
        groups=groups,
        samples=samples,
        tokens=tokens,
        parked_samples=db.execute(
            f"SELECT count(*) FROM samples JOIN groups USING (group_id) {parked}"
        ).fetchone()[0],
        journal=journal,
        in_step=in_step,
        lost=meta["lost"],
        given=given,
        discarded=discarded,
        torn_bytes=meta["torn_bytes"],
    )


def check_conservation(ledger: Ledger) -> None:
    """Raises RunError that names the numbers when something does not add up."""
    states = " + ".join(f"{name} {n}" for name, n in ledger.groups.items())
    if sum(ledger.groups.values()) != ledger.issued_groups:
        raise RunError(f"ledger: {ledger.issued_groups} groups were issued, but {states}")
    for name, n in ledger.groups.items():
        if ledger.samples[name] != ledger.sizes[name]:
            raise RunError(
                f"ledger: the {n} groups that are {name} have {ledger.sizes[name]} samples, but there are "
                f"{ledger.samples[name]}"
            )
    if ledger.trained_twice:
        raise RunError(f"ledger: {ledger.trained_twice} groups were trained on in more than one step")
    journal = {g: step for step, ids in ledger.journal.items() for g in ids}
    if journal != ledger.in_step:
        wrong = sorted(journal.items() ^ ledger.in_step.items())
        raise RunError(f"ledger: journal and groups disagree on the train step of groups {wrong[:4]}")


def check(ledger: Ledger) -> None:
    """`check_conservation`, and that no token was lost: what `rlsys ledger` demands of a run."""
    check_conservation(ledger)
    if ledger.lost:
        raise RunError(f"ledger: {ledger.lost} tokens that engines generated never reached a sample")
