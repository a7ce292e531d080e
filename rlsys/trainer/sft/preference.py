"""A train step on compared answers: DPO and variants, KTO, reward models (rlsys/algo/sft/preferences.py).

    score     log-prob or value of every answer under the current weights and, if needed, the initial weights
    loss      loss of all answers, and its derivative with respect to each of these scores
    update    backward pass with these derivatives as weights of the answers

The loss therefore does not depend on the division into micro-batches and ranks, and the answers of a pair may be on
different ranks. This costs an additional forward pass. Shapes: S answers of the update.
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

    Args:
        trainer: The trainer of the policy or the reward model.
        loss: Loss of the answers.
        traces: The answers of the update, equal on every rank.
        lr: Learning rate.

    Raises:
        UserError: The loss cannot compare the traces.
    """
    check_rows(loss, traces)
    uses_values = "values" in loss.needs()
    batch = trainer.passes.pack([_sample(trace, i, uses_values) for i, trace in enumerate(traces)])
    answers = _score(trainer, loss, traces, batch)
    total = loss(answers)
    (weights,) = torch.autograd.grad(total, answers.logp)

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


def _score(trainer: Trainer, loss: Preference, traces: Sequence[Trace], batch: list[MicroBatch]) -> Answers:
    """Score the answers under the current weights and, if the loss needs them, under the initial weights.

    `logp` of the result is a leaf that requires a gradient; it contains values if the loss needs values.
    """
    uses_values = "values" in loss.needs()

    def score_answers(batch: list[MicroBatch]) -> Tensor:
        """Return the score of each answer, `[S]` float64, on every rank."""
        scores = trainer.passes.score(batch)
        sums = [m.per_sequence(_token_scores(s, uses_values)) for m, s in zip(batch, scores, strict=True)]
        # A masked copy adds 0 to the score of its answer.
        return table_sum(sums, [m.rows for m in batch], len(traces), trainer.passes.sum_over_dp).cpu()

    answer_scores = score_answers(batch).requires_grad_()
    mismatched = trainer.passes.pack(_mismatched_samples(traces, uses_values)) if loss.mismatched else []
    drift = score_answers(mismatched) if mismatched else None
    ref = None
    if "ref" in loss.needs():
        with trainer.without_replay(), trainer.with_weights(trainer.first_weights):
            ref = score_answers(batch)
            drift = None if drift is None else drift - score_answers(mismatched)
    return Answers(
        logp=answer_scores,
        tokens=torch.tensor([sum(t.trained or [True] * len(t.response_ids)) for t in traces]),
        pair=torch.tensor([t.pair for t in traces]),
        liked=torch.tensor([t.liked for t in traces]),
        margin=torch.tensor([t.margin for t in traces], dtype=torch.float64),
        ref=ref,
        drift=drift,
        value=answer_scores if uses_values else None,
    )


def _mismatched_samples(traces: Sequence[Trace], uses_values: bool) -> list[TrainSample]:
    """Combine each prompt with the answer of the trace before it."""
    samples = [_sample(trace, i, uses_values) for i, trace in enumerate(traces)]
    return [replace(samples[i - 1], prompt_ids=sample.prompt_ids, row=i) for i, sample in enumerate(samples)]


def check_rows(loss: Preference, traces: Sequence[Trace]) -> None:
    """Check that the loss can compare the traces of an update.

    Raises:
        UserError: The loss needs pairs, which the traces are not, or more than one trace.
    """
    if loss.rows == "pairs":
        # Each pair consists of one liked and one other answer. A trace without a pair has the number -1.
        for liked in (True, False):
            pairs = [t.pair for t in traces if t.liked is liked]
            if sorted(pairs) != sorted({t.pair for t in traces}) or -1 in pairs:
                raise UserError(
                    "sft.loss compares two answers to each prompt, which sft.traces does not provide; use "
                    "sft.traces = pairs"
                )
    if loss.mismatched and len(traces) < 2:
        raise UserError(
            f"sft.params.batch = {len(traces)}: expected at least 2, because sft.loss also scores each answer on the "
            "prompt of another one"
        )


def _sample(trace: Trace, row: int, uses_values: bool) -> TrainSample:
    """Return the train sample of a trace.

    A sample for values repeats its last token, because the value of a prefix is read at the token after it.
    """
    response, trained = trace.response_ids, trace.trained
    if uses_values:
        response, trained = [*response, response[-1]], [False] * len(response) + [True]
    n = len(response)
    return TrainSample(trace.prompt_ids, response, [0.0] * n, [0] * n, row, trained)


def _token_scores(scores: Scores, uses_values: bool) -> Tensor:
    """Return the tokens' values or log-probs, `[T]`."""
    if not uses_values:
        return scores.logp
    assert scores.values is not None
    return scores.values


def _figures(loss: Preference, answers: Answers) -> dict[str, object]:
    """Return the metrics of the implicit rewards."""
    rewards = loss.rewards(answers)
    figures: dict[str, object] = {}
    for name, rows in (("chosen", answers.liked), ("rejected", ~answers.liked)):
        if rows.any():
            figures[f"reward_{name}"] = float(rewards[rows].mean())
    if loss.rows == "pairs":
        lead = answers.select_chosen(rewards) - answers.select_rejected(rewards)
        figures |= {"reward_lead": float(lead.mean()), "pairs_right": float((lead > 0).double().mean())}
    return figures
