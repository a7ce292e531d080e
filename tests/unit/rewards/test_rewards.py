"""Rewards: what counts as an answer, which scores are refused, and that slow scoring holds nobody up."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.data import Tokenizer, build_source
from rlsys.data.faults import FaultParams
from rlsys.data.quickstart_model import write_model
from rlsys.rewards import REWARDS, Rewards, make_score
from rlsys.rewards.answer import canonical_answer, final_answer
from rlsys.rewards.judge_training import judge_reward
from rlsys.rewards.results import InvalidReward, parse_reward
from rlsys.worker.loop_watch import CHECKS, StallDetector
from rlsys.worker.scoring import Scorer
from tests.helpers.responses import response_of, sample_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def reward_of(model: Path, name: str, prompt: Prompt, text: str) -> float:
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": name}})
    return float(make_score(config)(prompt, response_of(text)))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4-1=3</think><answer>3</answer><eos>", "3"),
        ("<answer>1</answer></think><answer> 2 </answer><eos>", "2"),
        ("<answer></answer><eos>", ""),
        ("</think><answer>3</answer>", None),  # never ended
        ("</think><answer>3<eos>", None),
        ("3</answer><eos>", None),
        ("<answer>3</answer><answer><eos>", None),
        ("<eos>", None),
        ("", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(response_of(text)) == answer


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("boxed", r"so \boxed{1}, no: \boxed{\frac{3}{4}}.<eos>", r"\frac{3}{4}"),
        ("boxed", r"\boxed{1<eos>", None),
        ("boxed", "<answer>1</answer><eos>", None),
        ("boxed", r"\boxed{1}", None),
        ("line", "3+4=7\nAnswer: 7 <eos>", "7"),
        ("line", "Answer: 1\nAnswer:2\nbye<eos>", "2"),
        ("line", "My Answer: 7<eos>", None),
        ("tags", "Answer: 7<eos>", None),
    ],
)
def test_a_final_answer_is_parsed_in_the_requested_form(form: str, text: str, answer: str | None) -> None:
    assert final_answer(response_of(text), form) == answer


def test_verifiers_and_votes_read_the_form_of_their_prompt(model: Path) -> None:
    config = Config.model_validate({"model": {"path": model}})
    prompt = build_source(config, Tokenizer(model)).train(0)
    right = prompt.entry["answer"]
    boxed = replace(prompt, entry={**prompt.entry, "form": "boxed", "marks": ["<check>", "</check>"]})
    for name in ("reasoning_gym", "exact_answer"):
        score = REWARDS[name](config)
        assert score(boxed, response_of(rf"\boxed{{{right}}}<eos>")) == 1
        assert score(boxed, response_of(f"<answer>{right}</answer><eos>")) == 0
        assert score(prompt, response_of(f"<answer>{right}</answer><eos>")) == 1
    combined_reward = REWARDS["answer_and_format"](config)
    assert combined_reward(boxed, response_of(rf"<check>\boxed{{{right}}}</check><eos>")) == {
        "answer": 1,
        "format": 1,
    }
    assert combined_reward(boxed, response_of(rf"<check><check>\boxed{{{right}}}<eos>")) == {
        "answer": 1,
        "format": 1 / 3,
    }
    assert combined_reward(prompt, response_of(f"<answer>{right}</answer><eos>")) == {
        "answer": 1,
        "format": 1,
    }
    assert canonical_answer(response_of(r"\boxed{A  b}<eos>"), "boxed") == "a b"


def test_the_judges_own_reward_by_hand() -> None:
    """The reference gives -1 to what is no step of the solution; 1 - 99 / 4 would have been -23.75."""
    assert (judge_reward(-1, -1, 4), judge_reward(-1, 2, 4), judge_reward(2, -1, 4)) == (1, -1, -1)
    assert judge_reward(1, 3, 4) == 0.5
    assert (
        judge_reward(100, 1, 4)
        == judge_reward(4, 1, 4)
        == judge_reward(-2, -1, 4)
        == judge_reward(None, 1, 4)
        == -1
    )


async def test_a_judge_is_trained_on_worked_sums_with_one_wrong_line_or_none(model: Path) -> None:
    """The rule that judges sums agrees with what the source says; so it gets full marks, and chance does not."""
    from rlsys.algo.methods.fapo import Fapo
    from rlsys.rewards.judges import build_judge

    async def never(question: str) -> str:
        raise AssertionError("the rule asks nobody")

    data = {"source": "chain_sum_faults", "reward": "fapo_judge", "judge": "chain_sum"}
    config = Config.model_validate({"model": {"path": model}, "data": data})
    source, score = build_source(config, Tokenizer(model)), REWARDS["fapo_judge"](config)
    assert FaultParams().question == Fapo().question  # what is trained is what is asked
    judge = build_judge(config, never)
    assert judge is not None
    prompts = [source.train(i) for i in range(60)]
    for prompt in prompts:
        assert source.train(prompt.index) == prompt
        assert prompt.text.count(prompt.question) == 1
        reply = await judge(prompt.question)
        assert score(prompt, response_of(f"{reply}<eos>")) == 1
        assert score(prompt, response_of(f"<answer>{prompt.entry['step']}</answer><eos>")) == 1
        assert (
            score(prompt, response_of("<answer>x</answer><eos>"))
            == score(prompt, response_of(f"{reply}"))
            == 0
        )
    steps = [p.entry["step"] for p in prompts]
    assert 15 < steps.count(-1) < 45 and len(set(steps)) > 3
    flawed = next(p for p in prompts if p.entry["step"] > 0)
    near = score(flawed, response_of(f"<answer>{flawed.entry['step'] - 1}</answer><eos>"))
    assert 0.5 < near == 1 - 0.5 / flawed.entry["steps"] < 1
    assert {p.question for p in prompts}.isdisjoint(p.question for p in source.heldout(20))
    with pytest.raises(ValueError, match="has no step and no steps"):
        score(replace(flawed, entry={}), response_of("<eos>"))


def test_reasoning_gym_verifier_judges_the_answer(model: Path) -> None:
    config = Config.model_validate({"model": {"path": model}})
    prompt = build_source(config, Tokenizer(model)).train(0)
    right = prompt.entry["answer"]
    assert reward_of(model, "reasoning_gym", prompt, f"</think><answer>{right}</answer><eos>") == 1
    assert reward_of(model, "reasoning_gym", prompt, f"</think><answer>{int(right) + 1}</answer><eos>") == 0
    assert reward_of(model, "reasoning_gym", prompt, f"</think><answer>{right}</answer>") == 0
    padded = f"</think><answer>x{right}</answer><eos>"  # contains the answer: part marks
    assert reward_of(model, "reasoning_gym", prompt, padded) == 0
    assert 0 < reward_of(model, "reasoning_gym_partial", prompt, padded) < 1


@pytest.mark.parametrize(
    ("text", "score"), [("<answer>blue</answer><eos>", 1), ("<answer>Blue</answer><eos>", 0), ("blue", 0)]
)
def test_exact_answer(model: Path, text: str, score: float) -> None:
    assert reward_of(model, "exact_answer", Prompt(0, "", [], {"answer": "blue"}), text) == score


async def scores_async(prompt: Prompt, text: str) -> float:
    await asyncio.sleep(0)
    return 0.5


def makes_async(config: Config) -> object:
    return scores_async


def hostile(config: Config) -> object:
    """As bad as a reward function can be; what it does is in the prompt's entry."""

    def score(prompt: Prompt, text: str) -> object:
        print("noise on standard output")
        deed = prompt.entry["deed"]
        if deed == "hang":
            while True:
                pass
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "raise":
            raise ZeroDivisionError("no such thing")
        return {"nan": math.nan, "words": "full marks", "parts": {"a": 1}, **UNUSUAL}[deed]

    return score


