"""One strict xfail for each finding on what the trainer reads that shows on layers of megatron-core."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsys.core.errors import RunError, UserError
from rlsys.core.spans import RouteSpan
from rlsys.trainer import setup
from rlsys.trainer.checkpoints.conversion import hf_to_megatron, megatron_to_hf, verify
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, Packer, TrainSample
from rlsys.trainer.trainer import Trainer, UpdateResult
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration

SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 60)] for i in range(1, 4)]
LOGPS = 1e-4
"""Largest gap of a log-prob to transformers; the families' tests have 5e-5."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def reference(folder: Path) -> Tensor:
    """Log-probs of SEQUENCES by transformers, in float32."""
    model, logprobs = tiny.load(folder), []
    with torch.no_grad():
        for ids in SEQUENCES:
            logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            logprobs.append(logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(logprobs)


# -- S5: one expert a token ----------------------------------------------------------------------------------

SIGMOID = {
    "glm-4.5": ("Glm4MoeForCausalLM", {"num_experts_per_tok": 1}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {"num_experts_per_tok": 1}),
    "hy-v3": ("HYV3ForCausalLM", {"num_experts_per_tok": 1}),
    "glm-4.7-flash": ("Glm4MoeLiteForCausalLM", {"num_experts_per_tok": 1}),
}
"""They compute something else, silently."""
SOFTMAX = {
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 1}),
    "mixtral": ("MixtralForCausalLM", {"num_experts_per_tok": 1}),
    "ernie-4.5": ("Ernie4_5_MoeForCausalLM", {"moe_k": 1}),
    "gpt-oss": ("GptOssForCausalLM", {"num_experts_per_tok": 1}),
    "qwen3-next": ("Qwen3NextForCausalLM", {"num_experts_per_tok": 1}),
    "qwen3-vl-moe": ("Qwen3VLMoeForConditionalGeneration", {"num_experts_per_tok": 1}),
}
"""They end in a traceback of megatron-core."""


@pytest.mark.parametrize(
    ("architecture", "changes"), [*SIGMOID.values(), *SOFTMAX.values()], ids=SIGMOID | SOFTMAX
)
def test_trainer_inputs_s5_one_expert_a_token_is_right_or_refused_by_name(
    architecture: str, changes: dict[str, Any], tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    if architecture == "Qwen3MoeForCausalLM":
        changes = {**changes, "norm_topk_prob": True}
    folder = cases.write_model(tmp_path / "model", architecture, **changes)
    try:
        trainer = start(folder)
    except UserError as refusal:
        assert "experts" in str(refusal) or "moe_k" in str(refusal)
        return
    except ValueError as fault:
        setup.leave_layout()
        raise AssertionError(f"ends in a traceback: ValueError: {fault}") from None
    logprobs = torch.tensor([x for c in trainer.canaries(SEQUENCES) for x in c.logp])
    logprob_error = float((logprobs - reference(folder)).abs().max())
    assert logprob_error < LOGPS, f"{logprob_error:.3g} nats from transformers"


def test_trainer_inputs_s5_control_plain_softmax_of_one_expert_is_right(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    folder = cases.write_model(
        tmp_path / "model", "Qwen3MoeForCausalLM", num_experts_per_tok=1, norm_topk_prob=False
    )
    logprobs = torch.tensor([x for c in start(folder).canaries(SEQUENCES) for x in c.logp])
    assert float((logprobs - reference(folder)).abs().max()) < LOGPS


# -- M1: parts of size 0 -------------------------------------------------------------------------------------

NO_SHARED_EXPERTS = {
    "ernie-4.5": ("Ernie4_5_MoeForCausalLM", "moe_num_shared_experts"),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "n_shared_experts"),
    "glm-4.5": ("Glm4MoeForCausalLM", "n_shared_experts"),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "shared_expert_intermediate_size"),
    "qwen3-next": ("Qwen3NextForCausalLM", "shared_expert_intermediate_size"),
}


