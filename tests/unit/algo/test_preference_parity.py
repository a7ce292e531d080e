"""The losses on compared answers, DFT, and their gradients equal those of TRL's own trainers on the same logits.

Logits are rows of a table, one for each token: a bigram model, in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from launch.bootstrap import PARITY_STAMP
from rlsys.algo import build
from rlsys.algo.sft.imitation import Tokens
from rlsys.algo.sft.preferences import Answers
from tests.helpers import parity

pytestmark = [
    pytest.mark.gate,  # only `make test` installs it
    pytest.mark.skipif(not PARITY_STAMP.is_file(), reason="TRL: launch/bootstrap.py --parity"),
    pytest.mark.filterwarnings("ignore"),  # of TRL's own classes, which pytest's main process cannot import
]

B, V, PROMPT = 5, 11, 3
LENGTHS = [4, 1, 6, 3, 2, 5, 2, 3, 6, 1]
"""Tokens of the answers: five better ones, then five worse ones."""
MARGINS = torch.tensor([0.5, 0.0, 1.0, 0.25, 2.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def trl() -> Iterator[SimpleNamespace]:
    """Its trainers."""
    with parity.importable():
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.kto_trainer import KTOTrainer
        from trl.trainer.reward_trainer import RewardTrainer
        from trl.trainer.sft_trainer import SFTTrainer

        yield SimpleNamespace(
            dpo=DPOTrainer,
            cpo=CPOTrainer,
            orpo=ORPOTrainer,
            kto=KTOTrainer,
            reward=RewardTrainer,
            sft=SFTTrainer,
        )


class Bigram:
    """A model of TRL's: logits, and with `labels` what its fused head gives."""

    def __init__(self, seed: int) -> None:
        logits = torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.table = logits.requires_grad_()
        self.training, self.is_gradient_checkpointing = True, False

    def __call__(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        logits = self.table[input_ids]
        if labels is None:
            return SimpleNamespace(logits=logits)
        shifted = labels[:, 1:]
        picked = logits[:, :-1].log_softmax(-1).gather(2, shifted.clamp(min=0)[..., None])[..., 0]
        nothing = torch.zeros_like(picked)
        return SimpleNamespace(
            log_probs=torch.where(shifted >= 0, picked, nothing), entropy=nothing, mean_logits=nothing,
            is_top1=nothing.bool(), label_mask=shifted >= 0,
        )  # fmt: skip

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.table, retain_graph=True)
        return gradient


def padded(prompt: int = PROMPT, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, mask of the answers) `[2 B, L]`; `shift`: each prompt has the answer of the row so far before it."""
    g = torch.Generator().manual_seed(3)
    prompts = torch.randint(V, (2 * B, prompt), generator=g)
    answers = [torch.randint(V, (n,), generator=g) for n in LENGTHS]
    answers = answers[-shift:] + answers[:-shift] if shift else answers
    ids, mask = (torch.zeros(2 * B, prompt + max(LENGTHS), dtype=torch.long) for _ in range(2))
    for row, answer in enumerate(answers):
        ids[row, : prompt + len(answer)] = torch.cat([prompts[row], answer])
        mask[row, prompt : prompt + len(answer)] = 1
    return ids, mask


def sums(model: Bigram, prompt: int = PROMPT, shift: int = 0) -> Tensor:
    """Log-probs of the answers, `[2 B]`."""
    ids, mask = padded(prompt, shift)
    return model(ids, ids.masked_fill(mask == 0, -100)).log_probs.sum(1)


def ours(model: Bigram, ref: Bigram, prompt: int = PROMPT, liked: Tensor | None = None) -> Answers:
    first = torch.arange(2 * B) < B
    return Answers(
        logp=sums(model, prompt), tokens=torch.tensor(LENGTHS), pair=torch.arange(2 * B) % B,
        liked=first if liked is None else liked, margin=torch.cat([MARGINS, MARGINS]),
        ref=sums(ref, prompt).detach(), drift=(sums(model, prompt, 1) - sums(ref, prompt, 1)).detach(),
    )  # fmt: skip


def stub(**fields: Any) -> MagicMock:
    """A trainer of TRL's on one device, with these fields."""
    trainer = MagicMock(
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1, **fields
    )
    trainer.accelerator.device = torch.device("cpu")
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
    trainer.aux_loss_enabled = False
    return trainer


