"""Fixtures of trainer tests: tiny models, a fixed batch, and the same train steps on one rank and on several.

Under torchrun, `-m tests.helpers.trainer_cases WORKPLACE LAYOUT...` runs these steps in other parallel layouts.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.core.spans import RouteSpan
from rlsys.segments import support
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.weights import shard
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer
from tests.helpers import tiny

BUDGET = 128
SEQUENCES = [[5, 3, 80, 41, 7, 7], [9] * 20]


def write_model(folder: Path, architecture: str = "Qwen3MoeForCausalLM", **changes: Any) -> Path:
    """Write a tiny random model in float32: 4 layers, hidden size 64, 8 experts if it is an MoE model."""
    return tiny.write(folder, tiny.of_architecture(architecture), **changes)


def config_of(folder: Path, run: Path, **sections: dict[str, Any]) -> Config:
    raw_config: dict[str, dict[str, Any]] = {
        "model": {"path": folder},
        "run": {"dir": run},
        "trainer": {"token_budget": BUDGET, "lr": 1e-3, "weight_decay": 0.01},
        "rollout": {"max_response_tokens": 64},
    }
    for name, values in sections.items():
        raw_config[name] = {**raw_config.get(name, {}), **values}
    return Config.model_validate(raw_config)


@contextmanager
def trainer_factory(run: Path) -> Iterator[Callable[..., Trainer]]:
    """Yield a function that closes the previous trainer and creates one of a model folder. Close the last at exit."""
    open_trainers: list[Trainer] = []

    def make(folder: Path, **sections: Any) -> Trainer:
        while open_trainers:
            open_trainers.pop().close()
        open_trainers.append(Trainer(config_of(folder, run, **sections)))
        return open_trainers[0]

    yield make
    while open_trainers:
        open_trainers.pop().close()


def samples(vocab_size: int = 96, n: int = 10) -> list[TrainSample]:
    rng = random.Random(0)
    out = []
    for i in range(n):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))]
        response = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 50))]
        mu = [-abs(rng.gauss(4.5, 0.5)) for _ in response]
        out.append(TrainSample(prompt, response, mu, [0] * len(response), i))
    return out


def with_routes(
    plain: list[TrainSample], layers: int = 4, experts: int = 8, topk: int = 2
) -> list[TrainSample]:
    """Add random routes at all positions that predict a token. The fourth sample gets none."""
    rng = random.Random(1)
    out = []
    for i, s in enumerate(plain):
        n = len(s) - 1
        chosen = bytes(e for _ in range(n * layers) for e in rng.sample(range(experts), topk))
        out.append(dataclasses.replace(s, routes=() if i == 3 else (RouteSpan(0, n, chosen),)))
    return out


def with_support(plain: list[TrainSample], vocab_size: int = 96, most: int = 8) -> list[TrainSample]:
    """Add random supports of at most `most` + 1 token ids. The fourth sample gets none."""
    rng = random.Random(2)

    def draw_support(token: int) -> list[int]:
        return list({token, *rng.sample(range(vocab_size), rng.randint(1, most))})

    rows = [[draw_support(int(token)) for token in s.response_ids] for s in plain]
    encoded = [support.encode(r, [int(t) for t in s.response_ids]) for r, s in zip(rows, plain, strict=True)]
    return [dataclasses.replace(s, support=b"" if i == 3 else encoded[i]) for i, s in enumerate(plain)]


def policy_loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a clipped policy-gradient loss, as in GRPO, and one metric."""
    logp = scores.logp
    advantages = micro.expand(torch.randn(16, generator=torch.Generator().manual_seed(0)))
    ratio = (logp - micro.mu).exp()
    clipped = ratio.clamp(0.5, 2.0)
    loss = -torch.minimum(ratio * advantages, clipped * advantages) * micro.mask
    return loss.sum(), {"gap": ((logp - micro.mu).abs() * micro.mask).sum().detach()}


def steps(trainer: Trainer, n: int, lr: float = 1e-3) -> list[list[float]]:
    """Run `n` optimizer steps on the same samples.

    Returns:
        Per step: loss, gradient norm, the metric of `policy_loss`, replay share, route agreement, largest expert
        load, MTP loss and MTP accuracy.
    """
    routed_samples = with_routes(samples())  # the trainer reads routes if trainer.replay = engine
    batch = trainer.passes.pack(
        with_support(routed_samples) if trainer.config.rollout.top_k else routed_samples
    )
    out = []
    for _ in range(n):
        result = trainer.update(batch, policy_loss, lr)
        replay = [
            result.routing.get(name, 0.0) for name in ("replay_share", "route_agreement", "expert_load_max")
        ]
        ahead = [result.prediction.get(name, 0.0) for name in ("mtp_loss", "mtp_accuracy")]
        out.append([result.loss, result.grad_norm, float(result.sums["gap"]), *replay, *ahead])
    return out


def save(trainer: Trainer, step: int, score: float | None = None) -> None:
    trainer.save_checkpoint(step, score=score)
    assert trainer.finish_checkpoint() == step