@pytest.mark.parametrize(("architecture", "field"), NO_SHARED_EXPERTS.values(), ids=NO_SHARED_EXPERTS)
def test_trainer_inputs_m1_a_model_without_shared_experts_is_transformers(
    architecture: str, field: str, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """transformers writes tensors of size 0, and a gate for them where the family has one. Its HY-V3 has one shared
    expert, whatever the file says."""
    folder = cases.write_model(tmp_path / "model", architecture, **{field: 0})
    logprobs = torch.tensor([x for c in start(folder).canaries(SEQUENCES) for x in c.logp])
    assert float((logprobs - reference(folder)).abs().max()) < LOGPS


# -- S6: routes that no router can have chosen ---------------------------------------------------------------

LAYERS, EXPERTS, TOPK = 4, 8, 2
ODD_ROWS = {
    "the same expert twice": lambda row: bytes([row[i - i % TOPK] for i in range(len(row))]),
    "zeros": lambda row: bytes(len(row)),
    "an expert that is not there": lambda row: bytes([EXPERTS + 1, *row[1:]]),
    "the same expert twice in the last layer": lambda row: row[:-1] + row[-2:-1],
}
"""Rows `[layers, k]` of a position, as engines were reported to give them."""


def with_rows(
    plain: list[TrainSample], change: Callable[[bytes], bytes] | None, positions: int
) -> list[TrainSample]:
    """The first `positions` of each sample's routes changed, or taken away."""
    width, out = LAYERS * TOPK, []
    for sample in plain:
        spans: list[RouteSpan] = []
        for span in (s for s in sample.routes if isinstance(s, RouteSpan)):
            n = min(positions, span.end - span.start)
            rows = [span.experts[i * width : (i + 1) * width] for i in range(n)]
            rest = span.experts[n * width :]
            if change is None:
                spans += [RouteSpan(n, span.end, rest)] if n < span.end else []
            else:
                spans.append(RouteSpan(span.start, span.end, b"".join(change(r) for r in rows) + rest))
        out.append(replace(sample, routes=tuple(spans)))
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_model(tmp_path_factory.mktemp("models") / "moe")


@pytest.mark.parametrize("change", ODD_ROWS.values(), ids=ODD_ROWS)
def test_trainer_inputs_s6_a_row_that_no_router_chooses_counts_as_missing(
    change: Callable[[bytes], bytes], model: Path, start: Callable[..., Trainer]
) -> None:
    """As if these positions had no routes: the tokens choose for themselves, and replay_missing counts them."""
    plain = cases.with_routes(cases.samples())

    def step(samples: list[TrainSample]) -> UpdateResult:
        trainer = start(model, trainer={"replay": "engine"}, engine={"return_routes": True})
        return trainer.update(trainer.passes.pack(samples), cases.policy_loss, cases.LR)

    absent = step(with_rows(plain, None, 5))
    try:
        odd = step(with_rows(plain, change, 5))
    except (RuntimeError, IndexError) as fault:
        raise AssertionError(f"the rank ends: {type(fault).__name__}: {fault}") from None
    names = ("replay_missing", "replay_share")
    assert [odd.routing[n] for n in names] == pytest.approx([absent.routing[n] for n in names], abs=1e-9)
    assert odd.grad_norm == pytest.approx(absent.grad_norm, rel=1e-5)


# -- S7: copies that fill a round ----------------------------------------------------------------------------


def update_of_three(trainer: Trainer, bins: int) -> UpdateResult:
    """Three samples in as many bins as a round has; those left are masked copies of the shortest."""
    packer = Packer(cases.BUDGET, 0, 1, bins, trainer.passes.pack.crossover)
    return trainer.update(packer(cases.samples()[:3]), cases.policy_loss, cases.LR)


def expert_biases(trainer: Trainer) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in trainer.named_hf_tensors() if n.endswith("e_score_correction_bias")}


def test_trainer_inputs_s7_control_copies_leave_the_objective(
    model: Path, start: Callable[..., Trainer]
) -> None:
    one_bin, filled = (update_of_three(start(model), bins) for bins in (1, 8))
    assert filled.loss == pytest.approx(one_bin.loss, rel=1e-5)
    assert filled.grad_norm == pytest.approx(one_bin.grad_norm, rel=1e-4)


def test_trainer_inputs_s7_copies_leave_the_load_figures(model: Path, start: Callable[..., Trainer]) -> None:
    one_bin, filled = (update_of_three(start(model), bins) for bins in (1, 8))
    names = ("expert_load_max", "expert_idle_share")
    assert [filled.routing[n] for n in names] == pytest.approx([one_bin.routing[n] for n in names], abs=1e-9)


