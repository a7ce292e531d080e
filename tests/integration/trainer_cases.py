"""What the trainer's tests share: tiny models, a fixed batch, and steps that one rank and several ranks run alike.

Run under torchrun it takes the same steps in other layouts: `trainer_cases.py WORKPLACE LAYOUT...`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, TrainSample, pack
from rlsys.trainer.trainer import Trainer

BUDGET = 128
SEQUENCES = [[5, 3, 80, 41, 7, 7], [9] * 20]


def write_model(folder: Path, architecture: str = "Qwen3MoeForCausalLM", **changes: Any) -> Path:
    """A tiny random model, made by transformers: 2 layers, hidden 64, 8 experts, top-2, fp32."""
    from rlsys.engine.cpu_platform import declare_torchvision_ops

    declare_torchvision_ops()
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256,
        "initializer_range": 0.2, "tie_word_embeddings": False,
    }  # fmt: skip
    if "Moe" in architecture:
        sizes |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_class(**{**sizes, **changes}))
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path, run: Path, **sections: dict[str, Any]) -> Config:
    made = {
        "model": {"path": folder},
        "run": {"dir": run},
        "trainer": {"token_budget": BUDGET, "lr": 1e-3, "weight_decay": 0.01},
        "rollout": {"max_response_tokens": 64},
    }
    for name, values in sections.items():
        made[name] = {**made.get(name, {}), **values}
    return Config.model_validate(made)


def samples(vocab_size: int = 96, n: int = 10) -> list[TrainSample]:
    rng = random.Random(0)
    out = []
    for i in range(n):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))]
        response = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 50))]
        mu = [-abs(rng.gauss(4.5, 0.5)) for _ in response]
        out.append(TrainSample(prompt, response, mu, [0] * len(response), i))
    return out


def policy_loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A clipped objective of the shape that GRPO has, and one metric."""
    logp = scores.logp
    advantages = micro.expand(torch.randn(10, generator=torch.Generator().manual_seed(0)))
    ratio = (logp - micro.mu).exp()
    clipped = ratio.clamp(0.5, 2.0)
    loss = -torch.minimum(ratio * advantages, clipped * advantages) * micro.mask
    return loss.sum(), {"gap": ((logp - micro.mu).abs() * micro.mask).sum().detach()}


def steps(trainer: Trainer, n: int, lr: float = 1e-3) -> list[list[float]]:
    """[loss, gradient norm, metric] of `n` optimizer steps on the same samples."""
    batch = pack(samples(), trainer.config.trainer.token_budget, trainer.dp_rank, trainer.dp_size)
    out = []
    for _ in range(n):
        result = trainer.train_step(batch, policy_loss, lr)
        out.append([result.loss, result.grad_norm, float(result.sums["gap"])])
    return out


def canary_logps(trainer: Trainer) -> list[float]:
    return [x for canary in trainer.canaries(SEQUENCES) for x in canary.logp]


def weight_sums(trainer: Trainer) -> dict[str, float]:
    return {name: float(t.double().abs().sum()) for name, t in trainer.named_hf_tensors()}


def main(workplace: Path, layouts: list[str]) -> None:
    """In each layout ("ep=2,etp=1"): three steps from the model, then one from the checkpoint of one rank."""
    seen = {}
    for layout in layouts:
        parallel = {k: int(v) for k, v in (pair.split("=") for pair in layout.split(","))}
        trainer = Trainer(config_of(workplace / "model", workplace / "run", parallel=parallel))
        three, logps, sums = steps(trainer, 3), canary_logps(trainer), weight_sums(trainer)
        loaded = trainer.load_checkpoint()
        seen[layout] = {
            "steps": three, "canaries": logps, "sums": sums, "loaded": loaded, "fourth": steps(trainer, 1)
        }  # fmt: skip
        if trainer.is_main:
            (workplace / "seen.json").write_text(json.dumps(seen))
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
