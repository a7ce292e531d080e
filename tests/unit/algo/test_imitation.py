"""Losses on the tokens of answers: equal to their definition by brute force, on one rank and on two that share the
vocabulary. (tests/unit/algo/test_preference_parity.py holds DFT against TRL's.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlsys.algo import build
from rlsys.algo.contract import check_promises, kind_of
from rlsys.algo.methods.dft import Dft
from rlsys.algo.methods.otr import Otr
from rlsys.algo.registry import TABLE
from rlsys.algo.sft.imitation import Imitation, Tokens
from rlsys.algo.sft.preferences import Dpo
from rlsys.config import load_config
from rlsys.config.algo import Spec
from rlsys.core.errors import UserError
from rlsys.trainer.sft.sft import build_loss
from tests.helpers.gloo_ranks import on_gloo_ranks

ROOT = Path(__file__).resolve().parents[3]
ROWS, VOCABULARY, KAPPA, BETA = 600, 12, 1.3, -0.2  # more rows than are worked on at a time
NAMES = list(TABLE["imitation"])


def logits_and_targets() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, VOCABULARY, generator=g) * 3, torch.randint(VOCABULARY, (ROWS,), generator=g)


def by_definition(logits: Tensor, targets: Tensor) -> Tensor:
    """OTR's gradient by the logits: every token is drawn as often as its probability says."""
    logits = logits.double().requires_grad_()
    logp = logits.log_softmax(-1)
    q = (logits.detach() / KAPPA).softmax(-1)
    reward = torch.full_like(q, BETA).scatter_(1, targets[:, None], 1.0)
    (gradient,) = torch.autograd.grad(-(weights() * (q * reward * logp).sum(-1)).sum(), logits)
    return gradient


def weights() -> Tensor:
    return torch.linspace(0.5, 2.0, ROWS)


def gap_on(ranks: int, rank: int) -> float:
    from megatron.core import parallel_state

    from rlsys.trainer.model.entropy import logprob_and_candidates

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    logits, targets = logits_and_targets()
    columns = VOCABULARY // ranks
    shard = slice(rank * columns, (rank + 1) * columns)
    leaf = logits[:, shard].clone().requires_grad_()
    tokens = Tokens(*logprob_and_candidates(leaf * 1.0, targets, KAPPA))
    assert tokens.chance is not None and tokens.expected is not None and not tokens.chance.requires_grad
    (weights() * Otr(beta=BETA, temperature=KAPPA)(tokens)).sum().backward()
    full_logp, q = logits.log_softmax(-1), (logits / KAPPA).softmax(-1)
    target_index = torch.arange(ROWS), targets
    pairs = [
        (tokens.logp, full_logp[target_index]), (tokens.chance, q[target_index]),
        (tokens.expected, (q * full_logp).sum(-1)),
        (leaf.grad, by_definition(logits, targets)[:, shard]),
    ]  # fmt: skip
    parallel_state.destroy_model_parallel()
    return max(float((a.detach() - b).abs().max()) for a, b in pairs if a is not None)


@pytest.mark.gate
@pytest.mark.parametrize("ranks", [1, 2])
def test_otr_is_the_mean_over_all_draws(ranks: int, tmp_path: Path) -> None:
    assert max(on_gloo_ranks(ranks, gap_on, tmp_path)) < 1e-5


def test_at_temperature_one_otr_is_dft() -> None:
    """Times 1 - beta: what is expected of the others' log-probs has no gradient there."""
    logits = logits_and_targets()[0].double().requires_grad_()
    targets = logits_and_targets()[1]
    logp = logits.log_softmax(-1)
    target_index = torch.arange(ROWS), targets
    pi = logp.detach().exp()
    tokens = Tokens(logp[target_index], pi[target_index], (pi * logp).sum(-1))
    (otr,) = torch.autograd.grad(Otr(beta=BETA)(tokens).sum(), logits, retain_graph=True)
    (dft,) = torch.autograd.grad(Dft()(tokens).sum(), logits)
    torch.testing.assert_close(otr, (1 - BETA) * dft)


# -- as plug-ins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_keeps_its_promises_and_has_a_recipe(name: str) -> None:
    lines = list(check_promises(load_config(ROOT / "configs/quickstart.yaml"), "imitation", name))
    assert lines[0].startswith(f"made: imitation {name}, evidence ") and len(lines) == 3
    assert kind_of(name) == "imitation"
    config = load_config(ROOT / "configs/imitation" / f"{name}.yaml")
    assert config.sft.loss.name == name and isinstance(build_loss(config.sft.loss), Imitation)


OWN = """
from rlsys.algo.sft.imitation import Imitation
class Half(Imitation):
    "Half of the cross entropy."
    def __call__(self, tokens):
        return -tokens.logp / 2
class Mean(Imitation):
    "A mean where losses are expected."
    def __call__(self, tokens):
        return -tokens.logp.mean()
def compared(answers):
    "What sees whole answers."
    return -(answers.select_chosen(answers.logp) - answers.select_rejected(answers.logp)).mean()
"""


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    half = build_loss(Spec(name=f"{tmp_path}/own.py:Half"))
    assert isinstance(half, Imitation) and half(Tokens(torch.tensor([-2.0]))).tolist() == [1.0]
    assert not isinstance(build_loss(Spec(name=f"{tmp_path}/own.py:compared")), Imitation)
    assert isinstance(build_loss(Spec(name="dpo")), Dpo)
    with pytest.raises(UserError, match=r"losses of shape \[\] for 8 tokens; expected one loss per token"):
        list(
            check_promises(
                load_config(ROOT / "configs/quickstart.yaml"), "imitation", f"{tmp_path}/own.py:Mean"
            )
        )


def test_a_misspelled_loss_name_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"sft\.loss = 'crossentropy': .*did you mean cross_entropy"):
        build_loss(Spec(name="crossentropy"))
    with pytest.raises(UserError, match=r"beta = 2\.0: expected at most 1"):
        build("imitation", "otr", beta=2.0)