UNUSUAL: dict[str, object] = {
    "two keys": {1: 0.5, "1": 0.25}, "two keys beside a score": {"score": 1, 2.5: 0.5, "2.5": 1},
    "bytes": b"1", "bytes as a part": {"a": bytearray(b"1")}, "bytes of a turn": {"score": 1, "turn_rewards": [b"1"]},
    "other keys": {True: 0.5, None: 0.25},
}  # fmt: skip


async def test_a_plain_reward_is_validated_like_an_async_one(model: Path) -> None:
    """Its process neither drops one of two equal keys nor makes a number of bytes."""
    rewards = Rewards(config_of(model, "hostile"))
    scorer = Scorer(rewards.open, lambda ids: "", timeout=60)
    prompts = [Prompt(i, "", [], {"deed": deed}) for i, deed in enumerate(UNUSUAL)]
    *refused, last_verdict = [await scorer.score(p, sample_of()) for p in prompts]
    await rewards.close()
    reasons = [str(v.reason) for v in refused]
    assert all("two keys have the same text" in reason for reason in reasons[:2]), reasons
    assert all("bytes" in reason or "bytearray" in reason for reason in reasons[2:]), reasons
    assert last_verdict.parts == {"True": 0.5, "None": 0.25}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, "1", None, [], {}, {"a": 1, "b": math.nan}, {"score": "x"}]
)
def test_a_reward_that_is_not_a_finite_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidReward, match=r"x returned .*expected a"):
        parse_reward(value, "x")


def config_of(model: Path, name: str) -> Config:
    return Config.model_validate({"model": {"path": model}, "data": {"reward": f"{__name__}:{name}"}})