def same(mine: Tensor, theirs: Tensor, model: Bigram) -> None:
    assert torch.allclose(mine, theirs.to(mine), rtol=0, atol=1e-6), (mine, theirs)
    assert torch.allclose(model.gradient(mine), model.gradient(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "params", "kind", "smoothing"),
    [
        ("dpo", {}, "sigmoid", 0.0),
        ("robust_dpo", {"wrong": 0.2}, "robust", 0.2),
        ("dpo_norm", {"beta": 0.1}, "sigmoid_norm", 0.0),
        ("ipo", {}, "ipo", 0.0),
        ("hinge", {}, "hinge", 0.0),
        ("exo", {"smoothing": 0.01}, "exo_pair", 0.01),
        ("nca", {}, "nca_pair", 0.0),
        ("bco", {}, "bco_pair", 0.0),
        ("sppo", {}, "sppo_hard", 0.0),
        ("aot", {"wrong": 0.1}, "aot", 0.1),
        ("aot", {"paired": False}, "aot_unpaired", 0.0),
        ("apo_zero", {}, "apo_zero", 0.0),
        ("apo_down", {}, "apo_down", 0.0),
        ("discopop", {}, "discopop", 0.0),
    ],
)
def test_pairs_with_a_reference(
    trl: SimpleNamespace, name: str, params: dict[str, Any], kind: str, smoothing: float
) -> None:
    model, ref = Bigram(0), Bigram(1)
    ids, mask = padded()
    trainer = stub(
        model=model, ref_model=ref, beta=0.1, loss_types=[kind], loss_weights=[1.0], label_smoothing=smoothing,
        f_divergence_type="reverse_kl", ld_alpha=None, precompute_ref_logps=False, use_weighting=False,
    )  # fmt: skip
    trainer.args.discopop_tau = 0.05
    trainer.args.gradient_checkpointing = False
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    trl_loss = trl.dpo._compute_loss(trainer, model, inputs, False)
    answers = ours(model, ref)
    loss = build("preference", name, **params)
    same(loss(answers), trl_loss, model)
    expected = trainer._metrics["train"]["rewards/margins"][0]
    if name == "dpo":
        rewards = loss.rewards(answers)
        lead = answers.select_chosen(rewards) - answers.select_rejected(rewards)
        assert float(lead.mean()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "params", "kind", "fields"),
    [
        ("simpo", {"beta": 0.7, "margin": 0.4}, "simpo", {"simpo_gamma": 0.4, "beta": 0.7, "cpo_alpha": 0.0}),
        (
            "simpo",
            {"beta": 0.7, "imitate": 0.3},
            "simpo",
            {"simpo_gamma": 0.5, "beta": 0.7, "cpo_alpha": 0.3},
        ),
        ("cpo", {"wrong": 0.1}, "sigmoid", {"beta": 0.1, "cpo_alpha": 1.0, "label_smoothing": 0.1}),
        ("cpo", {"kind": "hinge", "imitate": 0.5}, "hinge", {"beta": 0.1, "cpo_alpha": 0.5}),
    ],
)
def test_pairs_without_a_reference(
    trl: SimpleNamespace, name: str, params: dict[str, Any], kind: str, fields: dict[str, float]
) -> None:
    model, (ids, mask) = Bigram(0), padded()
    trainer = stub(loss_type=kind, alpha=0.0, **{"label_smoothing": 0.0, **fields})
    logits, labels = model(ids).logits, ids.masked_fill(mask == 0, -100)
    mean = trl.cpo.get_batch_logps(logits, labels, average_log_prob=kind == "simpo")
    losses, _, _ = trl.cpo.cpo_loss(trainer, mean[:B], mean[B:])
    spoken = labels[:B, 1:] >= 0
    nll = torch.nn.functional.cross_entropy(logits[:B, :-1][spoken], labels[:B, 1:][spoken])
    trl_loss = losses.mean() + fields["cpo_alpha"] * nll
    same(build("preference", name, **params)(ours(model, Bigram(1))), trl_loss, model)


