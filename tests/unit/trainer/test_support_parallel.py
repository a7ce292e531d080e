"""Log-probs, entropies and gradients among the ids that sampling had kept: on one rank and on two that share the
vocabulary, against a softmax over these ids alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from rlsys.config.algo import TeacherSection
from rlsys.segments import support
from rlsys.trainer.logprobs import align_to_tokens
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.pack import TrainSample, pack
from tests.helpers.gloo_ranks import on_gloo_ranks

VOCABULARY, TEMPERATURE = 12, 1.7
RESPONSES = [[5, 6, 11], [0, 7], [3, 3, 4, 9]]
KEPT = [[[5, 0, 11], [6], [11, 10, 1, 2]], None, [[3, 9], list(range(12)), [4, 0], [9, 8]]]
"""Of the tokens of each response; None: all were kept."""


def samples() -> list[TrainSample]:
    out = []
    for row, (ids, kept_ids) in enumerate(zip(RESPONSES, KEPT, strict=True)):
        encoded = b"" if kept_ids is None else support.encode(kept_ids, ids)
        out.append(TrainSample([1, 2], ids, [0.0] * len(ids), [0] * len(ids), row, support=encoded))
    return out


def logits_of(tokens: int) -> Tensor:
    return torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2


def expected(share: Share, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By the definition: log-prob, entropy, sum of squares of each token, and the gradient of their weighed sum."""
    logits = logits.clone().requires_grad_()
    allowed = torch.ones(len(logits), VOCABULARY, dtype=torch.bool)
    assert share.support_at is not None
    assert share.support_ids is not None
    allowed[share.support_at] = False
    allowed[share.support_at, share.support_ids] = True
    logp = (logits / TEMPERATURE).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    probs = logp.exp()
    entropy = -(probs * logp.masked_fill(~allowed, 0.0)).sum(-1)
    chosen = align_to_tokens(share, logp[torch.arange(len(logits)), share.following])
    spread = align_to_tokens(share, entropy)
    loss(chosen, spread).backward()
    assert logits.grad is not None
    return chosen.detach(), spread.detach(), align_to_tokens(share, (probs**2).sum(-1)).detach(), logits.grad


def loss(logp: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.arange(1, len(logp) + 1).float()
    return (weights * logp).sum() + (weights.flip(0) * entropy).sum()


def gap_on(ranks: int, rank: int) -> float:
    """The largest difference of all figures, of one rank."""
    from megatron.core import parallel_state

    from rlsys.trainer.logprobs import token_scores

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    (batch,) = pack(samples(), 100)
    process_group = dist.new_group([rank], use_local_synchronization=True)
    share = Share.of(batch, 4, process_group, torch.device("cpu"))
    logits = logits_of(len(share.tokens))
    chosen, spread, squares, gradient = expected(share, batch.tokens, logits)
    columns = VOCABULARY // ranks
    vocab_slice = slice(rank * columns, (rank + 1) * columns)
    leaf = logits[:, vocab_slice].clone().requires_grad_()
    parts = [
        token_scores((leaf * 1.0)[rows], share.targets(rows), TEMPERATURE, entropy=True, squares=True)
        for rows in (slice(0, 5), slice(5, len(leaf)))
    ]
    logp, entropy, squared = (
        align_to_tokens(share, torch.cat([part[name] for part in parts]))
        for name in ("logp", "entropy", "sum_pi_squared")
    )
    loss(logp, entropy).backward()
    every = slice(0, len(leaf))
    plain = token_scores(
        logits[:, vocab_slice].clone(), share.targets(every), TEMPERATURE, entropy=False, squares=False
    )
    assert leaf.grad is not None
    pairs = [
        (logp, chosen), (entropy, spread), (squared, squares), (align_to_tokens(share, plain["logp"]), chosen),
        (leaf.grad, gradient[:, vocab_slice]),
    ]  # fmt: skip
    max_error = max(float(((a.detach() - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)
    parallel_state.destroy_model_parallel()
    return max_error


@pytest.mark.gate
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_entropies_and_gradients_use_only_the_kept_ids(ranks: int, tmp_path: Path) -> None:
    gaps = on_gloo_ranks(ranks, gap_on, tmp_path)
    print(f"{ranks} ranks: largest difference {max(gaps):.1e}")
    assert max(gaps) < 1e-6


def row_gap_on(ranks: int, rank: int) -> float:
    """Return the largest difference of scores and gradients by rows from those of all tokens at once."""
    from megatron.core import parallel_state

    from rlsys.trainer.logprobs import _candidate_scores, token_scores

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    (batch,) = pack(samples(), 100)
    tokens, generator = len(batch.tokens), torch.Generator().manual_seed(4)
    batch.teacher_ids = torch.stack(
        [torch.randperm(VOCABULARY, generator=generator)[:4] for _ in range(tokens)]
    )
    batch.teacher_logp = torch.randn(tokens, 4, generator=generator).log_softmax(-1) - 0.1
    share = Share.of(batch, 4, dist.new_group([rank], use_local_synchronization=True), torch.device("cpu"))
    columns = VOCABULARY // ranks
    rank_logits = logits_of(len(share.tokens))[:, rank * columns : (rank + 1) * columns]
    gaps = []
    for score in (
        lambda logits, targets: token_scores(
            logits,
            targets,
            TEMPERATURE,
            entropy=True,
            squares=False,
            teacher=TeacherSection.model_validate({"path": "x", "direction": 0.5}),
        ),
        lambda logits, targets: _candidate_scores(logits, targets, TEMPERATURE, 0.7),
    ):
        results = []
        for cuts in ([len(rank_logits)], [1, 6, len(rank_logits)]):
            leaf = rank_logits.clone().requires_grad_()
            rows = [slice(a, b) for a, b in zip([0, *cuts], cuts, strict=False)]
            parts = [score((leaf * 1.0)[part], share.targets(part)) for part in rows]
            scores = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            weights = torch.arange(1, len(rank_logits) + 1).float()
            sum((weights * s).sum() for s in scores.values() if s.requires_grad).backward()  # type: ignore[union-attr]
            results.append([*(s.detach() for s in scores.values()), leaf.grad])
        gaps += [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]  # type: ignore[operator]
    parallel_state.destroy_model_parallel()
    return max(gaps)


@pytest.mark.gate
@pytest.mark.parametrize("ranks", [1, 2])
def test_distillation_and_candidates_are_scored_by_rows(ranks: int, tmp_path: Path) -> None:
    assert max(on_gloo_ranks(ranks, row_gap_on, tmp_path)) < 1e-6
