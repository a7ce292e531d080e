"""A train step on compared answers: DPO and variants, KTO, reward models (rlsys/algo/sft/preferences.py).

    score     every answer's log-prob, or value, under the current weights and, if needed, the initial ones
    loss      the loss of all answers, and its derivative by each of these numbers
    update    a backward pass with these derivatives as weights of the answers

So a loss uses the whole update for any division into micro-batches and ranks, and the answers of a pair may be on
different ranks. The cost is one forward pass. Shapes: S answers of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlsys.algo.reduction import table_sum
from rlsys.algo.sft.preferences import Answers, Preference
from rlsys.core.errors import UserError
from rlsys.data.trace import Trace
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer


def preference_step(
    trainer: Trainer, loss: Preference, traces: Sequence[Trace], lr: float
) -> dict[str, object]:
    """Run one optimizer update and return its metrics. Collective.

    Raises:
        UserError: the traces cannot be compared.
    """
    check_rows(loss, traces)
    uses_values = "values" in loss.needs()
    rows = [_sample(trace, i, uses_values) for i, trace in enumerate(traces)]
    batch = trainer.passes.pack(rows)
    # Each prompt with the answer of the row before it.
    mismatched_rows = [replace(rows[i - 1], prompt_ids=row.prompt_ids, row=i) for i, row in enumerate(rows)]

    def score_answers(batch: list[MicroBatch]) -> Tensor:
        """Return the score of each answer, `[S]` float64, on every rank."""
        scores = trainer.passes.score(batch)
        sums = [m.per_sequence(_token_scores(s, uses_values)) for m, s in zip(batch, scores, strict=True)]
        # A bin without answers is a masked copy: it adds 0 to the row.
        return table_sum(sums, [m.rows for m in batch], len(rows), trainer.passes.sum_over_dp).cpu()

    answer_scores = score_answers(batch).requires_grad_()
    mismatched = trainer.passes.pack(mismatched_rows) if loss.mismatched else []
    drift = score_answers(mismatched) if mismatched else None
    ref = None
    if "ref" in loss.needs():
        with trainer.without_replay(), trainer.with_weights(trainer.first_weights):
            ref = score_answers(batch)
            drift = None if drift is None else drift - score_answers(mismatched)
    answers = Answers(
        logp=answer_scores,
        tokens=torch.tensor([sum(t.trained or [True] * len(t.response_ids)) for t in traces]),
        pair=torch.tensor([t.pair for t in traces]),
        liked=torch.tensor([t.liked for t in traces]),
        margin=torch.tensor([t.margin for t in traces], dtype=torch.float64),
        ref=ref,
        drift=drift,
        value=answer_scores if uses_values else None,
    )
    total = loss(answers)
    (weights,) = torch.autograd.grad(total, answer_scores)

    def weighted(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return (micro.expand(weights) * micro.masked(_token_scores(scores, uses_values))).sum(), {}

    result = trainer.update(batch, weighted, lr, denominator=1.0)
    return {
        "loss": float(total.detach()),
        "grad_norm": result.grad_norm,
        "skipped_updates": int(result.skipped),
        "padding_share": result.padding_share,
        "shared_share": result.shared_share,
        **_figures(loss, answers),
        **result.prediction,
    }


def check_rows(loss: Preference, traces: Sequence[Trace]) -> None:
    """Check that the loss can compare the traces of an update.

    Raises:
        UserError: the loss needs pairs, or more answers.
    """
    if loss.rows == "pairs":
        for liked in (True, False):
            numbers = [t.pair for t in traces if t.liked is liked]
            if sorted(numbers) != sorted({t.pair for t in traces}) or -1 in numbers:
                raise UserError(
                    "sft.loss compares two answers to each prompt, which sft.traces does not provide; use "
                    "sft.traces = pairs"
                )
    if loss.mismatched and len(traces) < 2:
        raise UserError("sft.loss scores answers on other prompts: expected sft.params.batch of 2 or more")


def _sample(trace: Trace, row: int, uses_values: bool) -> TrainSample:
    """Return the train sample of a trace.

    A value is read at the next token, so a sample for values has one more token.
    """
    response, trained = trace.response_ids, trace.trained
    if uses_values:
        response, trained = [*response, response[-1]], [False] * len(response) + [True]
    n = len(response)
    return TrainSample(trace.prompt_ids, response, [0.0] * n, [0] * n, row, trained)


def _token_scores(scores: Scores, uses_values: bool) -> Tensor:
    if not uses_values:
        return scores.logp
    assert scores.values is not None
    return scores.values


def _figures(loss: Preference, answers: Answers) -> dict[str, object]:
    rewards = loss.rewards(answers)
    good, bad = rewards[answers.liked], rewards[~answers.liked]
    figures: dict[str, object] = {
        f"reward_{name}": float(part.mean())
        for name, part in (("chosen", good), ("rejected", bad))
        if len(part)
    }
    if loss.rows == "pairs":
        lead = answers.select_chosen(rewards) - answers.select_rejected(rewards)
        figures |= {"reward_lead": float(lead.mean()), "pairs_right": float((lead > 0).double().mean())}
    return figures
