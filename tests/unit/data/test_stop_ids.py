"""A response whose last token is any stop id of the model has ended by itself: in rewards, votes, SFT and imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.data.chats import encode_answer
from rlsys.data.quickstart_model import write_model
from rlsys.generators.tools import ToolTurns, answer_template
from rlsys.importers import slime
from rlsys.importers.arguments import read_arguments
from rlsys.importers.draft import Draft
from rlsys.router.request_sender import Turn
from rlsys.router.turn_ends import turn_ends
from rlsys.worker.assembly import build_router
from tests.helpers.stop_families import FAMILIES, edit, write_family
from tests.helpers.verdicts import REWARDS, sample_of, score_response


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("reward", "text"), REWARDS, ids=[f"{r}"[:40] for r, _ in REWARDS])
def test_a_right_answer_counts_by_whatever_stop_id_it_ends(
    name: str, reward: Any, text: str, tmp_path: Path
) -> None:
    family = write_family(tmp_path, name)
    tokenizer = Tokenizer(tmp_path)
    body = tokenizer.encode(text)
    worth = {
        mark: score_response(tmp_path, reward, [*body, *tokenizer.encode(mark)], Status.FINISHED).reward
        for mark in family.stops
    }
    full = 2.0 if reward == "answer_and_format" else 1.0
    assert worth == dict.fromkeys(family.stops, full)


@pytest.mark.parametrize("name", FAMILIES)
def test_votes_read_the_answer_whatever_stop_id_it_ends_by(name: str, tmp_path: Path) -> None:
    family = write_family(tmp_path, name)
    tokenizer = Tokenizer(tmp_path)
    for mark in family.stops:
        ids = [*tokenizer.encode("<answer>B 7</answer>"), *tokenizer.encode(mark)]
        assert score_response(tmp_path, "exact_answer", ids, Status.FINISHED).answer == "b 7", mark


def test_an_answer_that_was_cut_off_does_not_count_even_if_it_spells_the_end_token(tmp_path: Path) -> None:
    write_family(tmp_path, "glm")
    tokenizer = Tokenizer(tmp_path)
    spelled = [i for c in "<|endoftext|>" for i in tokenizer.encode(c)]  # plain characters, no special token
    for end in ([], spelled):
        ids = [*tokenizer.encode("</think><answer>7</answer>"), *end]
        for reward in ("exact_answer", "math", "format", "reasoning_gym"):
            assert score_response(tmp_path, reward, ids, Status.TRUNCATED).reward == 0.0, (reward, end)
        assert score_response(tmp_path, "exact_answer", ids, Status.TRUNCATED).answer is None


def test_an_answer_that_an_agents_own_stop_text_ended_has_ended_by_itself(tmp_path: Path) -> None:
    """What a request asked for beside rollout.stop is known to its status alone."""
    write_family(tmp_path, "glm")
    ids = Tokenizer(tmp_path).encode("</think><answer>7</answer>|")
    assert score_response(tmp_path, "exact_answer", ids, Status.FINISHED).reward == 1.0


@pytest.mark.parametrize("name", FAMILIES)
def test_an_end_that_is_the_last_token_of_the_budget_is_an_end(name: str, tmp_path: Path) -> None:
    """SGLang looks at the length first, and calls such a response cut off."""
    family = write_family(tmp_path, name)
    tokenizer = Tokenizer(tmp_path)
    config = Config.model_validate({"model": {"path": tmp_path}, "rollout": {"stop": ["</answer>"]}})
    turn = Turn(3, 1.0, None, turn_ends(config, tokenizer), pinned=False)
    for mark in (*family.stops, "</answer>"):
        ids = [*tokenizer.encode("7"), *tokenizer.encode(mark)]
        assert turn.status(sample_of(ids, Status.IN_FLIGHT), "length") is Status.FINISHED, mark
    assert turn.status(sample_of(tokenizer.encode("77"), Status.IN_FLIGHT), "length") is Status.TRUNCATED


CHAT = [{"role": "user", "content": "1+1="}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("as_text", [True, False])
def test_an_imitated_answer_ends_as_the_template_ends_a_turn(
    name: str, as_text: bool, tmp_path: Path
) -> None:
    family = write_family(tmp_path, name)
    tokenizer = Tokenizer(tmp_path)
    answer: Any = "2" if as_text else [{"role": "assistant", "content": "2"}]
    trace = encode_answer(tokenizer, CHAT, answer)
    assert tokenizer.decode(trace.response_ids) == f"2{family.turn_end or family.eos}"
    assert trace.trained is None or all(trace.trained)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_imitated_turns_are_trained_to_their_end(name: str, tmp_path: Path) -> None:
    """Where the template writes no end of a turn, the next role's mark is it, if the model stops there."""
    family = write_family(tmp_path, name)
    tokenizer = Tokenizer(tmp_path)
    trace = encode_answer(
        tokenizer, CHAT, [*ANSWERED[1:], {"role": "assistant", "content": "4"}], all_turns=True
    )
    assert trace.trained is not None
    trained_ids = [i for i, is_trained in zip(trace.response_ids, trace.trained, strict=True) if is_trained]
    end = family.turn_end
    assert tokenizer.decode(trained_ids) == f"2{end or family.user}4{end or family.eos}"


def test_a_text_with_an_end_token_receives_no_second_one(tmp_path: Path) -> None:
    write_family(tmp_path, "glm")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(encode_answer(tokenizer, CHAT, "2<|user|>").response_ids) == "2<|user|>"


