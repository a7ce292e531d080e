"""Base class of all plug-ins: typed parameters, needs, state. No torch.

A plug-in is a callable whose fields are its parameters. It may keep state in private attributes, which `state_dict`
returns as JSON values for the checkpoint; `observe` receives the metrics of an update.
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
    "divergence": "the divergence of the policy's distribution from a teacher's at each token (its forward pass)",
    "sum_pi_squared": "the sum of the squared probabilities at each token",
    "values": "predictions of a critic at each token, with gradient in the loss",
    "prompt_index": "the index of the prompt in its source, the same in every group of this prompt",
    "answers": "the canonical final answer of each response",
    "verdicts": "a judge's verdict on each correct response",
    "tool_penalty": "the defects of each response with tools: failed calls, too many answers or none",
    "turn_rewards": "the reward of each turn, from rollout.generator = environment or as turn_rewards of data.reward",
    "transferred": "which samples were generated from a rewritten prompt",
    "forks": "the sample of its group from which a response branches off, and the position",
    "guidance": "a judge's hint for the prompt, from failed responses",
    "repairs": "the first wrong step of a response, and the right one",
    "probes": "rewards of responses to the prompt from engines of a pool with role explore",
    "prompt_scores": "the disagreement of policy and reference on each prompt token",
}
"""Signals that a plug-in may request beyond rewards, groups, lengths, `mu` and weight versions."""


REWARD_TOLERANCE = 1e-6
"""Rewards of a group that differ by at most this share of the largest count as equal. float32 has seven digits, and
an estimator that divides by the deviation would amplify a rounding difference to the size of a success."""

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
    """Whether it reads or trains samples of advantage 0, which are then packed like the others."""

    def needs(self) -> frozenset[str]:
        """Return the required signals, as names of NEEDS; the run collects only these."""
        return frozenset()

    def needs_before(self) -> frozenset[str]:
        """Return the part of `needs` that a batch must have before the loss is called.

        A loss is called with the log-probs, entropy and values of the training pass; a plug-in that reads only these
        needs no additional pass.
        """
        return self.needs()

    def observe(self, metrics: dict[str, float]) -> None:
        """Receive a finished optimizer update's metrics."""

    @property
    def observes(self) -> bool:
        """Return whether the plug-in defines `observe`."""
        return type(self).observe is not Plugin.observe

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that a checkpoint stores."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()` of an earlier process."""


def evidence_of(plugin: type[Plugin]) -> str:
    """Return the evidence that the class itself states; a subclass does not inherit it.

    A unit test checks that every built-in states it. A user's class or function without it counts as `own`.

    Raises:
        UserError: the value is not a key of EVIDENCE.
    """
    stated = vars(plugin).get("evidence", "own")
    if stated not in EVIDENCE:
        raise UserError(
            f"{plugin.__module__}:{plugin.__name__}.evidence = {stated!r}: expected one of {', '.join(EVIDENCE)}"
        )
    return str(stated)
