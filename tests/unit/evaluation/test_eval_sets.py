"""Named sets of an evaluation: pass@k, one weight version, and no change to what is trained."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlsys.cli.preflight import check_start
from rlsys.cli.project_template import write_starter
from rlsys.config import Config, load_config
from rlsys.config.rollout import Truncation
from rlsys.core.errors import RunError, UserError
from rlsys.core.identity import ANONYMOUS
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample
from rlsys.data import Tokenizer
from rlsys.evaluation import evaluation
from rlsys.evaluation.eval_sets import EvalSetRunner, one_version
from rlsys.evaluation.pass_at_k import pass_at_k, pass_at_k_metrics, reported_ks, wilson
from rlsys.evaluation.results import EvalResult, EvalStatus
from rlsys.obs.progress import PlainProgress, evaluation_lines
from rlsys.router.router import PinLost
from tests.helpers.http_engine import HttpEngine
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import Rig, length_reward, make_config, rig
from tests.helpers.scripted_router import ScriptedRouter
from tests.unit.worker.test_repeat import random_clock, trained, what


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_one(case: tuple[int, int, int]) -> None:
    n, right, k = case
    draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4)) == (0, 1)
    for wrong in ((4, 1, 5), (4, 5, 1), (0, 0, 0)):
        with pytest.raises(ValueError):
            pass_at_k(*wrong)


def test_the_interval_is_wilsons() -> None:
    """1 of 10: 0.0179 to 0.4042 (Newcombe 1998 tabulates the method; computed by hand from the formula)."""
    assert wilson(0.1, 10) == pytest.approx((0.01788, 0.40415), abs=1e-4)
    low, high = wilson(0.0, 20)
    assert (low, high) == (0.0, pytest.approx(0.1611, abs=1e-4))
    assert wilson(0.5, 4000)[1] - wilson(0.5, 4000)[0] == pytest.approx(2 * 1.96 * 0.5 / 4000**0.5, rel=1e-3)


def test_pass_at_k_is_reported_for_powers_of_two_and_n() -> None:
    assert [reported_ks(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_a_prompt_with_too_few_judged_responses_does_not_count() -> None:
    figures = pass_at_k_metrics([[True, False], [False], []], 2)
    assert figures["pass_1"] == pytest.approx((0.5 + 0) / 2)
    assert (figures["pass_2"], figures["pass_2_low"]) == (1.0, pytest.approx(wilson(1.0, 1)[0]))
    assert pass_at_k_metrics([[]], 1) == {}


# In the config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_starter(tmp_path / "mine")
    return tmp_path / "mine" / "config.yaml"


def test_invalid_sets_are_rejected(folder: Path) -> None:
    for sets, message in (
        ("[{name: a, samples: 2}]", "equal responses; use a temperature"),
        ("[{name: a}, {name: a}]", "name = 'a' of 2 sets"),
        ("[{name: 'a/b'}]", "eval.sets"),
        ("[{name: a, top_p: 0.7}]", "top_p = 0.7 needs top_k"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(folder, [f"eval.sets={sets}"])


def test_a_set_is_tried_before_the_start(folder: Path) -> None:
    with pytest.raises(UserError, match=r"eval.sets hard: data.source = 'jsonl'|eval.sets hard: .*path"):
        check_start(load_config(folder, ["eval.sets=[{name: hard, data: {source: jsonl}}]"]))
    with pytest.raises(UserError, match=r"eval.sets hard: data.reward"):
        check_start(load_config(folder, ["eval.sets=[{name: hard, data: {reward: no_such_one}}]"]))


# By a router that answers each prompt with as many tokens as it has


def sets_of(folder: Path, tmp_path: Path, router: Any, *overrides: str) -> EvalSetRunner:
    """Rewards by length: every second prompt is right."""
    (tmp_path / "judge.py").write_text(
        "import itertools\n"
        "def by_turn(config):\n"
        "    async def score(prompt, text):\n"
        "        return float(prompt.index % 2)\n"
        "    return score\n"
    )
    data = f"{{source: chain_sum_tail, reward: '{tmp_path}/judge.py:by_turn'}}"
    eval_sets = (
        f"[{{name: hard, samples: 3, temperature: 0.5, top_k: 50, top_p: 0.7, prompts: 4, data: {data}}}]"
    )
    config = load_config(folder, [f"eval.sets={eval_sets}", *overrides])
    return EvalSetRunner(config, config.eval.sets[0], Tokenizer(config.model.path), router)


async def test_a_set_uses_its_own_sampling_and_fixed_seeds(folder: Path, tmp_path: Path) -> None:
    router = ScriptedRouter(lambda s: 3)
    router.version = 7
    runner = sets_of(folder, tmp_path, router)
    figures = await runner.measure()
    assert (figures["accuracy"], figures["pass_1"], figures["pass_3"]) == (0.5, 0.5, 0.5)
    assert (figures["prompts"], figures["samples"], figures["weight_version"]) == (4, 3, 7)
    first = list(router.probes)
    assert {t for _, t, _ in first} == {0.5}
    assert set(router.truncations) == {Truncation(50, 0.7)}
    assert len({seed for _, _, seed in first}) == 12, "a seed for each response"
    await runner.measure()
    assert router.probes[12:] == first
    await runner.close()


async def test_a_response_with_a_failed_tool_is_excluded_from_the_accuracy(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(
        "from rlsys.generators.parser_client import ToolFailed\n"
        "def odd(config, tokenizer, speak):\n"
        "    async def generate(sample, prompt):\n"
        "        if prompt.index == 0:\n"
        "            raise ToolFailed('no luck')\n"
        "        await speak(sample)\n"
        "    return generate\n"
    )
    runner = sets_of(
        folder, tmp_path, ScriptedRouter(lambda s: 3), f"rollout.generator={tmp_path}/odd.py:odd"
    )
    figures = await runner.measure()
    assert (figures["accuracy"], figures["prompts"]) == (pytest.approx(2 / 3), 3)
    await runner.close()


async def test_answers_of_two_weight_versions_are_no_evaluation(folder: Path, tmp_path: Path) -> None:
    router = ScriptedRouter(lambda s: 3)
    runner = sets_of(folder, tmp_path, router)
    probe = router.probe

    async def pushed_in_between(*asked: Any, **how: Any) -> Any:
        router.version += len(router.probes) == 5
        return await probe(*asked, **how)

    router.probe = pushed_in_between  # type: ignore[method-assign, assignment]
    with pytest.raises(RunError, match=r"from the weight versions \[0, 1\]; expected one"):
        await runner.measure()
    await runner.close()
    assert one_version([]) == 0
    assert one_version([Sample(0, 0, 0, [1], 0, spans=[VersionSpan(3, 0, 1)])]) == 3


class Sets:
    """Stands for a set; counts how often it is asked."""

    name, generator = "hard", None

    def __init__(self, router: ScriptedRouter) -> None:
        self.router, self.asked = router, 0

    async def measure(self) -> dict[str, float]:
        self.asked += 1
        await self.router.probe([1, 2], 4, 0.7, 11)
        return {"accuracy": 0.25}


@pytest.mark.parametrize("april", [False, True])
async def test_evaluations_change_no_trained_batch(tmp_path: Path, april: bool) -> None:
    """A run that evaluates after every push trains what the run trained that it repeats, and that never evaluated."""
    sizes: dict[str, Any] = {"over_provision": 3.0, "max_staleness": 4} if april else {}
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    model: dict[str, Any] = {"model": {"path": tmp_path}}  # a field of the run's identity
    first = make_config(tmp_path / "first", rollout=sizes, **model)
    baseline_batches, _ = await trained(first, random_clock(1), 5)
    again = make_config(
        tmp_path / "again", rollout={**sizes, "repeat": first.run.dir}, eval={"prompts": 3}, **model
    )
    r = Rig(again, lambda s: 3 + (s.sample_id * 7) % 17, length_reward)
    eval_sets: Any = Sets(r.router)
    r.manager._evaluator.sets = [eval_sets]
    clock, batches = random_clock(2), []

    async def done(work: Any) -> Any:
        from tests.unit.worker.test_repeat import done as by_clock

        return await by_clock(r, work, clock)

    await r.start()
    for step in range(1, 6):
        result = await done(r.manager.evaluate())
        assert result.sets == {"hard": {"accuracy": 0.25}}
        batch = await done(r.manager.take(step))
        batches.append(replace(batch, groups=load_tokens(r.folder, batch.groups)))
        await r.manager.end_push(await done(r.manager.begin_push()), [])
    await r.manager.close()
    r.buffer.close()
    assert eval_sets.asked == 5
    assert what(batches) == what(baseline_batches)


EVAL = {"prompts": 3, "background": True}


class SlowSets(Sets):
    """Asks one question at once, and one when it is told to."""

    def __init__(self, router: ScriptedRouter) -> None:
        super().__init__(router)
        self.go_on = asyncio.Event()

    async def measure(self) -> dict[str, float]:
        first = await self.router.probe([1, 2], 4, 0.7, 11, evaluation=True)
        await self.go_on.wait()
        self.go_on.clear()
        second = await self.router.probe([1, 2], 4, 0.7, 12, evaluation=True)
        self.asked += 1
        return {"weight_version": one_version([Sample(0, 0, 0, [1], 0, spans=first.spans + second.spans)])}


async def test_an_evaluation_in_the_background_changes_no_trained_batch(tmp_path: Path) -> None:
    """It begins after a push and ends two steps later. The run trains what the one trained that it repeats."""
    sizes: dict[str, Any] = {"over_provision": 3.0, "max_staleness": 4}
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    model: dict[str, Any] = {
        "model": {"path": tmp_path}, "launch": {"placement": "disaggregated"}, "engine": {"count": 2},
    }  # fmt: skip
    first = make_config(tmp_path / "first", rollout=sizes, **model)
    baseline_batches, _ = await trained(first, random_clock(1), 6)
    again = make_config(
        tmp_path / "again",
        rollout={**sizes, "repeat": first.run.dir},
        eval=EVAL,
        **model,
    )
    r = Rig(again, lambda s: 3 + (s.sample_id * 7) % 17, length_reward)
    slow_sets: Any = SlowSets(r.router)
    r.manager._evaluator.sets = [slow_sets]
    clock, batches, pinned_version, results = random_clock(2), [], 0, []

    async def done(work: Any) -> Any:
        from tests.unit.worker.test_repeat import done as by_clock

        return await by_clock(r, work, clock)

    await r.start()
    for step in range(1, 7):
        if step % 3 == 1:
            assert await done(r.manager.begin_evaluation())
            pinned_version = r.router.version
        batch = await done(r.manager.take(step))
        batches.append(replace(batch, groups=load_tokens(r.folder, batch.groups)))
        await r.manager.end_push(await done(r.manager.begin_push()), [])
        if step % 3 != 0:
            assert not (await done(r.manager.end_evaluation(False))).done
        else:
            slow_sets.go_on.set()
            status = await done(r.manager.end_evaluation(True))
            assert (
                status.result.weight_version == pinned_version < r.router.version and r.router.pinned is None
            )
            results.append(status.result.sets["hard"]["weight_version"])
    await r.manager.close()
    r.buffer.close()
    assert results == [1, 4] and slow_sets.asked == 2
    assert what(batches) == what(baseline_batches)


async def test_a_restart_ends_the_evaluation_in_the_background(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r:
        slow_sets: Any = SlowSets(r.router)
        r.manager._evaluator.sets = [slow_sets]
        await r.start()
        assert await r.manager.begin_evaluation()
        await r.manager.restore(0)
        assert r.router.pinned is None
        assert await r.manager.end_evaluation(True) == EvalStatus(done=True)
        await r.push()
        assert await r.manager.begin_evaluation()


async def test_errors_of_a_background_evaluation_are_raised(tmp_path: Path) -> None:
    class Broken(Sets):
        error: RunError

        async def measure(self) -> dict[str, float]:
            raise self.error

    async with rig(make_config(tmp_path)) as r:
        broken_sets: Any = Broken(r.router)
        r.manager._evaluator.sets = [broken_sets]
        await r.start()
        broken_sets.error = RunError("no response could be judged")
        assert await r.manager.begin_evaluation()
        with pytest.raises(RunError, match="no response could be judged"):
            await r.manager.end_evaluation(True)
        broken_sets.error = PinLost("its engine died")
        assert await r.manager.begin_evaluation()
        assert await r.manager.end_evaluation(True) == EvalStatus(done=True)


class Told:
    """The rollout process, as the loop asks it. `ended`: what becomes of an evaluation, one answer a question."""

    def __init__(self, *ended: EvalStatus, spared: bool = True) -> None:
        self.ended, self.spared = list(ended), spared
        self.calls: list[str] = []

    def begin_evaluation(self) -> bool:
        self.calls.append("begin")
        return self.spared

    def end_evaluation(self, wait: bool) -> EvalStatus:
        self.calls.append("wait" if wait else "look")
        return self.ended.pop(0)

    def evaluate(self) -> EvalResult:
        self.calls.append("evaluate")
        return EvalResult(1.0, 4, 3.0, 0, 9)


def loop_of(rollout: Told, tmp_path: Path, step: int) -> Any:
    pytest.importorskip("megatron")
    from rlsys.train import Loop

    class Line:
        lines: list[tuple[str, int, float]] = []  # noqa: RUF012 - of one test

        def write(self, kind: str, step: int, **values: Any) -> None:
            self.lines.append((kind, step, values["accuracy"]))

    Line.lines = []
    loop: Any = object.__new__(Loop)
    layout = {"launch": {"placement": "disaggregated"}, "engine": {"count": 2}}
    loop.config = make_config(
        tmp_path, eval={"background": True, "interval": 2}, trainer={"steps": 5}, **layout
    )
    loop.rollout, loop.recorder, loop.on_main, loop.step, loop.evaluating = (
        rollout,
        Line(),
        lambda f: f(),
        step,
        None,
    )
    return loop


@pytest.mark.full
def test_the_loop_records_an_evaluation_under_the_step_of_its_weights(tmp_path: Path) -> None:
    result = EvalResult(0.5, 4, 3.0, 0, 3)
    rollout = Told(EvalStatus(False), EvalStatus(True, result), EvalStatus(True))
    loop = loop_of(rollout, tmp_path, 2)
    assert loop.evaluate() is None
    loop.step = 3
    loop.end_evaluation(wait=False)
    assert not loop.recorder.lines
    loop.step = 4
    assert loop.evaluate() is None  # the one before is waited for
    assert loop.recorder.lines == [("eval", 2, 0.5)]
    loop.end_evaluation(wait=True)  # its engine died: no line
    loop.end_evaluation(wait=True)
    assert loop.recorder.lines == [("eval", 2, 0.5)]
    assert rollout.calls == ["begin", "look", "wait", "begin", "wait"]


@pytest.mark.full
def test_where_no_engine_can_be_spared_the_loop_waits(tmp_path: Path) -> None:
    loop = loop_of(Told(spared=False), tmp_path, 2)
    assert loop.evaluate() == 1.0
    assert loop.recorder.lines == [("eval", 2, 1.0)] and loop.rollout.calls == ["begin", "evaluate"]


def test_in_the_background_needs_an_engine_to_spare(tmp_path: Path) -> None:
    for layout in ({}, {"launch": {"placement": "disaggregated"}}):
        with pytest.raises(ValueError, match=r"eval.background = true .* at least 2 engines .*found"):
            make_config(tmp_path, eval={"background": True}, **layout)


# As a process, and told


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    http_engine = HttpEngine()
    yield await http_engine.start()
    await http_engine.stop()


async def test_rlsys_eval_measures_the_sets_too(engine: str, folder: Path, tmp_path: Path) -> None:
    sizes = ["rollout.max_response_tokens=8", "eval.prompts=3", "rollout.reward_concurrency=1"]
    set_override = (
        "eval.sets=[{name: often, samples: 2, temperature: 1.0, prompts: 2, max_response_tokens: 4}]"
    )
    config: Config = load_config(folder, [f"run.dir={tmp_path}", *sizes, set_override])
    result = await evaluation.evaluate(config, {engine: ANONYMOUS})
    assert result.mean_length == 8
    assert {k: result.sets["often"][k] for k in ("pass_2", "mean_length", "truncated", "samples")} == {
        "pass_2": 0.0, "mean_length": 4, "truncated": 4, "samples": 2,
    }  # fmt: skip
    figures = result.metrics()
    assert figures["often/pass_2"] == 0.0
    (line,) = evaluation_lines({"model": "m", **figures})[1:]
    assert line.startswith(
        "often: pass@1 0.000 [0.000, 0.658], pass@2 0.000 [0.000, 0.658] on 2 prompts x 2, mean"
    )


def test_the_display_prints_a_line_for_each_set() -> None:
    of_set = {"prompts": 2, "samples": 1, "mean_length": 5.0, "truncated": 0, "accuracy": 0.5}
    result = EvalResult(0.5, 8, 3.0, 0, 2, {"hard": of_set | pass_at_k_metrics([[True], [False]], 1)})
    entry = {"kind": "eval", "step": 4, **result.metrics()}
    out = io.StringIO()
    with PlainProgress(10, Console(file=out, width=200)) as display:
        display.entry(json.loads(json.dumps(entry)), live=True)
    assert out.getvalue().splitlines()[1] == (
        "eval at step 4: hard: pass@1 0.500 [0.095, 0.905] on 2 prompts x 1, mean length 5.0, 0 truncated"
    )
