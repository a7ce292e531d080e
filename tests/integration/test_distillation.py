"""A frozen teacher of another architecture: divergence and gradient are those of transformers; the policy comes near
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.convert.layout import to_hf
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.planner.model_preflight import check_model
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.teacher import Teachers, add_teacher
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Policy and teacher."""
    folder = tmp_path_factory.mktemp("distillation")
    return cases.write_model(folder / "policy", "Qwen3ForCausalLM"), cases.write_model(
        folder / "teacher", "DeepseekV3ForCausalLM"
    )


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    open_ones: list[Trainer] = []
    yield open_ones
    for trainer in open_ones:
        trainer.close()


def start(
    folders: tuple[Path, Path], run: Path, open_ones: list[Trainer], loss: str = "distill", **teacher: Any
) -> Trainer:
    policy, teacher_folder = folders
    algo = {"loss": [loss], "teacher": {"path": teacher_folder, **teacher}}
    rollout = {"temperature": TEMPERATURE, "max_response_tokens": 64}
    trainer = Trainer(cases.config_of(policy, run, algo=algo, rollout=rollout, trainer={"grad_clip": 1e9}))
    open_ones.append(trainer)
    add_teacher(trainer)
    return trainer


def distance(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    assert scores.divergence is not None
    return micro.masked(scores.divergence).sum(), {}


def update(trainer: Trainer, lr: float = 1e-30) -> float:
    """The mean divergence over the response tokens."""
    batch = trainer.passes.pack(cases.samples())
    assert isinstance(trainer.teacher, Teachers)
    trainer.teacher.score([batch])
    return trainer.update(batch, distance, lr).loss


def log_softmax(model: Any, ids: list[int]) -> Tensor:
    return (model(torch.tensor([ids])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)


def expected(
    folders: tuple[Path, Path], top_k: int | None, direction: float
) -> tuple[float, dict[str, Tensor]]:
    """By transformers, the definition of KL, and autograd."""
    import transformers

    policy, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders
    )
    total, tokens = torch.zeros(()), 0
    for sample in cases.samples():
        ids = [*map(int, sample.prompt_ids), *map(int, sample.response_ids)]
        p = log_softmax(policy, ids)[len(sample.prompt_ids) - 1 :].exp()
        with torch.no_grad():
            q = log_softmax(teacher, ids)[len(sample.prompt_ids) - 1 :].exp()
        if top_k is not None:
            best = q.topk(top_k).indices
            p, q = (
                torch.cat([x.gather(1, best), 1 - x.gather(1, best).sum(1, keepdim=True)], 1) for x in (p, q)
            )
        m = (1 - direction) * p + direction * q
        if direction == 1:
            divergence = p * (p / q).log()
        elif direction == 0:
            divergence = q * (q / p).log()
        else:
            divergence = direction * q * (q / m).log() + (1 - direction) * p * (p / m).log()
        total, tokens = total + divergence.sum(), tokens + len(divergence)
    (total / tokens).backward()
    return float(total / tokens), {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize(
    ("top_k", "direction"), [(None, 1.0), (None, 0.0), (5, 1.0), (5, 0.0), (96, 0.3), (5, 0.3)]
)
def test_divergence_and_gradient_are_those_of_transformers(
    top_k: int | None, direction: float, folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    trainer = start(folders, tmp_path / "run", trainers, top_k=top_k, direction=direction)
    loss, gradients = expected(folders, None if top_k == 96 else top_k, direction)
    assert update(trainer) == pytest.approx(loss, abs=2e-6, rel=1e-5)
    parameters: dict[str, Any] = dict(trainer.named_parameters())
    for entry in entries(trainer.hf):
        gradient = parameters[entry.megatron.format(e=entry.expert)].main_grad
        for key, part in zip(entry.hf, to_hf(entry.rule, gradient, trainer.hf), strict=True):
            assert torch.allclose(part, gradients[key], rtol=1e-4, atol=5e-6), key


def test_without_a_rest_value_and_gradient_are_those_of_transformers(
    folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    """verl's forward_kl_topk: clamped log-probs of the teacher's tokens alone."""
    trainer = start(
        folders, tmp_path / "run", trainers, top_k=5, direction=0.0, tail_bucket=False, least_logprob=-6.0
    )
    log_p, log_q = both_log_softmax(folders)
    best = log_q.topk(5).indices
    p, q = (x.gather(1, best).clamp(min=-6.0) for x in (log_p, log_q))
    divergence = (q.exp() * (q - p)).sum(1).clamp(min=0)
    assert update(trainer) == pytest.approx(float(divergence.mean()), abs=2e-6, rel=1e-5)


def test_divergence_at_the_sampled_token_matches_transformers(
    folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    """Its divergence is log(policy / teacher) at the sampled token, whose gradient distill_pg does not take."""
    trainer = start(folders, tmp_path / "run", trainers, loss="distill_pg", top_k=0)
    ids = torch.cat([torch.tensor(list(map(int, s.response_ids))) for s in cases.samples()])
    log_p, log_q = (x.gather(1, ids[:, None])[:, 0] for x in both_log_softmax(folders))
    assert update(trainer) == pytest.approx(float((log_p - log_q).mean()), abs=2e-6, rel=1e-5)


def both_log_softmax(folders: tuple[Path, Path]) -> tuple[Tensor, Tensor]:
    """Log-probs of policy and teacher at all response tokens, `[tokens, vocabulary]`, by transformers."""
    import transformers

    models = [transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders]
    rows: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for sample in cases.samples():
            ids = [*map(int, sample.prompt_ids), *map(int, sample.response_ids)]
            for model, model_rows in zip(models, rows, strict=True):
                model_rows.append(log_softmax(model, ids)[len(sample.prompt_ids) - 1 :])
    policy, teacher = (torch.cat(model_rows) for model_rows in rows)
    return policy, teacher


def test_distillation_reduces_the_divergence_tenfold(
    folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    trainer = start(folders, tmp_path / "run", trainers, top_k=16)
    first = update(trainer, 3e-3)
    for _ in range(60):
        last = update(trainer, 3e-3)
    assert last < first / 10, (first, last)


def test_another_vocabulary_is_one_line(
    folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    teacher_folder = cases.write_model(tmp_path / "teacher", "Qwen3ForCausalLM", vocab_size=64)
    with pytest.raises(UserError, match=r"its vocabulary has 64 tokens; expected 96, as the policy's"):
        start((folders[0], teacher_folder), tmp_path / "run", trainers)


def test_a_missing_teacher_is_reported_before_startup(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def config_of(teacher: Path) -> Any:
        algo = {"loss": ["distill"], "teacher": {"path": teacher}}
        return cases.config_of(folders[0], tmp_path / "run", algo=algo)

    (folders[0] / "tokenizer.json").write_text("{}")
    check_model(config_of(folders[1]))
    with pytest.raises(UserError, match=r"^algo.teacher.path = .*: no such folder$"):
        check_model(config_of(tmp_path / "none"))


def test_each_sample_has_the_teacher_of_its_prompts_source(
    folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    """Two models under three names; every token's opinion is that of one of them alone."""
    second = cases.write_model(tmp_path / "second", "Qwen3MoeForCausalLM")
    trainer = start(
        folders, tmp_path / "run", trainers, by_source={"code": second, "sums": folders[1], "chess": second}
    )
    teachers = trainer.teacher
    assert isinstance(teachers, Teachers) and len(teachers.models) == 2
    sources = ["maths", "code", "sums", "chess", "", "code", "maths", "maths", "chess", "sums"]
    teacher_indices = [teachers.index_of(source) for source in sources]
    assert teacher_indices == [0, 1, 0, 1, 0, 1, 0, 0, 1, 0]
    batch = trainer.passes.pack(cases.samples())
    for micro in batch:
        micro.teachers = torch.tensor(teacher_indices, dtype=torch.float32)
    teacher_scores = [list(model.score(batch)) for model in teachers.models]
    teachers.score([batch])
    used_indices = set()
    for i, micro in enumerate(batch):
        of_token = micro.expand(micro.teachers).long().tolist()
        used_indices.update(of_token)
        for t, teacher_index in enumerate(of_token):
            expected_scores = teacher_scores[teacher_index][i]
            assert micro.teacher_logp is not None and micro.teacher_ids is not None
            assert expected_scores.logprobs is not None and expected_scores.ids is not None
            assert torch.equal(micro.teacher_logp[t], expected_scores.logprobs[t]) and torch.equal(
                micro.teacher_ids[t], expected_scores.ids[t]
            )
    assert used_indices == {0, 1}


def test_a_further_teacher_with_another_vocabulary_is_named(
    folders: tuple[Path, Path], tmp_path: Path, trainers: list[Trainer]
) -> None:
    teacher_folder = cases.write_model(tmp_path / "other", "Qwen3ForCausalLM", vocab_size=64)
    with pytest.raises(UserError, match=r"algo.teacher.by_source.code = .* has 64 tokens; expected 96"):
        start(folders, tmp_path / "run", trainers, by_source={"code": teacher_folder})
