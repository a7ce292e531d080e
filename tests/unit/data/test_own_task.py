"""Each file that docs/own-task.md shows does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsys.config import Config, load_config
from rlsys.data import Tokenizer, build_source
from rlsys.rewards import REWARDS, make_scores
from rlsys.rewards.results import parse_reward
from rlsys.rewards.signatures import infer_framework
from rlsys.rollout.dry_run import dry_run
from rlsys.router.turn_ends import turn_ends
from tests.helpers.responses import response_of

PAGE = Path(__file__).parents[3] / "docs" / "own-task.md"
FENCE = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILES = dict(FENCE.findall(PAGE.read_text()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answered(config: Config, answer: str) -> list[float]:
    """What the rewards of a config give to the first prompt with this answer, before their weights."""
    source = build_source(config, Tokenizer(config.model.path))
    response = response_of(f"</think><answer>{answer}</answer><eos>")
    return [parse_reward(score(source.train(0), response)).reward for score in make_scores(config)]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
def test_a_config_of_the_page_passes_the_trial(folder: Path, name: str) -> None:
    config = load_config(Path(name))
    assert turn_ends(config, Tokenizer(config.model.path)).texts == tuple(config.rollout.stop)
    dry_run(config)


def test_rewards_of_the_page_distinguish_correct_and_wrong_answers(folder: Path) -> None:
    for name in ("sums", "questions", "brief", "mixture"):
        config = load_config(Path(f"{name}.yaml"))
        right = build_source(config, Tokenizer(config.model.path)).train(0).entry["answer"]
        assert answered(config, right)[0] > 0.9 and answered(config, "x")[0] <= 0
    several = load_config(Path("several.yaml"))
    right = build_source(several, Tokenizer(several.model.path)).train(0).entry["answer"]
    assert answered(several, right) == [1.0, 1.0, 0.0, 1.0]
    assert answered(several, "x") == [0.0, -1.0, 0.0, 1.0]
    assert [spec.weight for spec in several.data.reward] == [1.0, 0.5, 0.1, 0.1]


def test_the_tables_of_the_page_are_those_of_the_source() -> None:
    page = PAGE.read_text()
    built_in = page.partition("Built in:")[2].partition("A function with")[0]
    reward_names = {
        name
        for row in re.findall(r"^\| (`.*?`) \|", built_in, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert reward_names == set(REWARDS) - {"fapo_judge"}  # a judge's own: docs/rollout.md
    for signature, parameters in re.findall(r"^\| `(\w+)` \| `\w*\(([^)`]*)\)`", page, re.MULTILINE):
        assert infer_framework(eval(f"lambda {parameters}: 0")) == signature