async def test_an_async_reward_by_import_path_runs_in_this_process(model: Path) -> None:
    rewards = Rewards(config_of(model, "makes_async"))
    async with rewards.open() as reward_fn:
        assert (await reward_fn(Prompt(0, "", [], {}), "")).reward == 0.5
    assert rewards._workers.started == 0


class AsyncScore:
    async def __call__(self, prompt: Prompt, text: str) -> float:
        return await scores_async(prompt, text)


def makes_an_async_object(config: Config) -> object:
    return AsyncScore()


async def test_an_object_with_an_async_call_is_an_async_reward(model: Path) -> None:
    rewards = Rewards(config_of(model, "makes_an_async_object"))
    scorer = Scorer(rewards.open, lambda ids: "", timeout=5)
    assert (await scorer.score(Prompt(0, "", [], {}), sample_of())).reward == 0.5
    assert (rewards._workers.started, scorer.scoring) == (0, [])


BLOCKS = """
import asyncio, threading
from rlsys.worker.loop_watch import loop_watch

async def reward():
    threading.Event().wait()

async def main():
    with loop_watch(0.5, lambda: "data.reward = mine:reward in flight for prompts: 7"):
        await reward()

asyncio.run(main())
"""


def test_an_async_reward_that_blocks_the_loop_ends_the_process_in_one_line() -> None:
    process = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, timeout=60)
    [line] = process.stderr.splitlines()
    assert process.returncode == 1
    assert line.startswith("rlsys: error: the event loop was blocked for 0.5 s at <string>:6 (reward)")
    assert line.endswith("; data.reward = mine:reward in flight for prompts: 7 [exit 1]")


