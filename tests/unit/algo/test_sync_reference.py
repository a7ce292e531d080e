"""A reference that follows the policy, by hand."""

from __future__ import annotations

import torch

from rlsys.algo import build
from rlsys.algo.objective import Objective
from tests.helpers.algo_world import DOUBLE, section

close = torch.testing.assert_close


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((2,), value, dtype=DOUBLE)), ("b", torch.tensor([[value + 1]], dtype=DOUBLE))]


def test_it_moves_every_second_step_by_hand() -> None:
    """From 0 with alpha 1/4: at the policy's 2 it is 1/2, at its 4 then 1/4 4 + 3/4 1/2 = 11/8."""
    hook = build("hook", "sync_ref", interval=2, alpha=0.25)
    values = []
    for step in range(1, 6):
        hook.start(weights(step - 1.0))
        hook.after_step(weights(99.0), 1.0)  # an update within a step
        hook.after_version(weights(float(step)), 1.0)
        values.append(float(hook.reference()["a"][0]))
    assert values == [0.0, 0.5, 0.5, 1.375, 1.375]
    close(hook.reference()["b"], torch.tensor([[2.375]]))


def test_an_objective_starts_its_hooks() -> None:
    objective = Objective(section(loss=["clip", "kl"], hooks=["sync_ref"]))
    objective.start(lambda: weights(3.0))
    assert objective.reference()["a"].tolist() == [3, 3]


def test_it_keeps_a_copy_of_the_first_weights_and_changes_none_of_the_policys() -> None:
    hook, policy = build("hook", "sync_ref", interval=1, alpha=1.0), dict(weights(3.0))
    hook.start(policy.items())
    policy["a"] += 1
    assert hook.reference()["a"].tolist() == [3, 3]
    hook.after_version(policy.items(), 1.0)
    policy["a"] += 1
    assert hook.reference()["a"].tolist() == [4, 4]
    assert policy["b"].tolist() == [[4]]


def test_a_sync_reference_resumes_from_its_state() -> None:
    hook, again = (build("hook", "sync_ref", interval=3, alpha=0.5) for _ in range(2))
    for step in range(4):
        hook.start(weights(float(step)))
        hook.after_version(weights(step + 1.0), 1.0)
    again.load_state_dict(hook.state_dict())
    again.load_totals({name: t.clone() for name, t in hook.totals(weights(4.0)).items()})
    for instance in (hook, again):
        for step in (4, 5):
            instance.start(weights(float(step)))
            instance.after_version(weights(step + 1.0), 1.0)
    assert again.state_dict() == hook.state_dict()
    close(again.reference(), hook.reference())
    close(hook.reference()["a"], torch.full((2,), 0.5 * 6 + 0.5 * 1.5))
