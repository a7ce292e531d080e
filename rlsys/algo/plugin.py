"""Base class of all plug-ins: typed parameters, needs, state. No torch.

A plug-in is a class whose fields are its parameters, and which is called. It may keep state in private attributes;
`state_dict` then returns it as plain JSON values for the checkpoint, and `observe` receives an update's metrics.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rlsys.config.section import Section
from rlsys.core.errors import UserError

NEEDS: dict[str, str] = {
    "old": "the trainer's log-probs at the start of the step (one forward pass)",
    "current": "the trainer's log-probs at the start of the optimizer update (a pass from the second update on)",
    "behaviour": "the trainer's log-probs under the weights that sampled the token (stored at each interruption)",
    "ewma": "log-probs of the averaged weights (one forward pass with swapped weights)",
    "ref": "log-probs of a frozen reference model (one forward pass of it)",
    "entropy": "the entropy of the trainer's distribution at each token",
    "divergence": "how far the policy's distribution at each token is from a teacher's (a forward pass of it)",
    "sum_pi_squared": "the sum of the squared probabilities at each token",
    "values": "predictions of a critic at each token, with gradient in the loss",
    "prompt_index": "a stable number of the prompt, the same each time it is drawn",
    "answers": "the final answer of each response, in one form",
    "verdicts": "a judge's verdict on each correct response",
    "tool_penalty": "how untidy each response with tools is: failed calls, too many answers or none",
    "turn_rewards": "what each turn is worth: rollout.generator: environment says it, or data.reward as turn_rewards",
    "transferred": "which samples were drawn from a rewritten prompt",
    "forks": "which sample of its group a response branches off, and where",
    "guidance": "what a judge makes of failed responses: a hint for the prompt",
    "repairs": "where a response goes wrong first, and what is right there",
    "probes": "rewards of answers that engines of a pool with role explore give to the prompt",
    "prompt_scores": "how far policy and reference disagree on each prompt token",
}
"""Signals that a plug-in may request beyond rewards, groups, lengths, `mu` and weight versions."""


REWARD_TOLERANCE = 1e-6
"""Rewards of a group that differ by at most this share of its largest are equal: float32 holds seven digits, and an
estimator that divides by a deviation makes as much of the last of them as of a success."""

EVIDENCE: dict[str, str] = {
    "R": "read in the authors' code, or in that of the framework where the method is from",
    "F": "read in a framework's code; the authors' was not seen",
    "P": "read in the paper's text or a formula-level note of it",
    "N": "from a second-hand note; defaults unconfirmed",
    "A": "a reading of the abstract",
    "own": "ours",
}
"""Source of a plug-in's formula."""


class Plugin(Section):
    """Base of the built-in plug-ins. Fields are parameters; the class docstring is what `rlsys algo show` prints."""

    paper: ClassVar[str] = ""
    """Publication of the method."""
    evidence: ClassVar[str]
    """A key of EVIDENCE. It has no default, and a subclass does not inherit it: see evidence_of."""
    every_sample: ClassVar[bool] = False
    """Whether it also reads samples of advantage 0, or acts on them: they are packed like the others."""

    def needs(self) -> frozenset[str]:
        """Return names out of NEEDS; the run collects exactly these signals."""
        return frozenset()

    def needs_before(self) -> frozenset[str]:
        """Return the part of `needs` that a batch must have before the loss is called.

        The loss itself is called with the log-probs, entropy and values of its own forward pass: a plug-in that reads
        only these needs no further pass.
        """
        return self.needs()

    def observe(self, metrics: dict[str, float]) -> None:
        """Receive a finished optimizer update's metrics."""

    @property
    def observes(self) -> bool:
        """Whether `observe` is defined."""
        return type(self).observe is not Plugin.observe

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that a checkpoint stores."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of an earlier process."""


def evidence_of(plugin: type[Plugin]) -> str:
    """Return the evidence in the body of this class: a subclass does not inherit it.

    Every built-in states it (checked by a unit test). A user's class or function without it counts as `own`. Raises
    UserError for a value that is not a key of EVIDENCE.
    """
    stated = vars(plugin).get("evidence", "own")
    if stated not in EVIDENCE:
        raise UserError(
            f"{plugin.__module__}:{plugin.__name__}.evidence = {stated!r}: expected one of {', '.join(EVIDENCE)}"
        )
    return str(stated)