def translated(folder: Path, *ids: int) -> Draft:
    options = f"--hf-checkpoint {folder} --rm-type math --prompt-data rows.jsonl"
    script = f"python3 train.py {options} --rollout-stop-token-ids {' '.join(map(str, ids))}\n"
    arguments = read_arguments(script, None, slime.program_index, slime.EXPECTED)
    return slime.translate(slime.read_settings(arguments), [])


def test_slime_stop_ids_are_omitted_if_equal_to_the_models_own(tmp_path: Path) -> None:
    write_family(tmp_path, "glm")
    eos_ids = json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
    option = "--rollout-stop-token-ids"
    eos_translation = translated(tmp_path, *eos_ids)
    assert option in [r.setting for r in eos_translation.defaults] and option not in [
        r.setting for r in eos_translation.rejected
    ]
    assert "stop_ids" not in eos_translation.config.get("rollout", {})
    for folder, ids in ((tmp_path, [eos_ids[0], 5]), (tmp_path / "gone", eos_ids)):
        translation = translated(folder, *ids)
        assert option not in [r.setting for r in (*translation.defaults, *translation.rejected)]
        assert translation.config["rollout"]["stop_ids"] == ids


def test_eos_of_the_text_part_is_a_stop_id(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen")
    tokenizer = Tokenizer(tmp_path)
    (mark,) = tokenizer.encode("<|im_end|>")
    edit(tmp_path / "config.json", eos_token_id=None, text_config={"eos_token_id": 5})
    config = Config.model_validate({"model": {"path": tmp_path}})
    assert {5, mark} <= turn_ends(config, tokenizer).ids


def test_configured_stop_ids_extend_the_models_own(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen")
    tokenizer = Tokenizer(tmp_path)
    (seven,) = tokenizer.encode("7")
    config = Config.model_validate({"model": {"path": tmp_path}, "rollout": {"stop_ids": [seven]}})
    ends = turn_ends(config, tokenizer)
    assert ends.ids == tokenizer.stop_ids | {seven} and ends.is_ended([seven])
    turn = Turn(3, 1.0, None, ends, pinned=False)
    assert turn.status(sample_of([seven], Status.IN_FLIGHT), "length") is Status.FINISHED
    endless = Config.model_validate(
        {"model": {"path": tmp_path}, "rollout": {"ignore_eos": True, "stop": ["7"]}}
    )
    ends = turn_ends(endless, tokenizer).with_texts(["8"])
    assert (ends.ids, ends.texts, ends.ignores_eos) == (frozenset(), ("7", "8"), True)
    assert Turn(3, 1.0, None, ends, pinned=False).options() == {"sampling": {"ignore_eos": True}}
    assert Turn(3, 1.0, None, turn_ends(config, tokenizer), pinned=False).options() == {}
    with pytest.raises(ValueError, match="ignore_eos = true with stop_ids"):
        Config.model_validate({"model": {"path": tmp_path}, "rollout": {"ignore_eos": True, "stop_ids": [7]}})
    unknown = Config.model_validate({"model": {"path": tmp_path}, "rollout": {"stop_ids": [10**6]}})
    with pytest.raises(UserError, match=r"rollout\.stop_ids has 1000000; expected ids below"):
        build_router(unknown, [], tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_tools_answer_follows_the_end_of_the_turn_that_called_it(name: str, tmp_path: Path) -> None:
    """The token that ended the turn is not said twice; a turn that a stop text ended gets the template's end."""
    family = write_family(tmp_path, name)
    tokenizer = Tokenizer(tmp_path)
    config = Config.model_validate({"model": {"path": tmp_path}, "rollout": {"stop": [")"]}})
    call, end = "<answer>1+1</answer>", family.turn_end

    async def observed(last: str) -> str:
        async def speak(sample: Sample) -> None:
            ids = tokenizer.encode(call + last)
            sample.append(Segment(ids, [-0.5] * len(ids), [VersionSpan(0, 0, len(ids))]))
            sample.status = Status.FINISHED

        async def tool(text: str) -> str:
            return "2"

        turns = ToolTurns(
            speak, tokenizer, tool, ends=turn_ends(config, tokenizer), call=("<answer>", "</answer>"),
            answer=answer_template(tokenizer, "user"), max_turns=2, max_response_tokens=99,
        )  # fmt: skip
        sample = Sample(0, 0, 0, [1], seed=0)
        await turns(sample, Prompt(0, "", [1], {}))
        (observed_span,) = sample.observed
        return tokenizer.decode(sample.response_ids[observed_span.start : observed_span.end])

    assert await observed(")") == f"{end}{family.user}2<assistant>"
    assert await observed(end or family.user) == f"{family.user if end else ''}2<assistant>"


@pytest.mark.parametrize("ids", [[2, -1], -1, [2, 10**6], [2, 10**30]])
def test_stop_ids_outside_the_vocabulary_reach_no_engine(ids: Any, tmp_path: Path) -> None:
    """Published files have -1 for none, and ids of another model's vocabulary."""
    write_model(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=ids)
    assert Tokenizer(tmp_path).stop_ids == {2}


@pytest.mark.parametrize("ids", [True, [2, True], "2", 2.0])
def test_a_stop_id_is_a_whole_number(ids: Any, tmp_path: Path) -> None:
    write_model(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=ids)
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id"):
        Tokenizer(tmp_path).stop_ids  # noqa: B018
