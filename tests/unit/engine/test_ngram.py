"""NGRAM speculation: how drafts are checked, where it is refused, and what the metrics tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_requirements
from rlsys.core.errors import UserError
from rlsys.engine import launch_args
from rlsys.engine.chunks import decode_chunk, read_chunk
from rlsys.engine.cpu.ngram import accepted_locations, first_locations, verify_greedy, verify_sampled
from tests.helpers import tiny

ROOT, A, B, LEAF = range(4)
"""A tree of four nodes: two children of the root, and one below the first."""
CHILD = torch.tensor([[A, LEAF, -1, -1]])
SIBLING = torch.tensor([[-1, B, -1, -1]])
INDEX = torch.arange(4)[None]
TOKENS = torch.tensor([[9, 1, 2, 3]])


def empty() -> dict[str, Tensor]:
    return {
        "predicts": torch.full((4,), -1),
        "accept_index": torch.full((1, 4), -1),
        "accept_token_num": torch.zeros(1, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("best", "accepted", "after"),
    [
        ([1, 3, 0, 5], [ROOT, A, LEAF], 5),
        ([1, 4, 0, 5], [ROOT, A], 4),
        ([2, 4, 7, 5], [ROOT, B], 7),
        ([6, 4, 7, 5], [ROOT], 6),
    ],
)
def test_greedy_follows_the_models_own_tokens(best: list[int], accepted: list[int], after: int) -> None:
    outputs = empty()
    verify_greedy(
        **outputs, candidates=TOKENS, retrieve_index=INDEX, retrieve_next_token=CHILD, retrieve_next_sibling=SIBLING,
        target_predict=torch.tensor([best]),
    )  # fmt: skip
    assert outputs["accept_index"][0][: len(accepted)].tolist() == accepted
    assert outputs["accept_index"][0][len(accepted) :].tolist() == [-1] * (4 - len(accepted))
    assert int(outputs["accept_token_num"]) == len(accepted) - 1
    assert int(outputs["predicts"][accepted[-1]]) == after


def test_a_sampled_token_has_the_models_probability_whatever_is_proposed() -> None:
    """Over a grid of both coins: how often each token comes after the root is its probability."""
    probs = torch.tensor([0.1, 0.3, 0.2, 0.4])
    target = probs.expand(1, 4, 4)
    counts, grid = torch.zeros(4), 40
    for i in range(grid):
        for j in range(grid):
            outputs = empty()
            verify_sampled(
                **outputs, candidates=TOKENS, retrive_index=INDEX, retrive_next_token=CHILD,
                retrive_next_sibling=SIBLING, uniform_samples=torch.full((1, 4), (i + 0.5) / grid),
                uniform_samples_for_final_sampling=torch.tensor([(j + 0.5) / grid]), target_probs=target,
            )  # fmt: skip
            counts[int(outputs["predicts"][ROOT])] += 1
    assert torch.allclose(counts / grid**2, probs, atol=0.02)


def test_accepted_locations_are_packed() -> None:
    out = torch.zeros(3, dtype=torch.int64)
    accepted_locations(torch.tensor([[0, 1, -1, -1], [4, -1, -1, -1]]), torch.arange(10, 18), out, 8)
    assert out.tolist() == [10, 11, 14]
    first_locations(torch.tensor([2, 1]), torch.tensor([[5, 6, 7], [8, 9, 0]]), out)
    assert out.tolist() == [5, 6, 8]


def sections(**changes: dict[str, Any]) -> dict[str, Any]:
    section_values: dict[str, Any] = {
        "model": {"path": "m"},
        "engine": {"ngram_drafts": 4, "deterministic": False},
    }
    for name, values in changes.items():
        section_values[name] = {**section_values.get(name, {}), **values}
    return section_values


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine": {"deterministic": True}}, "drafts depend on other samples"),
        ({"engine": {"ngram_drafts": 1}}, "engine.ngram_drafts = 1: a tree of one node"),
        ({"engine": {"return_routes": True}}, "expert routes of drafted tokens are untested"),
        ({"rollout": {"top_k": 20}}, "engines return no sampling mask for drafts, but rollout.top_k = 20"),
        (
            {"router": {"interruption": "retract"}, "launch": {"placement": "disaggregated"}},
            "drafts are tested with aborts only, but router.interruption = retract",
        ),
        (
            {"weights": {"method": "adapter"}, "trainer": {"lora": {"rank": 4}}},
            "engines do not draft with adapters",
        ),
    ],
)
def test_where_tokens_or_their_log_probs_would_not_be_the_models_it_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Config.model_validate(sections(**changes))


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss", "qwen3-next"])
def test_attention_that_was_never_compared_is_refused(family: str) -> None:
    hf = HFConfig.of(tiny.raw_config(tiny.TINY[family]), family)
    with pytest.raises(UserError, match=r"engine.ngram_drafts = 4: expected 0, because drafts are untested"):
        check_requirements(Config.model_validate(sections()), hf)


def test_the_engines_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: False)
    argv, env = launch_args.engine_command(Config.model_validate(sections()), 0, 3100)
    assert argv[argv.index("--speculative-algorithm") + 1] == "NGRAM"
    assert argv[argv.index("--speculative-num-draft-tokens") + 1] == "4"
    assert env["SGLANG_NATIVE_MOVE_KV_CACHE"] == "1"


def test_the_last_chunk_reports_the_number_of_verification_passes() -> None:
    event = (
        b'{"output_ids": [5], "meta_info": {"weight_version": "1", "prompt_tokens": 3, "completion_tokens": 12, '
        b'"output_token_logprobs": [[-0.5, 5, null]], "spec_verify_ct": 4, "finish_reason": %s}}'
    )
    final_chunk = read_chunk(decode_chunk(event % b'{"type": "length"}'), 11, int)
    assert (final_chunk.checks, final_chunk.checked) == (4, 12)
    on_its_way = read_chunk(decode_chunk(event % b"null"), 11, int)
    assert (on_its_way.checks, on_its_way.checked) == (0, 0)