def canary_logps(trainer: Trainer) -> list[float]:
    return [x for canary in trainer.canaries(SEQUENCES) for x in canary.logp]


def weight_sums(trainer: Trainer) -> dict[str, float]:
    named_tensors = chain(trainer.named_hf_tensors(), trainer.named_factors())
    return {name: float(t.double().abs().sum()) for name, t in named_tensors}


LR = 1e-4  # learning rate of the layouts; Adam's first steps would amplify rounding errors at a larger one


def sections(layout: str) -> dict[str, dict[str, Any]]:
    """Return the config sections of a layout such as "ep=2,dispatcher=allgather,padded"."""
    parallel: dict[str, Any] = {}
    for word in layout.split(","):
        key, _, value = word.partition("=")
        if value:
            parallel[key] = int(value) if value.isdigit() else value
    parallel["overlap"] = "overlap" in layout
    replay = "replay" in layout
    if "padded" in layout:
        parallel["dispatcher"] = "allgather"
    trainer: dict[str, Any] = {"replay": "engine" if replay else "off"}
    if "recompute" in layout:
        trainer["recompute"] = ["moe", "layernorm", "core_attn"] if "selective" in layout else ["layer"]
    if "deepseek" in layout:
        trainer["balance_rate"] = 0.01
    if "balance" in layout:
        trainer["balance_loss"] = 0.1
    if "muon" in layout:
        trainer["optimizer"] = "muon"
    if "mtp" in layout:
        trainer |= {"mtp_loss": 0.3, "mtp_trunk": "trunk" in layout}
    if "lora" in layout:
        trainer["lora"] = {"rank": 4, "alpha": 8}
    rollout = {"top_k": 8} if "support" in layout else {}
    return {"parallel": parallel, "trainer": trainer, "engine": {"return_routes": replay}, "rollout": rollout}


KINDS = (
    "replay",
    "balance",
    "deepseek",
    "odd vocabulary",
    "odd tied",
    "odd mtp",
    "tied",
    "uneven",
    "support",
    "muon",
    "latent lora",
    "lora",
    "mtp trunk",
    "mtp",
)
"""Words of a layout that change results. A layout has the first kind that it contains, or "run"."""
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": {"architecture": "DeepseekV3ForCausalLM"},
    "tied": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True},
    "latent lora": {"architecture": "DeepseekV3ForCausalLM"},
    "mtp": {"architecture": "DeepseekV3ForCausalLM", "mtp": True},
    "mtp trunk": {"architecture": "DeepseekV3ForCausalLM", "mtp": True},
    "odd vocabulary": {"vocab_size": 97},  # as after an added token
    "odd tied": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "vocab_size": 101},
    "odd mtp": {"architecture": "DeepseekV3ForCausalLM", "mtp": True, "vocab_size": 97},
    "uneven": {"num_hidden_layers": 3},  # the second pipeline stage has one layer
}
"""Kinds with another model than the default of `write_model`, and the arguments of `write_model`."""


def kind(layout: str) -> str:
    return next((k for k in KINDS if k in layout), "run")


def model_name(layout: str) -> str:
    """Return the name of the model's folder in the workplace."""
    return kind(layout) if kind(layout) in MODELS else "model"


def randomize_adapters(trainer: Trainer) -> None:
    """Set LoRA factors to random values: B starts at zero, which would leave A without a gradient."""
    lora = trainer._chunks.lora
    for factors in lora.chunk_factors if lora is not None else ():
        for name, entry in factors.entries.items():
            (key, shape), *_ = entry.hf.items()
            value = torch.randn(shape, generator=torch.Generator().manual_seed(len(key) + sum(map(ord, key))))
            with torch.no_grad():
                factors.get_parameter(name).copy_(shard(value * 0.1, entry.rule))


def three_steps(trainer: Trainer) -> dict[str, Any]:
    randomize_adapters(trainer)
    results: dict[str, Any] = {"before": canary_logps(trainer), "steps": steps(trainer, 3, LR)}
    return results | {"after": canary_logps(trainer), "sums": weight_sums(trainer)}


def main(workplace: Path, layouts: list[str]) -> None:
    """In each layout, run three steps from the model and one from a checkpoint. Rank 0 appends results to seen.jsonl.

    The checkpoint is that of one rank in workplace/run-KIND. A layout with "save" saves and loads its own in
    workplace/LAYOUT, and a later layout with "resume" loads the same.
    """
    saved = next((layout for layout in layouts if "save" in layout), "")
    for layout in layouts:
        start = time.monotonic()
        run = workplace / (saved if "save" in layout or "resume" in layout else f"run-{kind(layout)}")
        trainer = Trainer(config_of(workplace / model_name(layout), run, **sections(layout)))
        results = three_steps(trainer)
        if "save" in layout:
            save(trainer, 3)
        results |= {"loaded": trainer.load_checkpoint(), "fourth": steps(trainer, 1, LR)}
        results["seconds"] = time.monotonic() - start
        if trainer.is_main:
            with (workplace / "seen.jsonl").open("a") as file:
                file.write(json.dumps([layout, results]) + "\n")
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
