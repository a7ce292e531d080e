"""What a restart finds when the process was killed between two decisions about one group."""

from __future__ import annotations

from pathlib import Path

from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, SampleGroup, Segment, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from tests.helpers.rollout_rig import Numbers, Rig, ids, length_reward, make_config, rig


def finish_samples(group: SampleGroup, version: int) -> None:
    """Each has three tokens and its reward; nobody has decided about the group."""
    for s in group.samples:
        s.append(Segment([0, 1, 2], [-0.5, -0.25, -0.125], [VersionSpan(version, 0, 3)]))
        s.status, s.reward = Status.FINISHED, float(s.index)


async def test_a_group_completed_just_before_a_restart_is_decided_and_trained(
    tmp_path: Path,
) -> None:
    """No sample of it runs again, so nothing else would ever lead to its decision: the take would wait for ever."""
    config = make_config(tmp_path)
    killed = Rig(config, lambda s: 3, length_reward)
    group = killed.buffer.issue(Numbers().train(0), [1, 2])
    finish_samples(group, killed.buffer.versions.new(0))
    killed.buffer.save(group.samples)
    killed.buffer.close()
    async with rig(config) as r:
        await r.start()
        batch = await r.take(1)
        assert ids(batch.groups) == [0, 1]
        assert [s.reward for s in batch.groups[0].samples] == [0.0, 1.0]
        assert r.router.received == 2 * 3, "only the other group's samples were generated"


def test_a_group_that_grew_is_whole_in_the_file(tmp_path: Path) -> None:
    """Killed right after: the new samples are there, and so is what the first ones had, rewards included."""
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run a", 3)
    group = buffer.issue(Prompt(0, "prompt 0", [1, 2], {}), [11, 12])
    finish_samples(group, buffer.versions.new(0))
    buffer.grow(group, [13])
    buffer.close()
    back = RolloutBuffer(tmp_path / FILE_NAME, "run a", 3)
    samples = back.groups[0].samples
    assert [(s.seed, len(s.response_ids), s.reward) for s in samples] == [
        (11, 3, 0.0),
        (12, 3, 1.0),
        (13, 0, None),
    ]
    back.close()
