"""What a run itself asks of engines keeps to the same rules as what clients ask: whoever asks, nothing is sent that
an engine refuses or dies of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlsys.config import Config, load_config
from rlsys.core.owner import Owner
from rlsys.core.spans import TopLogprobs, VersionSpan
from rlsys.core.types import Sample, Segment
from rlsys.engine_requests import RefusedPrompt
from rlsys.planning.teacher import UNAVAILABLE, build_teacher
from rlsys.rollout.dry_run import dry_run
from tests.helpers.router_rig import PROMPT, routing, sample

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs/models/quickstart-moe"


def observing(said: list[int], **fields: Any) -> Sample:
    """A response whose environment has said this."""
    response = sample(**fields)
    response.append(Segment([51, 68], [-0.5, -0.5], [VersionSpan(1, 0, 2)]))
    response.observe(said)
    return response


ODD: dict[str, tuple[Sample, dict[str, Any], str]] = {
    "an id of a tool's answer beyond the vocabulary": (observing([7, 128]), {}, "outside the vocabulary"),
    "an id of a tool's answer below 0": (observing([-1]), {}, "outside the vocabulary"),
    "an id of the prompt": (sample(prompt=[1, 128]), {}, "outside the vocabulary"),
    "an empty prompt": (sample(prompt=[]), {}, "empty"),
    "a prompt without room": (sample(prompt=[1] * 194), {}, "tokens; expected at most"),
    "more alternatives than the vocabulary has": (sample(), {"tops": TopLogprobs(129)}, "top_logprobs_num"),
    "an empty stop text": (sample(), {"stop_texts": [""]}, "stop"),
    "a stop text of a book": (sample(), {"stop_texts": ["x" * 5000]}, "stop"),
    "a temperature that is no number": (sample(), {"temperature": float("nan")}, "temperature"),
    "a temperature below 0": (sample(), {"temperature": -1.0}, "temperature"),
    "a seed that no 64 bits hold": (sample(seed=2**64), {}, "seed"),
}


@pytest.mark.virtual_clock
@pytest.mark.parametrize(("asked", "more", "said"), ODD.values(), ids=ODD)
async def test_invalid_requests_are_not_sent_to_an_engine(
    asked: Sample, more: dict[str, Any], said: str
) -> None:
    async with routing() as rig:
        await rig.push()
        try:
            await rig.router.generate(asked, **{"max_response_tokens": 20, "temperature": 1.0, **more})
            reason = "answered"
        except Exception as refusal:  # noqa: BLE001 - what kind it is, is looked at
            reason = str(refusal) if isinstance(refusal, RefusedPrompt) else f"not refused: {refusal!r}"
        assert said in reason
        assert not rig.engine.prompts


@pytest.mark.virtual_clock
async def test_control_requests_with_the_largest_values_are_sent() -> None:
    async with routing() as rig:
        await rig.push()
        response = observing([127], seed=2**63 - 1)
        await rig.router.generate(
            response, max_response_tokens=20, temperature=1.0, tops=TopLogprobs(128), stop_texts=["x" * 1024]
        )
        assert rig.engine.prompts == [[*PROMPT, 51, 68, 127]]


class Nobody:
    """Stands in for aiohttp's session: whoever asks gets no answer."""

    def __init__(self) -> None:
        self.asked = 0

    def request(self, *_: object, **__: object) -> Any:
        self.asked += 1
        raise aiohttp.ClientConnectionError("nobody")


def teaching(folder: Path, context: int) -> Config:
    """A run whose teacher is an engine that holds so many tokens."""
    shutil.copytree(MODEL, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": context}))
    teacher = [f"algo.teacher.path={folder}", "algo.teacher.engine=own", "rollout.max_response_tokens=200"]
    return load_config(ROOT / "configs/algorithms/distill.yaml", teacher)


async def test_a_sample_longer_than_the_teacher_context_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = Nobody()
    teacher = build_teacher(
        teaching(tmp_path / "teacher", 64), "http://t:1", Owner(tmp_path, 1, "k"), session
    )
    monkeypatch.setattr(teacher, "_timeout_s", 0.2)
    long = sample(prompt=[1] * 30)
    long.append(Segment([5] * 40, [-0.5] * 40, [VersionSpan(1, 0, 40)]))
    reason = await teacher.score(long)
    assert reason is not None and not reason.startswith(UNAVAILABLE), reason
    assert "70 tokens" in reason and not session.asked
    assert teacher.counts["teacher_unanswered"] == 1


def test_explain_reports_a_teacher_context_shorter_than_the_policys(tmp_path: Path) -> None:
    notes = dry_run(teaching(tmp_path / "teacher", 128)).notes
    assert any("algo.teacher" in note and "128" in note for note in notes), notes


def test_explain_is_silent_about_a_teacher_that_holds_enough(tmp_path: Path) -> None:
    assert not any("algo.teacher" in note for note in dry_run(teaching(tmp_path / "teacher", 1024)).notes)