def test_only_a_loop_without_heartbeats_counts_as_stalled() -> None:
    stillness = StallDetector()
    assert not any(stillness.stalled(i // CHECKS) for i in range(50 * CHECKS))
    assert [stillness.stalled(99) for _ in range(CHECKS + 1)] == [False] * CHECKS + [True]


async def test_a_plain_reward_that_raises_dies_or_hangs_affects_no_other(model: Path) -> None:
    """Two scores hang, with one place: the third gets its turn, and its time only begins then."""
    rewards = Rewards(config_of(model, "hostile"))
    scorer = Scorer(rewards.open, lambda ids: "", timeout=1.5, concurrency=1)

    async def told(*deeds: str) -> list[object]:
        prompts = [Prompt(i, "", [], {"deed": deed}) for i, deed in enumerate(deeds)]
        verdicts = await asyncio.gather(*(scorer.score(p, sample_of()) for p in prompts))
        return [v.reason if v.reason is not None else v.reward for v in verdicts]

    parts, raised, *reasons = await told("parts", "raise", "nan", "words")
    line = next(
        i for i, x in enumerate(Path(__file__).read_text().splitlines(), 1) if "ZeroDivisionError(" in x
    )
    assert parts == 1.0
    assert str(raised).startswith("reward raised ZeroDivisionError: no such thing (")
    assert str(raised).endswith(f"{Path(__file__).name}:{line})")
    assert reasons == [
        "reward hostile returned nan; expected a finite number",
        "reward hostile returned 'full marks'; expected a finite number",
    ]
    assert (scorer.failures, scorer.timeouts) == (3, 0)
    assert await told("die") == ["reward raised ProcessEnded: exit code -9"]
    hung = await told("hang", "hang", "parts")
    assert hung == [*["reward took longer than rollout.reward_timeout = 1.5 s"] * 2, 1.0]
    assert scorer.timeouts == 2
    assert rewards._workers.started == 4  # one for all that answered, one after each end
    await rewards.close()


def forks(config: Config) -> object:
    """Leaves a process in a session of its own that holds the worker's pipes, and hangs."""

    def score(prompt: Prompt, text: str) -> float:
        child = os.fork()
        if child == 0:
            os.setsid()
            Path(prompt.entry["born"]).touch()
        while True:
            signal.pause()

    return score


async def test_an_escaped_process_that_holds_the_pipes_does_not_block_scoring(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's wait() waits for the end of the pipes too. One that is born while the others are killed is found
    by nobody: here, as psutil sees none."""
    child_processes: list[psutil.Process] = []

    def none(worker: psutil.Process, recursive: bool) -> list[psutil.Process]:
        child_processes.extend(children(worker, recursive=recursive))
        return []

    children = psutil.Process.children
    monkeypatch.setattr(psutil.Process, "children", none)
    rewards = Rewards(config_of(model, "forks"))
    scorer = Scorer(rewards.open, lambda ids: "", timeout=1.5)
    born = tmp_path / "born"
    try:
        async with asyncio.timeout(60):
            verdict = await scorer.score(Prompt(0, "", [], {"born": str(born)}), sample_of())
        assert verdict.reason == "reward took longer than rollout.reward_timeout = 1.5 s"
        assert born.exists() and [p.is_running() for p in child_processes] == [True]
    finally:
        for process in child_processes:
            process.kill()


async def test_parts_of_a_reward_have_the_names_and_the_order_of_the_first(model: Path) -> None:
    rewards: list[object] = [
        {"right": 1.0, "brief": 0.0}, {"brief": 1.0, "right": 0.0}, {"right": 1.0}, {"right": 1.0, "breif": 1.0}, 1.0
    ]  # fmt: skip

    async def reward(prompt: Prompt, text: str) -> Any:
        return rewards[prompt.index]

    scorer = Scorer(lambda: nullcontext(reward), lambda ids: "", timeout=5)
    first, turned, *refused = [
        await scorer.score(Prompt(i, "", [], {}), sample_of()) for i in range(len(rewards))
    ]
    assert first.parts is not None and turned.parts is not None
    assert list(turned.parts.items()) == [("right", 0.0), ("brief", 1.0)]
    assert (first.right, turned.right) == (True, False)
    assert [v.reason for v in refused] == [
        f"reward has the parts {names}, expected those of the run's first reward: ['right', 'brief']"
        for names in (["right"], ["right", "breif"], [])
    ]
    assert all(v.reward is None for v in refused)
    assert scorer.failures == 3


def test_an_unknown_reward_error_suggests_the_nearest_name(model: Path) -> None:
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": "reasoning_gim"}})
    with pytest.raises(
        UserError, match=r"data\.reward = 'reasoning_gim': unknown name; did you mean reasoning_gym\?"
    ):
        Rewards(config)


@pytest.mark.parametrize(
    ("working", "verdict"),
    [("4-1=3\n3-7=-4", -1), ("4-1=2\n2-7=-5", 0), ("4-1=3\n3-7=4", 1), ("", 0), ("4-1=3\nwell", 1)],
)
async def test_the_rule_judge_names_the_first_wrong_line(working: str, verdict: int) -> None:
    from rlsys.algo.methods.fapo import Fapo, flaw
    from rlsys.rewards.judges import build_judge

    async def never(question: str) -> str:
        raise AssertionError("the rule asks nobody")

    config = Config.model_validate({"model": {"path": "x"}, "data": {"judge": "chain_sum"}})
    judge = build_judge(config, never)
    assert judge is not None
    solution = f"{working}</think><answer>-4</answer>"
    judge_prompt = (
        Fapo().question.replace("{prompt}", "4-1-7=").replace("{key}", "-4").replace("{response}", solution)
    )
    assert flaw(await judge(judge_prompt)) == verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (
            Prompt(3, "", [1], {"prompt": "1+1=", "solution": "2"}, location="sums.jsonl:7"),
            ": sums.jsonl:7 has no answer; its keys: prompt, solution",
        ),
        (Prompt(3, "", [1], {}), ": prompt 3 has no answer; its keys: none"),
        (Prompt(3, "", [1], {"answer": {}}), ""),  # the key of a dict in the row
        (Prompt(3, "", [1], {"answer": {}, "value": 1}), ""),
    ],
)
async def test_a_record_without_a_key_that_the_reward_reads_is_named(prompt: Prompt, told: str) -> None:
    """Before: `KeyError: 'answer'`, and which record of which file was for the user to find."""

    async def reward(prompt: Prompt, _: str) -> float:
        return float(prompt.entry["answer"]["value"])

    scorer = Scorer(lambda: nullcontext(reward), lambda ids: "", timeout=5)
    reason = (await scorer.score(prompt, sample_of())).reason or ""
    assert reason.startswith("reward raised KeyError: '")
    assert f" ({Path(__file__).relative_to(Path.cwd())}:" in reason
    assert told in reason if told else reason.endswith(")")
    assert "\n" not in reason


@pytest.mark.parametrize("plain", [False, True])
async def test_a_key_error_of_the_reward_does_not_mention_the_row(tmp_path: Path, plain: bool) -> None:
    (tmp_path / "own.py").write_text(
        f"""
def reward(config):
    {"" if plain else "async "}def score(prompt, response):
        return prompt.entry["n"] if response == "row" else dict(prompt.entry)["answer"]
    return score
"""
    )
    config = Config.model_validate(
        {"model": {"path": "x"}, "data": {"reward": f"{tmp_path / 'own.py'}:reward"}}
    )
    rewards = Rewards(config)
    row = Prompt(3, "", [1], {"text": "1"}, location="rows.jsonl:4")

    async def reason(text: str) -> str:
        scorer = Scorer(rewards.open, lambda ids: text, timeout=60)
        return (await scorer.score(row, sample_of())).reason or ""

    try:
        own_reason, of_row = await reason("own"), await reason("row")
    finally:
        await rewards.close()
    assert own_reason.startswith("reward raised KeyError: 'answer' (") and own_reason.endswith("own.py:4)")
    assert of_row.endswith("own.py:4): rows.jsonl:4 has no n; its keys: text")
