"""Trains, saves, loads and converts tiny models: with plain torch, or with tests/te_stub for Transformer Engine.

Run as a script `te_cases.py stub|plain WORKPLACE [FAMILY...]`: what it saw goes to WORKPLACE/stub.json or plain.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAMILIES = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen2ForCausalLM")


def see(which: str, workplace: Path, families: Sequence[str]) -> dict[str, Any]:
    """Of each family: two steps, the checkpoint of the other kind loaded (if it is there) and a third step."""
    from rlsys.trainer.trainer import Trainer
    from tests.integration import trainer_cases as cases

    other = "stub" if which == "plain" else "plain"
    seen: dict[str, Any] = {}
    for family in families:
        model = workplace / family
        if not model.exists():
            cases.write_model(model, family)
        trainer = Trainer(cases.config_of(model, workplace / which / family))
        found: dict[str, Any] = {"names": [n for n, _ in trainer.named_parameters()]}
        found |= {"before": cases.canary_logps(trainer), "steps": cases.steps(trainer, 2, cases.LR)}
        cases.save(trainer, 2)
        found |= {"third": cases.steps(trainer, 1, cases.LR), "after": cases.canary_logps(trainer)}
        trainer.close()
        if (workplace / other / family).exists():
            trainer = Trainer(cases.config_of(model, workplace / other / family))
            found |= {"loaded": trainer.load_checkpoint(), "loaded third": cases.steps(trainer, 1, cases.LR)}
            found["loaded after"] = cases.canary_logps(trainer)
            trainer.close()
        seen[family] = found
    return seen


def converted(workplace: Path, families: Sequence[str]) -> dict[str, bool]:
    """Of each family: whether a folder converted there and back has the same bytes."""
    from safetensors.torch import load_file

    from rlsys.trainer import conversion

    same = {}
    for family in families:
        there, back = workplace / f"{family}-there", workplace / f"{family}-back"
        conversion.hf_to_megatron(workplace / family, there, {}, lambda *_: None)
        conversion.megatron_to_hf(there, back, lambda *_: None)
        before, after = (
            {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}
            for folder in (workplace / family, back)
        )
        same[family] = all(after[name].equal(tensor) for name, tensor in after.items()) and bool(before)
    return same


def main(which: str, workplace: Path, families: Sequence[str]) -> None:
    sys.path.insert(0, str(ROOT))
    import megatron_patches

    if which == "stub":
        sys.path.insert(0, str(ROOT / "tests/te_stub"))
        megatron_patches.have_transformer_engine = lambda: True
    megatron_patches.apply()
    seen = see(which, workplace, families)
    if which == "stub":
        seen["converted"] = converted(workplace, families)
    (workplace / f"{which}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or FAMILIES)