def test_trainer_inputs_s7_copies_leave_the_gradient_of_the_balance_loss(
    model: Path, start: Callable[..., Trainer]
) -> None:
    norms = [update_of_three(start(model, trainer={"balance_loss": 0.1}), bins).grad_norm for bins in (1, 8)]
    plain = update_of_three(start(model), 1).grad_norm
    assert norms[0] != pytest.approx(plain, rel=1e-4), "the balance loss has a gradient"
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_trainer_inputs_s7_copies_move_no_experts_bias(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    folder = cases.write_model(tmp_path / "ds", "DeepseekV3ForCausalLM")
    moved = []
    for bins in (1, 8):
        trainer = start(folder, trainer={"balance_rate": 0.01})
        biases_before = expert_biases(trainer)
        update_of_three(trainer, bins)
        moved.append({n: t - biases_before[n] for n, t in expert_biases(trainer).items()})
    assert moved[0] and any(t.any() for t in moved[0].values())
    flip_count = sum(int((moved[1][n].sign() != t.sign()).sum()) for n, t in moved[0].items())
    count = sum(t.numel() for t in moved[0].values())
    assert flip_count == 0, f"{flip_count} of {count} expert biases move another way"


# -- M7: the way back ----------------------------------------------------------------------------------------


def test_trainer_inputs_m7_exporting_needs_disk_space_for_the_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else a checkpoint holds, an optimizer's state above all, is not written."""
    folder = cases.write_model(tmp_path / "model", "Qwen3ForCausalLM")
    weights = (folder / "model.safetensors").stat().st_size
    hf_to_megatron(folder, tmp_path / "megatron", {}, lambda *_: None)
    (tmp_path / "megatron/__1_0.distcp").write_bytes(bytes(8 * weights))
    room = SimpleNamespace(total=weights, used=0, free=2 * weights)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    error = ""
    try:
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back", lambda *_: None)
    except UserError as refusal:
        error = str(refusal)
    assert error == ""
    room.free = weights // 2
    with pytest.raises(UserError, match="the disk has"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "again", lambda *_: None)


# -- M8 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["with a head", "tied"])
def test_trainer_inputs_m8_a_vocabulary_with_one_added_token_is_transformers(
    tied: bool, tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """Log-probs of all tokens, and a folder that comes back bit for bit through a checkpoint of two ranks."""
    folder = cases.write_model(
        tmp_path / "model", "Qwen3ForCausalLM", vocab_size=97, tie_word_embeddings=tied
    )
    trainer = start(folder)
    logprobs = torch.tensor([x for c in trainer.canaries(SEQUENCES) for x in c.logp])
    assert float((logprobs - reference(folder)).abs().max()) < LOGPS
    trainer.update(trainer.passes.pack(cases.samples(97)), cases.policy_loss, cases.LR)
    trainer.export_hf(tmp_path / "exported")
    logprobs = torch.tensor([x for c in trainer.canaries(SEQUENCES) for x in c.logp])
    assert float((logprobs - reference(tmp_path / "exported")).abs().max()) < LOGPS
    trainer.close()
    setup.leave_layout()
    hf_to_megatron(folder, tmp_path / "megatron", {"tp": 2}, lambda *_: None)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", lambda *_: None)
    tensors_before, tensors_after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "back")
    )
    assert tensors_before.keys() == tensors_after.keys()
    assert all(torch.equal(tensors_before[name], tensor) for name, tensor in tensors_after.items())


# -- M2, M6 --------------------------------------------------------------------------------------------------


def test_trainer_inputs_m2_a_folder_with_a_nan_is_bit_equal_to_itself(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    (tmp_path / "nan").mkdir()
    save_file(tensors, tmp_path / "nan/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "nan/config.json").write_bytes((model / "config.json").read_bytes())
    error = ""
    try:
        verify(tmp_path / "nan", tmp_path / "nan", lambda *_: None)
    except RunError as difference:
        error = str(difference)
    assert error == ""


def test_trainer_inputs_m6_an_update_without_trained_tokens_changes_no_weights(
    model: Path, start: Callable[..., Trainer]
) -> None:
    """As `rlsys sft` calls it with traces of one's own."""

    def nll(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return micro.masked(-scores.logp).sum(), {}

    trainer = start(model)
    sums_before = cases.weight_sums(trainer)
    masked = TrainSample([1, 2], [3, 4, 5], [-1.0] * 3, [0] * 3, 0, trained=[0, 0, 0])
    try:
        trainer.update(trainer.passes.pack([masked]), nll, 1e-3)
    except (UserError, RunError):
        pass
    except ZeroDivisionError as fault:
        raise AssertionError(f"ZeroDivisionError: {fault}") from None
    assert cases.weight_sums(trainer) == sums_before
