"""Losses on whole answers without a reference (SimPO, CPO, ORPO), on single answers (KTO), and of reward models.

The losses equal those of TRL's CPOTrainer, ORPOTrainer, KTOTrainer and RewardTrainer
(tests/unit/algo/test_preference_parity.py) on one device. On several devices, TRL computes a loss for the answers of
each device; here all answers of an update are one batch. Shapes: see rlsys/algo/sft/preferences.py.
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
    """Return the mean cross entropy over the chosen answers' trained tokens; 0 if there are none."""
    chosen_tokens = answers.select_chosen(answers.tokens).sum().clamp(min=1)
    return -answers.select_chosen(answers.logp).sum() / chosen_tokens


class SimPo(Preference):
    """SimPO: reward is beta times the mean log-prob per token; chosen answers must lead by a margin."""

    paper: ClassVar[str] = "SimPO (Meng et al. 2024), eq. 6"
    evidence: ClassVar[str] = "R"
    beta: Beta = 2.0
    """Reward per nat of mean log-prob."""
    margin: Weight = 0.5
    """Target difference of the rewards (gamma in the paper)."""
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
    """Contrastive preference optimisation: DPO without a reference, plus cross entropy of the chosen answers."""

    paper: ClassVar[str] = "Contrastive Preference Optimization (Xu et al. 2024), eq. 3 to 5"
    evidence: ClassVar[str] = "R"
    beta: Beta = 0.1
    """Reward per nat of log-prob."""
    kind: Literal["sigmoid", "hinge"] = "sigmoid"
    """Loss of the gap between the rewards. sigmoid: -log sigmoid(gap). hinge: max(0, 1 - gap)."""
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
    """Odds-ratio preference optimisation: cross entropy of the chosen answers, plus a loss of the log odds ratio.

    The odds of an answer are those of the probability exp(mean log-prob per token). TRL's cross entropy also includes
    the prompts.
    """

    paper: ClassVar[str] = "ORPO (Hong et al. 2024), eq. 4 to 7"
    evidence: ClassVar[str] = "R"
    beta: Beta = 0.1
    """Weight of the odds ratio (lambda in the paper)."""

    def rewards(self, answers: Answers) -> Tensor:
        return (self.beta * answers.logp / answers.tokens.clamp(min=1)).detach()

    def __call__(self, answers: Answers) -> Tensor:
        mean = answers.logp / answers.tokens.clamp(min=1)
        # log(1 - p) with expm1, because the difference would lose precision near p = 1
        log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))
        gap = answers.select_chosen(log_odds) - answers.select_rejected(log_odds)
        return imitation(answers) - self.beta * logsigmoid(gap).mean()


class Kto(WithReference):
    """Kahneman-Tversky optimisation on single answers, good or bad, relative to a reference point.

    The reference point is the mean gain of the update's answers, each appended to the prompt of the next answer, and
    at least 0. It has no gradient.
    """

    paper: ClassVar[str] = "KTO (Ethayarajh et al. 2024), eq. 7"
    evidence: ClassVar[str] = "R"
    rows: ClassVar[Literal["pairs", "labels"]] = "labels"
    mismatched: ClassVar[bool] = True
    good: Weight = 1.0
    """Weight of good answers. The authors recommend (good * number of good answers) / (bad * number of bad answers)
    from 1 to 4/3."""
    bad: Weight = 1.0
    """Weight of bad answers."""

    def __call__(self, answers: Answers) -> Tensor:
        assert answers.drift is not None
        reference_point = answers.drift.mean().clamp(min=0).detach()
        lead = torch.where(answers.liked, answers.gain - reference_point, reference_point - answers.gain)
        weight = torch.where(answers.liked, self.good, self.bad).to(lead)
        return (weight * (1 - torch.sigmoid(self.beta * lead))).mean()


class ApoZeroLabels(WithReference):
    """APO-zero for single answers: raise the gain of good answers, and lower the gain of bad ones."""

    paper: ClassVar[str] = (
        "Anchored Preference Optimization (D'Oosterlinck et al. 2024), eq. 7, for single answers as in TRL"
    )
    evidence: ClassVar[str] = "R"
    rows: ClassVar[Literal["pairs", "labels"]] = "labels"

    def __call__(self, answers: Answers) -> Tensor:
        share = torch.sigmoid(self.beta * answers.gain)
        return torch.where(answers.liked, 1 - share, share).mean()


class RewardModel(Preference):
    """Bradley-Terry loss of a reward model: -log sigmoid of the difference between the values of two answers.

    The model outputs one value instead of logits. `rlsys sft` saves it as a model folder for sequence classification.
    """

    paper: ClassVar[str] = "Training language models to follow instructions (Ouyang et al. 2022), eq. 1"
    evidence: ClassVar[str] = "R"
    centre: Weight = 0.0
    """Weight of the squared sum of a pair's values, which centres values around 0 (Eisenstein et al. 2023: 0.01)."""

    def needs(self) -> frozenset[str]:
        return frozenset({"values"})

    def __call__(self, answers: Answers) -> Tensor:
        assert answers.value is not None
        good, bad = answers.select_chosen(answers.value), answers.select_rejected(answers.value)
        loss = -logsigmoid(good - bad - answers.select_chosen(answers.margin)).mean()
        return loss + self.centre * ((good + bad) ** 2).mean()
