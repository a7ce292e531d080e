"""Losses on pairs of whole answers: DPO and variants, as pure functions of log-probs that return one loss.

`rlsys sft` calls a loss with all answers of an update, and propagates the gradient through the answers' log-probs
(rlsys/trainer/sft/preference.py). rlsys/algo/sft/more_preferences.py has losses without a reference, on single
answers and of reward models. The losses equal those of TRL's DPOTrainer (tests/unit/algo/test_preference_parity.py).

Shapes: S answers, B pairs of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsys.algo.plugin import Plugin

Beta = Annotated[float, Field(gt=0)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True)
class Answers:
    """All answers of one optimizer update, `[S]` each.

    Attributes:
        logp: Sum of the log-probs of the answer's trained tokens, with gradient.
        tokens: Number of trained tokens of the answer.
        pair: Number of the answer's pair, equal for its two answers.
        liked: Whether the answer is the chosen one of its pair, or has the label good.
        margin: Margin of the answer's pair; 0 if the data has none.
        ref: Sum of the log-probs under the initial weights; None for a loss without a reference.
        drift: logp - ref of the answers appended to other prompts; None if `Preference.mismatched` is false.
        value: Value of the answer from a reward model, with gradient; None for other losses.
    """

    logp: Tensor
    tokens: Tensor
    pair: Tensor
    liked: Tensor
    margin: Tensor
    ref: Tensor | None = None
    drift: Tensor | None = None
    value: Tensor | None = None

    @cached_property
    def gain(self) -> Tensor:
        """logp - ref, `[S]`."""
        assert self.ref is not None, "a loss that uses `gain` must list ref in `needs`"
        return self.logp - self.ref

    def select_chosen(self, values: Tensor) -> Tensor:
        """Return the entries of `values` `[S]` for the chosen answers, `[B]`, in the order of the pairs."""
        return values[self._ordered_indices(self.liked)]

    def select_rejected(self, values: Tensor) -> Tensor:
        """Return the entries of `values` `[S]` for the rejected answers, `[B]`, in the order of the pairs."""
        return values[self._ordered_indices(~self.liked)]

    def _ordered_indices(self, selection: Tensor) -> Tensor:
        """Return the indices where `selection` `[S]` bool is true, ordered by pair."""
        indices = selection.nonzero().flatten()
        return indices[self.pair[indices].argsort()]


class Preference(Plugin):
    """Base of losses on whole answers."""

    rows: ClassVar[Literal["pairs", "labels"]] = "pairs"
    """Rows of the data. pairs: two answers to a prompt. labels: single answers with the label good or bad."""
    mismatched: ClassVar[bool] = False
    """Whether the loss needs `Answers.drift`."""

    def __call__(self, answers: Answers) -> Tensor:
        """Return the mean loss over the pairs, or over the answers for `rows` = labels."""
        raise NotImplementedError

    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward that the trained model gives to each answer, `[S]`, detached, for metrics."""
        if answers.value is not None:
            return answers.value.detach()
        return (answers.logp if answers.ref is None else answers.gain).detach()


class WithReference(Preference):
    """Base of losses with reward beta * gain; gain is the log-prob minus that of the initial weights."""

    beta: Beta = 0.1
    """Reward per nat of gain. A larger value keeps the model closer to its initial weights."""

    def needs(self) -> frozenset[str]:
        return frozenset({"ref"})

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.gain.detach()

    def gaps(self, answers: Answers) -> Tensor:
        """Return the chosen answer's reward minus the rejected one's, beta * (gain - gain), `[B]`."""
        return self.beta * (answers.select_chosen(answers.gain) - answers.select_rejected(answers.gain))

    def gains_per_token(self, answers: Answers) -> Tensor:
        """Return the chosen answer's gain per token minus the rejected one's, `[B]`."""
        mean = answers.gain / answers.tokens.clamp(min=1)
        return answers.select_chosen(mean) - answers.select_rejected(mean)


class Dpo(WithReference):
    """Direct preference optimisation: -log sigmoid of the gap between the rewards of the two answers."""

    paper: ClassVar[str] = "Direct Preference Optimization (Rafailov et al. 2023), eq. 7"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        return -logsigmoid(self.gaps(answers)).mean()


class RobustDpo(WithReference):
    """DPO for pairs of which a known share has swapped labels: an unbiased estimate of the loss on correct labels."""

    paper: ClassVar[str] = "Provably Robust DPO (Chowdhury et al. 2024)"
    evidence: ClassVar[str] = "R"
    wrong: Smoothing = 0.1
    """Share of pairs with swapped labels."""

    def __call__(self, answers: Answers) -> Tensor:
        gap = self.gaps(answers)
        loss = -(1 - self.wrong) * logsigmoid(gap) + self.wrong * logsigmoid(-gap)
        return (loss / (1 - 2 * self.wrong)).mean()


class DpoNorm(WithReference):
    """DPO with gains per token, so that longer answers do not have more weight."""

    paper: ClassVar[str] = "Tulu 3 (Lambert et al. 2024), length-normalised DPO"
    evidence: ClassVar[str] = "R"
    beta: Beta = 5.0
    """Reward per nat of gain per token."""

    def __call__(self, answers: Answers) -> Tensor:
        return -logsigmoid(self.beta * self.gains_per_token(answers)).mean()


