"""Base class of all plug-ins: typed parameters, required signals, state. Imports no torch.

A plug-in is a callable whose fields are its parameters. It may have state in private attributes.
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
"""Signal -> description. A plug-in requests signals in `needs`; rewards, groups, lengths, `mu` and weight versions
are always available."""


REWARD_TOLERANCE = 1e-6
"""Largest difference of equal rewards, as a share of the largest absolute reward of the group. float32 has seven
digits, and an estimator that divides by the standard deviation would amplify a rounding difference to the size of a
success."""

EVIDENCE: dict[str, str] = {
    "R": "the authors' code, or the code of the framework that introduced the method",
    "F": "the code of another framework; the authors' code was not read",
    "P": "the paper's text, or a note with its formulas",
    "N": "a second-hand note; the defaults are not confirmed",
    "A": "a reading of the abstract",
    "own": "this project",
}
"""Evidence of a plug-in -> source of its formula."""


class Plugin(Section):
    """Base of the plug-ins. The fields are the parameters; `rlsys algo show` prints the class docstring."""

    paper: ClassVar[str] = ""
    """Publication of the method."""
    evidence: ClassVar[str]
    """Key of EVIDENCE. It has no default, and a subclass does not inherit it; see evidence_of."""
    every_sample: ClassVar[bool] = False
    """Whether the plug-in reads or trains samples with advantage 0. They are then packed like other samples."""

    def needs(self) -> frozenset[str]:
        """Return the required signals, as names of NEEDS; the run collects only these."""
        return frozenset()

    def needs_before(self) -> frozenset[str]:
        """Return the members of `needs` that a batch must have before the loss is called.

        The training pass gives its log-probs, entropy and values to the loss. A plug-in that reads only these does
        not need an additional pass.
        """
        return self.needs()

    def observe(self, metrics: dict[str, float]) -> None:
        """Receive the metrics of a finished optimizer update."""

    @property
    def observes(self) -> bool:
        """Return whether the plug-in defines `observe`."""
        return type(self).observe is not Plugin.observe

    def state_dict(self) -> dict[str, Any]:
        """Return the plug-in's state as JSON values, for the checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of a checkpoint."""


def evidence_of(plugin: type[Plugin]) -> str:
    """Return the attribute `evidence` of the class itself, not of its bases; `own` if the class has none.

    Raises:
        UserError: the value is not a key of EVIDENCE.
    """
    evidence = vars(plugin).get("evidence", "own")
    if evidence not in EVIDENCE:
        raise UserError(
            f"{plugin.__module__}:{plugin.__name__}.evidence = {evidence!r}: expected one of {', '.join(EVIDENCE)}"
        )
    return str(evidence)
