"""Trains, saves, loads and converts tiny models: with plain torch, or with tests/te_stub for Transformer Engine.

Run as a script `te_cases.py plain|stub|back|prefixes WORKPLACE [FAMILY|LAYOUT...]`: what it saw is in
WORKPLACE/plain.json and so on. `plain` and `stub` train; `stub` loads what `plain` saved and converts; `back` loads
what `stub` saved without it. `prefixes` compares micro-batches that share tokens with others, on the stub.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
FAMILIES = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen2ForCausalLM")


def trained(which: str, workplace: Path, families: Sequence[str]) -> dict[str, Any]:
    """Of each family: two steps, a checkpoint, and a third step."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    results: dict[str, Any] = {}
    for family in families:
        model = workplace / family
        if not model.exists():
            cases.write_model(model, family)
        trainer = Trainer(cases.config_of(model, workplace / which / family))
        logps_before = cases.canary_logps(trainer)
        steps = cases.steps(trainer, 2, cases.LR)
        cases.save(trainer, 2)
        third = cases.steps(trainer, 1, cases.LR)
        results[family] = {"before": logps_before, "steps": [*steps, *third]}
        results[family]["after"] = cases.canary_logps(trainer)
        trainer.close()
    return results


def loaded(whose: str, workplace: Path, families: Sequence[str]) -> dict[str, Any]:
    """Of each family: the third step and what follows, from the checkpoint that the other kind saved."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    results: dict[str, Any] = {}
    for family in families:
        trainer = Trainer(cases.config_of(workplace / family, workplace / whose / family))
        assert trainer.load_checkpoint() == 2
        third = cases.steps(trainer, 1, cases.LR)
        results[family] = {"third": third, "after": cases.canary_logps(trainer)}
        trainer.close()
    return results


def converted(workplace: Path, families: Sequence[str]) -> dict[str, bool]:
    """Of each family: whether a folder converted there and back has the same bytes."""
    from safetensors.torch import load_file

    from rlsys.trainer.checkpoints import conversion

    is_equal = {}
    for family in families:
        megatron_folder, back = workplace / f"{family}-there", workplace / f"{family}-back"
        conversion.hf_to_megatron(workplace / family, megatron_folder, {}, lambda *_: None)
        conversion.megatron_to_hf(megatron_folder, back, lambda *_: None)
        tensors_before, tensors_after = (
            {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}
            for folder in (workplace / family, back)
        )
        is_equal[family] = all(
            tensors_after[name].equal(tensor) for name, tensor in tensors_after.items()
        ) and bool(tensors_before)
    return is_equal


def shared(workplace: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """Of each layout: what a trainer shares, and its gaps, and which attention computed how many layers."""
    import transformer_engine.pytorch as te

    from rlsys.trainer.model.attention import PackedAttention
    from tests.helpers import prefix_cases as prefixes
    from tests.helpers import trainer_cases as cases

    cases.write_model(workplace / "model")
    for name, model_kwargs in (cases.MODELS | prefixes.MODELS).items():
        cases.write_model(workplace / name, **model_kwargs)
    calls: Counter[str] = Counter()

    def counted(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            packed = kwargs.get("packed_seq_params")
            calls[f"{name} of shared tokens" if packed is not None and packed.prefixes else name] += 1
            return forward(*args, **kwargs)

        return count

    results: dict[str, Any] = {}
    for layout in layouts:
        with (
            mock.patch.object(PackedAttention, "forward", counted(PackedAttention.forward, "packed")),
            mock.patch.object(
                te.DotProductAttention, "forward", counted(te.DotProductAttention.forward, "engine")
            ),
            closing(prefixes.trainer_of(workplace, layout)) as trainer,
        ):
            results[layout] = {"sharing": trainer.passes.pack.shared}
            if trainer.passes.pack.shared != "no":
                calls.clear()
                results[layout] |= {"gaps": prefixes.gaps(trainer), "calls": dict(calls)}
    return results


def main(which: str, workplace: Path, families: Sequence[str]) -> None:
    sys.path.insert(0, str(ROOT))
    import megatron_patches

    if which in ("stub", "prefixes"):
        sys.path.insert(0, str(ROOT / "tests/te_stub"))
        megatron_patches.have_transformer_engine = lambda: True
    megatron_patches.apply()
    results: dict[str, Any] = {}
    if which == "prefixes":
        results = shared(workplace, families)
    elif which != "back":
        results["trained"] = trained(which, workplace, families)
    if which in ("stub", "back"):
        results["loaded"] = loaded("plain" if which == "stub" else "stub", workplace, families)
    if which == "stub":
        results["converted"] = converted(workplace, families)
    (workplace / f"{which}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or FAMILIES)
