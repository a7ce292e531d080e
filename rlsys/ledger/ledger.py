"""Counts of the groups, samples and tokens in each state, and the check that they agree (invariant 3).

The counts come from rows. The check compares them with values that are stored separately: the counter of issued
groups, the size of each group, and the journal of takes. `rlsys ledger RUN` prints them.
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
    """Counts of a run. Dicts by state have every group state.

    Attributes:
        issued_groups: number of issued groups according to the counter.
        sizes: group state -> number of samples according to the stored sizes of the groups.
        groups: group state -> number of groups.
        samples: state of the group -> number of samples.
        tokens: state of the group -> number of response tokens.
        parked_samples: number of unfinished samples of active groups. Samples in flight are stored as parked.
        journal: train step -> ids of the groups that it took.
        in_step: group id -> train step, for groups that are trained, or reserved for their step.
        lost_tokens: number of tokens that engines generated but no sample received, as counted by the router.
        inherited_tokens: number of tokens at the start of samples that were sampled for another sample, or forced
            (rlsys/core/forks.py).
        discarded_tokens: number of tokens that were sampled and later removed from their sample; `tokens` does not
            include them.
        torn_bytes: number of bytes in segments that were not committed when their writer ended.
    """

    issued_groups: int
    sizes: dict[str, int]
    groups: dict[str, int]
    samples: dict[str, int]
    tokens: dict[str, int]
    parked_samples: int
    journal: dict[int, list[int]] = field(repr=False)
    in_step: dict[int, int] = field(repr=False)
    lost_tokens: int
    inherited_tokens: int
    discarded_tokens: int
    torn_bytes: int

    @property
    def trained_twice(self) -> int:
        """Number of groups in the journal of more than one train step."""
        return sum(n > 1 for n in Counter(g for ids in self.journal.values() for g in ids).values())

    def figures(self) -> dict[str, int | dict[str, int]]:
        """Return the numbers that `rlsys ledger` prints, by name.

        issued, trained_twice, and each group state: number of groups.
        parked, in_flight: number of samples. A ledger has no samples in flight.
        lost, given (inherited_tokens), discarded: number of tokens.
        samples, tokens: the counts by state of the group.
        """
        figures: dict[str, int | dict[str, int]] = {
            "issued": self.issued_groups,
            **self.groups,
            "parked": self.parked_samples,
            "in_flight": 0,
            "lost": self.lost_tokens,
            "torn_bytes": self.torn_bytes,
            "trained_twice": self.trained_twice,
            "samples": self.samples,
            "tokens": self.tokens,
        }
        if self.inherited_tokens or self.discarded_tokens:
            figures |= {"given": self.inherited_tokens, "discarded": self.discarded_tokens}
        return figures


def read_ledger(db: sqlite3.Connection) -> Ledger:
    """Count the rows of a ledger file."""
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
    inherited, discarded = db.execute(
        "SELECT coalesce(sum(inherited_tokens), 0), coalesce(sum(discarded), 0) FROM samples"
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
        lost_tokens=meta["lost"],
        inherited_tokens=inherited,
        discarded_tokens=discarded,
        torn_bytes=meta["torn_bytes"],
    )


def check_conservation(ledger: Ledger) -> None:
    """Check that the counts of a ledger agree with each other.

    Raises:
        RunError: two counts disagree; the message has both.
    """
    states = " + ".join(f"{name} {n}" for name, n in ledger.groups.items())
    if sum(ledger.groups.values()) != ledger.issued_groups:
        raise RunError(f"ledger: {ledger.issued_groups} groups were issued, but the states have {states}")
    for name, n in ledger.groups.items():
        if ledger.samples[name] != ledger.sizes[name]:
            raise RunError(
                f"ledger: the {n} groups in the state {name} should have {ledger.sizes[name]} samples, but have "
                f"{ledger.samples[name]}"
            )
    if ledger.trained_twice:
        raise RunError(f"ledger: {ledger.trained_twice} groups were trained in more than one step")
    journal = {g: step for step, ids in ledger.journal.items() for g in ids}
    if journal != ledger.in_step:
        differing = sorted({group_id for group_id, _ in journal.items() ^ ledger.in_step.items()})
        first = differing[0]
        raise RunError(
            f"ledger: train steps disagree for {len(differing)} groups: the journal has step "
            f"{journal.get(first, 'none')} for group {first}, the table of groups {ledger.in_step.get(first, 'none')}"
        )


def check_ledger(ledger: Ledger) -> None:
    """Check that the counts of a finished run agree, and that no token was lost.

    Raises:
        RunError: two counts disagree, or tokens were lost.
    """
    check_conservation(ledger)
    if ledger.lost_tokens:
        raise RunError(f"ledger: {ledger.lost_tokens} tokens that engines generated never reached a sample")
