"""The table of samples: which column a named reward is."""

from __future__ import annotations

import pytest

from rlsys.algo.batch import Samples
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup


def group(*marks: dict[str, float] | None) -> SampleGroup:
    samples = [
        Sample(i, 0, i, [1], 0, [2], [-1.0], reward=sum(m.values()) if m else 0.5, named_rewards=m)
        for i, m in enumerate(marks)
    ]
    return SampleGroup(0, 0, samples)


def test_a_named_reward_keeps_its_column_in_any_dict_order() -> None:
    table = Samples.of([group({"format": 1.0, "answer": 0.25}, {"answer": 0.75, "format": 0.0})])
    assert table.rewards.tolist() == [[0.25, 1.0], [0.75, 0.0]]
    assert table.reward.tolist() == [1.25, 0.75]


@pytest.mark.parametrize("marks", [{"answer": 1.0}, {"answer": 1.0, "fromat": 1.0}, None], ids=str)
def test_rewards_of_other_names_are_the_users_mistake(marks: dict[str, float] | None) -> None:
    with pytest.raises(UserError, match=r"data\.reward: sample 1 has the rewards .*'answer', 'format'"):
        Samples.of([group({"format": 1.0, "answer": 0.25}, marks)])


def test_one_reward_is_a_vector_named_or_not() -> None:
    assert Samples.of([group({"answer": 0.25}, {"answer": 0.5})]).rewards.tolist() == [0.25, 0.5]
    assert Samples.of([group(None, None)]).rewards.tolist() == [0.5, 0.5]
