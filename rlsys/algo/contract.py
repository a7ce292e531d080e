"""Contract test of a user's plug-in: `rlsys algo check`.

The test checks that
- the plug-in can be built from its parameters;
- its results on a synthetic step are finite and reproducible, and do not depend on the division of an update into
  micro-batches;
- its state can be stored as JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import torch
from torch import Tensor

from rlsys.algo.objective import Objective
from rlsys.algo.plugin import Plugin, evidence_of
from rlsys.algo.preflight import check
from rlsys.algo.registry import KINDS, SECTION_KINDS, TABLE, build, load
from rlsys.algo.sft.imitation import Imitation, Tokens
from rlsys.algo.sft.preferences import Answers, Preference
from rlsys.algo.trial import Outcome, made_up_groups, made_up_step, try_objective
from rlsys.config import Config
from rlsys.config.algo import Spec
from rlsys.core.errors import UserError

PIECES = (1, 2, 5, 1000)
"""Numbers of micro-batches of an update that are compared. The last one exceeds the number of sequences, so each
micro-batch has one sequence."""
TOLERANCE = 1e-9
"""Largest difference in float64, relative to the largest compared number. Sums in another order differ by about
1e-15."""


def check_kind(kind: str) -> str:
    """Return `kind`, the value of --kind.

    Raises:
        UserError: there is no such kind of plug-in.
    """
    if kind not in KINDS:
        similar_kinds = difflib.get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.5)
        hint = f"did you mean {similar_kinds[0]}?" if similar_kinds else f"known: {', '.join(KINDS)}"
        raise UserError(f"--kind {kind}: unknown kind of plug-in; {hint}")
    return kind


def kind_of(name: str) -> str:
    """Return the kind of the plug-in with this short name or import path.

    Raises:
        UserError: several kinds have the short name, or the path names a function, which has no kind.
    """
    kinds = [kind for kind, names in TABLE.items() if name in names]
    if len(kinds) > 1:
        raise UserError(
            f"{name} is the name of several plug-ins: select one with --kind, one of {', '.join(kinds)}"
        )
    if kinds:
        return kinds[0]
    plugin = load("rlsys algo check", name)
    for kind, (base, _) in KINDS.items():
        if isinstance(plugin, type) and issubclass(plugin, load(kind, base)):
            return kind
    raise UserError(
        f"{name} is a function without a kind: set its kind with --kind, one of {', '.join(KINDS)}"
    )


def check_promises(config: Config, kind: str, name: str) -> Iterator[str]:
    """Check the contract of a plug-in; yield one line for each property that holds.

    Args:
        config: config of a run that uses the plug-in. If its section `algo` does not name the plug-in, the plug-in is
            added with its default parameters.
        kind: kind of the plug-in.
        name: its short name or import path.

    Raises:
        UserError: a property does not hold.
    """
    if kind == "imitation":
        yield from _check_imitation(name)
    elif kind == "preference":
        yield from _check_preference(name)
    else:
        yield from _check_algorithm(config, kind, name)


def _check_algorithm(config: Config, kind: str, name: str) -> Iterator[str]:
    """Check a plug-in of the section `algo`; see check_promises."""
    config, spec = with_plugin(config, kind, name)
    plugin: Plugin = build(kind, name, **spec.params)
    yield _describe_plugin(kind, name, plugin)
    check(config)
    try_objective(config)
    yield "runs on a made-up step: loss and gradients are finite, and its state can be stored as JSON"
    if kind in ("prompt", "planner", "group_reward"):
        return
    groups = made_up_groups(config, ())
    reference, repeated, *divided = (
        made_up_step(Objective(config.algo), groups, pieces) for pieces in (PIECES[0], *PIECES)
    )
    _compare(
        reference,
        repeated,
        f"{name} gives different results for the same step; expected no random numbers of its own",
    )
    yield "the same step gives the same numbers"
    for pieces, outcome in zip(PIECES[1:], divided, strict=True):
        division = f"cut into {pieces} micro-batches" if pieces < PIECES[-1] else "cut into single sequences"
        advice = "compute quantities of all tokens of an update in `prepare`, with its `reduce`"
        _compare(reference, outcome, f"{name} gives another result if an update is {division}: {advice}")
    yield "an update cut into 2 or 5 micro-batches, or into single sequences, gives the same numbers"


def _describe_plugin(kind: str, name: str, plugin: Plugin) -> str:
    """Return a line with the kind, the name, the evidence and the summary of a plug-in."""
    doc_lines = (plugin.__doc__ or "").strip().splitlines()
    summary = doc_lines[0] if doc_lines else "it has no docstring"
    return f"made: {kind} {name}, evidence {evidence_of(type(plugin))}: {summary}"


def _check_imitation(name: str) -> Iterator[str]:
    """Check an imitation loss; see check_promises."""
    loss_fn: Imitation = build("imitation", name)
    yield _describe_plugin("imitation", name, loss_fn)
    loss, gradient = _imitation_loss(name, loss_fn, torch.arange(8))
    if not (loss.isfinite().all() and gradient.isfinite().all() and gradient.any()):
        raise UserError(
            f"{name}: for made-up tokens the losses are {loss.tolist()}, the gradient {gradient.tolist()}; expected "
            "finite numbers, and a gradient other than 0"
        )
    yield "runs on made-up tokens: losses and gradient are finite, and the gradient is not 0"
    order = torch.tensor([6, 1, 4, 3, 0, 7, 2, 5])
    reordered_loss, reordered_gradient = _imitation_loss(name, loss_fn, order)
    if not _close(loss[order], reordered_loss) or not _close(gradient[order], reordered_gradient):
        raise UserError(
            f"{name}: a token's loss depends on the other tokens of its batch; expected a function of the token alone"
        )
    yield "a token's loss does not depend on other tokens"


def _imitation_loss(name: str, loss_fn: Imitation, order: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses of eight synthetic tokens in this order, and their gradient, `[8]` each.

    Raises:
        UserError: the losses have another shape.
    """
    g = torch.Generator().manual_seed(0)
    logp, chance, expected = -torch.rand(3, 8, generator=g, dtype=torch.float64) * 5
    leaf = logp[order].requires_grad_()
    losses = loss_fn(Tokens(leaf, chance[order].exp(), expected[order]))
    if losses.shape != leaf.shape:
        raise UserError(
            f"{name} returns losses of shape {list(losses.shape)} for 8 tokens; expected one loss per token"
        )
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def _check_preference(name: str) -> Iterator[str]:
    """Check a preference loss; see check_promises."""
    loss_fn: Preference = build("preference", name)
    yield _describe_plugin("preference", name, loss_fn)
    loss, gradient = _preference_loss(loss_fn, torch.arange(8))
    if not (loss.isfinite() and gradient.isfinite().all() and gradient.any()):
        raise UserError(
            f"{name}: for made-up answers the loss is {float(loss):.4g}, its gradient {gradient.tolist()}; expected "
            "finite numbers, and a gradient other than 0"
        )
    yield "runs on made-up answers: loss and gradient are finite, and the gradient is not 0"
    for order in (torch.arange(8), torch.tensor([6, 1, 4, 3, 0, 7, 2, 5])):
        reordered_loss, reordered_gradient = _preference_loss(loss_fn, order)
        if not _close(loss, reordered_loss) or not _close(gradient[order], reordered_gradient):
            raise UserError(
                f"{name} gives another result if the answers are reordered to {order.tolist()}; expected no change"
            )
    yield "the same answers give the same numbers in any order"