def test_orpo(trl: SimpleNamespace) -> None:
    """Prompts of one token, which nobody predicts: TRL imitates the others, too."""
    model, (ids, mask) = Bigram(0), padded(prompt=1)
    attended = (torch.arange(ids.shape[1]) <= mask.sum(1)[:, None]).long()
    trainer = stub(beta=0.1, is_encoder_decoder=False)
    trainer.concatenated_inputs.return_value = {
        "concatenated_input_ids": ids, "concatenated_attention_mask": attended,
        "concatenated_labels": ids.masked_fill(mask == 0, -100),
    }  # fmt: skip
    for name in ("concatenated_forward", "odds_ratio_loss"):
        setattr(trainer, name, getattr(trl.orpo, name).__get__(trainer))
    trainer.get_batch_logps = trl.orpo.get_batch_logps

    def call(ids: Tensor, **_: Any) -> SimpleNamespace:
        return model(ids)

    trl_loss, _ = trl.orpo.get_batch_loss_metrics(trainer, call, {"chosen_labels": torch.zeros(B, 1)})
    same(build("preference", "orpo")(ours(model, Bigram(1), prompt=1)), trl_loss, model)


@pytest.mark.parametrize(
    ("name", "params", "kind", "ref_seed"),
    [
        ("kto", {"good": 1.2, "bad": 0.7}, "kto", 1),
        ("kto", {"good": 1.2, "bad": 0.7}, "kto", 5),
        ("apo_zero_labels", {}, "apo_zero_unpaired", 1),
    ],
)
def test_labels(trl: SimpleNamespace, name: str, params: dict[str, Any], kind: str, ref_seed: int) -> None:
    """The two references have the model ahead and behind on other prompts."""
    model, ref, (ids, mask), (kl_ids, kl_mask) = Bigram(0), Bigram(ref_seed), padded(), padded(shift=1)
    liked = torch.tensor([True, False, True, True, False, False, True, False, True, True])
    trainer = stub(
        model=model, ref_model=ref, beta=0.1, loss_type=kind, precompute_ref_logps=False, calculate_KL=kind == "kto",
        desirable_weight=params.get("good", 1.0), undesirable_weight=params.get("bad", 1.0),
    )  # fmt: skip
    trainer._compute_kl_logps = trl.kto._compute_kl_logps.__get__(trainer)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask, "label": liked,
        "KL_input_ids": kl_ids, "KL_attention_mask": torch.ones_like(kl_ids), "KL_completion_mask": kl_mask,
    }  # fmt: skip
    trl_loss = trl.kto._compute_loss(trainer, model, inputs, False)
    same(build("preference", name, **params)(ours(model, ref, liked=liked)), trl_loss, model)


@pytest.mark.parametrize("centre", [0.0, 0.01])
def test_reward_models(trl: SimpleNamespace, centre: float) -> None:
    model = Bigram(0)
    values = model.table[:, 0][torch.arange(2 * B)]
    trainer = stub(model=model)
    trainer.args.center_rewards_coefficient = centre or None
    inputs = {"margin": MARGINS, "attention_mask": torch.ones(2 * B, 1)}
    trl_loss = trl.reward.compute_loss(trainer, lambda **_: SimpleNamespace(logits=values[:, None]), inputs)
    answers = ours(model, Bigram(1))
    loss = build("preference", "reward_model", centre=centre)(Answers(**{**vars(answers), "value": values}))
    same(loss, trl_loss, model)


@pytest.mark.parametrize(("name", "kind"), [("cross_entropy", "nll"), ("dft", "dft")])
def test_imitation(trl: SimpleNamespace, name: str, kind: str) -> None:
    model = Bigram(1)
    ids, mask = padded()
    labels = ids.masked_fill(mask == 0, -100)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    trainer = stub(compute_loss_func=None, label_smoother=None)
    trainer.args.loss_type, trainer.args.average_tokens_across_devices = kind, False
    trl_loss = trl.sft.compute_loss(trainer, model, inputs, num_items_in_batch=None)
    logp = model(ids, labels).log_probs[labels[:, 1:] >= 0]
    same(build("imitation", name)(Tokens(logp)).mean(), trl_loss, model)
