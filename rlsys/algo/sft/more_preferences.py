"""Losses on whole answers without a reference (SimPO, CPO, ORPO), on single answers (KTO), and of reward models.

TRL's CPOTrainer, ORPOTrainer, KTOTrainer and RewardTrainer compute the same
(tests/unit/algo/test_preference_parity.py). They keep answers separate by device; here the answers of one update are
one batch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rlsys.algo.sft.preferences import Answers, Beta, Preference, Smoothing, WithReference

Weight = Annotated[float, Field(ge=0)]


def imitation(answers: Answers) -> Tensor:
    """Return the mean cross entropy of the chosen answers' tokens; 0 if no token is trained."""
    chosen_tokens = answers.select_chosen(answers.tokens).sum().clamp(min=1)
    return -answers.select_chosen(answers.logp).sum() / chosen_tokens


class SimPo(Preference):
    """SimPO: the reward is the mean log-prob of a token, and the better answer must lead by a margin."""

    paper: ClassVar[str] = "SimPO (Meng et al. 2024), eq. 6"
    evidence: ClassVar[str] = "R"
    beta: Beta = 2.0
    """Reward of a nat per token."""
    margin: Weight = 0.5
    """Target difference of the rewards, gamma in the paper."""
    imitate: Weight = 0.0
    """Weight of the cross entropy of chosen answers (CPO-SimPO)."""

    def rewards(self, answers: Answers) -> Tensor:
        return (self.beta * answers.logp / answers.tokens.clamp(min=1)).detach()

    def __call__(self, answers: Answers) -> Tensor:
        mean = answers.logp / answers.tokens.clamp(min=1)
        gap = self.beta * (answers.select_chosen(mean) - answers.select_rejected(mean)) - self.margin
        loss = -logsigmoid(gap).mean()
        return loss + self.imitate * imitation(answers) if self.imitate else loss


class Cpo(Preference):
    """Contrastive preference optimisation: DPO without a reference, and imitation of the chosen answers."""

    paper: ClassVar[str] = "Contrastive Preference Optimization (Xu et al. 2024), eq. 3 to 5"
    evidence: ClassVar[str] = "R"
    beta: Beta = 0.1
    """Reward of a nat."""
    kind: Literal["sigmoid", "hinge"] = "sigmoid"
    """-log sigmoid of the gap, or a hinge that ends at 1."""
    imitate: Weight = 1.0
    """Weight of the cross entropy of chosen answers."""
    wrong: Smoothing = 0.0
    """Share of pairs with swapped labels."""

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.logp.detach()

    def __call__(self, answers: Answers) -> Tensor:
        gap = self.beta * (answers.select_chosen(answers.logp) - answers.select_rejected(answers.logp))
        if self.kind == "hinge":
            loss = relu(1 - gap)
        else:
            loss = -logsigmoid(gap) * (1 - self.wrong) - logsigmoid(-gap) * self.wrong
        return loss.mean() + self.imitate * imitation(answers)


class Orpo(Preference):
    """Odds-ratio preference optimisation: imitates the chosen answers, and raises their odds over the rejected ones'.

    The probability of an answer is that of its mean token. TRL imitates the prompts, too.
    """

    paper: ClassVar[str] = "ORPO (Hong et al. 2024), eq. 4 to 7"
    evidence: ClassVar[str] = "R"
    beta: Beta = 0.1
    """Weight of the odds ratio; lambda in the paper."""

    def rewards(self, answers: Answers) -> Tensor:
        return (self.beta * answers.logp / answers.tokens.clamp(min=1)).detach()

    def __call__(self, answers: Answers) -> Tensor:
        mean = answers.logp / answers.tokens.clamp(min=1)
        # log(1 - p) with expm1: near p = 1 the difference would lose precision
        odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))
        gap = answers.select_chosen(odds) - answers.select_rejected(odds)
        return imitation(answers) - self.beta * logsigmoid(gap).mean()


class Kto(WithReference):
    """Kahneman-Tversky optimisation of single good or bad answers, relative to the drift on mismatched answers.

    This reference point is the mean gain of the update's answers, each appended to the next answer's prompt, and at
    least 0. It has no gradient.
    """

    paper: ClassVar[str] = "KTO (Ethayarajh et al. 2024), eq. 7"
    evidence: ClassVar[str] = "R"
    rows: ClassVar[Literal["pairs", "labels"]] = "labels"
    mismatched: ClassVar[bool] = True
    good: Weight = 1.0
    """Weight of good answers. The authors recommend weight times number of good to bad answers of 1 : 1 to 4 : 3."""
    bad: Weight = 1.0
    """Weight of bad answers."""

    def __call__(self, answers: Answers) -> Tensor:
        assert answers.drift is not None
        start = answers.drift.mean().clamp(min=0).detach()
        lead = torch.where(answers.liked, answers.gain - start, start - answers.gain)
        weight = torch.where(answers.liked, self.good, self.bad).to(lead)
        return (weight * (1 - torch.sigmoid(self.beta * lead))).mean()


class ApoZeroLabels(WithReference):
    """APO-zero for single answers: raise good ones and lower bad ones, without a reference point."""

    paper: ClassVar[str] = (
        "Anchored Preference Optimization (D'Oosterlinck et al. 2024), eq. 7, as TRL unpairs it"
    )
    evidence: ClassVar[str] = "R"
    rows: ClassVar[Literal["pairs", "labels"]] = "labels"

    def __call__(self, answers: Answers) -> Tensor:
        share = torch.sigmoid(self.beta * answers.gain)
        return torch.where(answers.liked, 1 - share, share).mean()


class RewardModel(Preference):
    """A reward model: -log sigmoid of the difference of two answers' values (Bradley and Terry).

    The model outputs one value instead of logits. `rlsys sft` saves it as a folder for sequence classification.
    """

    paper: ClassVar[str] = "Training language models to follow instructions (Ouyang et al. 2022), eq. 1"
    evidence: ClassVar[str] = "R"
    centre: Weight = 0.0
    """Weight of the squared sum of a pair's values, which keeps them around 0 (Eisenstein et al. 2023: 0.01)."""

    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    def __call__(self, answers: Answers) -> Tensor:
        assert answers.value is not None
        good, bad = answers.select_chosen(answers.value), answers.select_rejected(answers.value)
        loss = -logsigmoid(good - bad - answers.select_chosen(answers.margin)).mean()
        return loss + self.centre * ((good + bad) ** 2).mean()