def _preference_loss(loss: Preference, order: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss of the eight answers of four synthetic pairs in this order, and its gradient, `[8]`."""
    g = torch.Generator().manual_seed(0)
    logp, ref, drift, value = -torch.rand(4, 8, generator=g, dtype=torch.float64)[:, order] * 5
    leaf = (value if "values" in loss.needs() else logp).requires_grad_()
    rows = torch.arange(8)[order]
    total = loss(Answers(logp, rows + 2, rows // 2, rows % 2 == 0, torch.zeros(8), ref, drift, value))
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


def with_plugin(config: Config, kind: str, name: str) -> tuple[Config, Spec]:
    """Return the config with this plug-in in the field of its kind, and the plug-in's entry.

    If the config already has the plug-in, it is returned as it is.
    """
    field = next(field for field, field_kind in SECTION_KINDS.items() if field_kind == kind)
    value = getattr(config.algo, field)
    for spec in value if isinstance(value, list) else [] if value is None else [value]:
        if spec.name == name:
            return config, spec
    trains_policy = kind != "loss" or getattr(load(kind, TABLE[kind].get(name, name)), "policy", True)
    data = config.model_dump(mode="json")
    names = [name] if trains_policy else ["clip", name]
    data["algo"][field] = [{"name": n} for n in names] if isinstance(value, list) else {"name": name}
    return Config.model_validate(data), Spec(name=name)


def _compare(expected: Outcome, outcome: Outcome, message: str) -> None:
    """Check that two outcomes are equal up to TOLERANCE.

    Raises:
        UserError: they differ; the text is `message` with the first difference.
    """
    if expected.metrics.keys() != outcome.metrics.keys():
        raise UserError(
            f"{message} (names of metrics: {sorted(expected.metrics.keys() ^ outcome.metrics.keys())})"
        )
    if expected.gradients.keys() != outcome.gradients.keys():
        raise UserError(
            f"{message} (trained samples: {sorted(expected.gradients.keys() ^ outcome.gradients.keys())})"
        )
    for row, gradient in expected.gradients.items():
        if not _close(gradient, outcome.gradients[row]):
            raise UserError(f"{message} (the gradient of sample {row})")
    for name, value in expected.metrics.items():
        if not _close(torch.tensor(value), torch.tensor(outcome.metrics[name])):
            raise UserError(f"{message} ({name} = {value:.10g} and {outcome.metrics[name]:.10g})")


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, and values that are equal up to TOLERANCE."""
    scale = float(torch.maximum(a.abs().max(), b.abs().max())) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
