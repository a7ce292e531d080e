"""Tasks in the formats of verl, slime, TRL and prime-rl pass the trial before a run, and reward the right answer.
tests/integration/test_peers_train.py trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source
from rlsys.rewards import Rewards
from rlsys.rollout.dry_run import build_inputs
from rlsys.worker.assembly import build_scorer
from tests.helpers.peers import FOLDER, PEERS, write_task
from tests.helpers.responses import sample_of

REWARDS = {  # of a right answer, a wrong one, none
    "verl": (1.0, -1.0, -1.0),
    "slime": (1.0, 0.0, 0.0),
    "trl": (2.2, 0.2, 0.0),
    "prime_rl": (1.1, 0.1, 0.0),
}


@pytest.mark.parametrize("peer", PEERS)
async def test_tasks_of_other_frameworks_get_their_expected_rewards(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / "prime_rl"))  # where the stand-in for verifiers is
    config = load_config(write_task(peer, tmp_path, 100))
    inputs = build_inputs(config)
    assert inputs is not None
    tokenizer, source = inputs
    prompt = source.train(3)
    rewards = Rewards(config)
    try:
        scorer = build_scorer(config, rewards, tokenizer)
        texts = [f"1+1=2</think><answer>{a}</answer><eos>" for a in (prompt.entry["answer"], "x")]
        verdicts = [await scorer.score(prompt, sample_of(tokenizer.encode(t))) for t in (*texts, "hm<eos>")]
    finally:
        await rewards.close()
    assert [v.reward for v in verdicts] == pytest.approx(REWARDS[peer]), verdicts[0].reason
    assert [v.right for v in verdicts] == [True, False, False]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with environments that cannot be used."""
    (tmp_path / "own_env.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def several(): return N(dataset=[{'question': 'x'}], max_turns=4)\n"
        "def empty(): return N(dataset=[])\n"
        "def broken(): return 1 / 0\n"
        "def plain(): return N(system_prompt='Be brief.', dataset=[{'question': f'{i}+1='} for i in range(40)])\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, **data: Any) -> Any:
    config = load_config(Path("quickstart"), [f"data={{source: environment, {data['rest']}}}"])
    return config, build_source(config, Tokenizer(config.model.path))


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("params: {load: own_env.py:several}", "has max_turns = 4; expected 1"),
        ("params: {load: own_env.py:empty}", "SimpleNamespace has no data set"),
        ("params: {load: own_env.py:broken}", "ZeroDivisionError: division by zero (own_env.py:4)"),
        ("params: {load: own_env.py:nothing}", "there is no function 'nothing'"),
        ("params: {load: own-env-2}", "cannot import own_env_2"),
        ("params: {lod: x}", "data.params.load: missing"),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_line(own: Path, rest: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(own, rest=rest)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_questions_follow_the_system_prompt_and_a_rubric_is_required(own: Path) -> None:
    config, source = load(own, rest="params: {load: 'own_env.py:plain'}, reward: environment")
    assert source.train(0).text.startswith("<bos><system>Be brief.<user>")
    with pytest.raises(UserError, match="has no rubric with functions"):
        Rewards(config)
    wrong = config.model_copy(update={"data": replace_source(config)})
    with pytest.raises(
        UserError, match=r"rollout\.generator = 'single_turn' and data\.source = 'jsonl': expected"
    ):
        Rewards(wrong)


def replace_source(config: Any) -> Any:
    return config.data.model_copy(update={"source": "jsonl"})