class Ipo(WithReference):
    """Identity preference optimisation: a target of 1 / (2 beta) for the difference of the gains per token."""

    paper: ClassVar[str] = "A General Theoretical Paradigm (Azar et al. 2023), eq. 17"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        return ((self.gains_per_token(answers) - 1 / (2 * self.beta)) ** 2).mean()


class Hinge(WithReference):
    """SLiC's hinge loss on the gap between the rewards: max(0, 1 - gap)."""

    paper: ClassVar[str] = "SLiC-HF (Zhao et al. 2023); RSO (Liu et al. 2023)"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        return torch.relu(1 - self.gaps(answers)).mean()


class Exo(WithReference):
    """EXO for pairs: KL divergence of the model's preference between the two answers from the labelled preference."""

    paper: ClassVar[str] = "Towards Efficient Exact Optimization (Ji et al. 2024), eq. 16"
    evidence: ClassVar[str] = "R"
    smoothing: Annotated[float, Field(gt=0, lt=0.5)] = 1e-3
    """Probability of the rejected answer in the labelled preference."""

    def __call__(self, answers: Answers) -> Tensor:
        gap = self.gaps(answers)
        wins, loses = logsigmoid(gap), logsigmoid(-gap)
        e = torch.tensor(self.smoothing, dtype=gap.dtype)
        return (wins.exp() * (wins - torch.log1p(-e)) + loses.exp() * (loses - e.log())).mean()


class Nca(WithReference):
    """Noise contrastive alignment: raise the absolute reward of the chosen answer, not only the difference."""

    paper: ClassVar[str] = "Noise Contrastive Alignment (Chen et al. 2024)"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        rewards = self.beta * answers.gain
        good, bad = answers.select_chosen(rewards), answers.select_rejected(rewards)
        return (-logsigmoid(good) - 0.5 * logsigmoid(-good) - 0.5 * logsigmoid(-bad)).mean()


class Bco(WithReference):
    """Binary classifier optimisation on pairs: raise the chosen answer's reward and lower the rejected one's."""

    paper: ClassVar[str] = "Binary Classifier Optimization (Jung et al. 2024)"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        rewards = self.beta * answers.gain
        return (
            -logsigmoid(answers.select_chosen(rewards)) - logsigmoid(-answers.select_rejected(rewards))
        ).mean()


class Sppo(WithReference):
    """Self-play preference optimisation for certain labels: squared error to gains of +1/(2 beta) and -1/(2 beta)."""

    paper: ClassVar[str] = "SPPO (Wu et al. 2024), eq. 4.7"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        good, bad = answers.select_chosen(answers.gain), answers.select_rejected(answers.gain)
        return ((good - 0.5 / self.beta) ** 2 + (bad + 0.5 / self.beta) ** 2).mean()


class Aot(WithReference):
    """Alignment by optimal transport: compare sorted values instead of the values of a pair.

    All answers of the update are sorted together; TRL sorts the answers of each device.
    """

    paper: ClassVar[str] = "Distributional Preference Alignment via Optimal Transport (Melnyk et al. 2024)"
    evidence: ClassVar[str] = "R"
    paired: bool = True
    """true: compare the sorted differences between chosen and rejected log-probs of policy and reference. false:
    compare the sorted gains of chosen and rejected answers (TRL: aot_unpaired)."""
    wrong: Smoothing = 0.0
    """Share of pairs with swapped labels."""

    def __call__(self, answers: Answers) -> Tensor:
        assert answers.ref is not None
        if self.paired:
            upper = answers.select_chosen(answers.logp) - answers.select_rejected(answers.logp)
            lower = answers.select_chosen(answers.ref) - answers.select_rejected(answers.ref)
        else:
            upper = answers.select_chosen(answers.gain)
            lower = answers.select_rejected(answers.gain)
        gap = self.beta * (upper.sort().values - lower.sort().values)
        return (-logsigmoid(gap) * (1 - self.wrong) - logsigmoid(-gap) * self.wrong).mean()


class ApoZero(WithReference):
    """Anchored preference optimisation for answers better than the model's: raise the chosen, lower the rejected."""

    paper: ClassVar[str] = "Anchored Preference Optimization (D'Oosterlinck et al. 2024), eq. 7"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        share = torch.sigmoid(self.beta * answers.gain)
        return (1 - answers.select_chosen(share) + answers.select_rejected(share)).mean()


class ApoDown(WithReference):
    """Anchored preference optimisation for answers worse than the model's: lower both, the rejected answer more."""

    paper: ClassVar[str] = "Anchored Preference Optimization (D'Oosterlinck et al. 2024), eq. 8"
    evidence: ClassVar[str] = "R"

    def __call__(self, answers: Answers) -> Tensor:
        good = torch.sigmoid(self.beta * answers.select_chosen(answers.gain))
        return (good + 1 - torch.sigmoid(self.gaps(answers))).mean()


class DiscoPop(WithReference):
    """DiscoPOP, a loss proposed by a language model: a mixture of DPO's loss and an exponential loss.

    The weight of the exponential loss is sigmoid(gap / tau).
    """

    paper: ClassVar[str] = "Discovering Preference Optimization Algorithms (Lu et al. 2024), eq. 5"
    evidence: ClassVar[str] = "R"
    tau: Annotated[float, Field(gt=0)] = 0.05
    """Temperature of the transition between the two losses."""

    def __call__(self, answers: Answers) -> Tensor:
        gap = self.gaps(answers)
        share = torch.sigmoid(gap / self.tau)
        return (-logsigmoid(gap) * (1 - share) + torch.exp(-gap) * share).mean()
