"""Train, save, load and convert tiny models with plain torch or with tests/te_stub in place of Transformer Engine.

`te_cases.py plain|stub|back|prefixes WORKPLACE [FAMILY|LAYOUT...]` writes its results to WORKPLACE/plain.json and so
on. `plain` and `stub` train. `stub` also loads the checkpoints of `plain` and converts models; `back` loads the
checkpoints of `stub` with plain torch. `prefixes` compares micro-batches with and without shared prefixes, on the
stub.
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


def train(mode: str, workplace: Path, families: Sequence[str]) -> dict[str, Any]:
    """Run two steps, save a checkpoint and run a third step, for each family."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    results: dict[str, Any] = {}
    for family in families:
        model = workplace / family
        if not model.exists():
            cases.write_model(model, family)
        trainer = Trainer(cases.config_of(model, workplace / mode / family))
        logps_before = cases.canary_logps(trainer)
        steps = cases.steps(trainer, 2, cases.LR)
        cases.save(trainer, 2)
        third = cases.steps(trainer, 1, cases.LR)
        results[family] = {"before": logps_before, "steps": [*steps, *third]}
        results[family]["after"] = cases.canary_logps(trainer)
        trainer.close()
    return results


def load(saved_mode: str, workplace: Path, families: Sequence[str]) -> dict[str, Any]:
    """Run the third step from the checkpoint that mode `saved_mode` saved, for each family."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    results: dict[str, Any] = {}
    for family in families:
        trainer = Trainer(cases.config_of(workplace / family, workplace / saved_mode / family))
        assert trainer.load_checkpoint() == 2
        third = cases.steps(trainer, 1, cases.LR)
        results[family] = {"third": third, "after": cases.canary_logps(trainer)}
        trainer.close()
    return results


def convert(workplace: Path, families: Sequence[str]) -> dict[str, bool]:
    """Return for each family whether a conversion to Megatron and back reproduces all tensors."""
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


def compare_prefixes(workplace: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """Return for each layout the sharing mode, the differences, and the number of calls of each attention."""
    import transformer_engine.pytorch as te

    from rlsys.trainer.model.attention import PackedAttention
    from tests.helpers import prefix_cases as prefixes
    from tests.helpers import trainer_cases as cases

    cases.write_model(workplace / "model")
    for name, model_kwargs in (cases.MODELS | prefixes.MODELS).items():
        cases.write_model(workplace / name, **model_kwargs)
    calls: Counter[str] = Counter()

    def with_count(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            packed = kwargs.get("packed_seq_params")
            calls[f"{name} of shared tokens" if packed is not None and packed.prefixes else name] += 1
            return forward(*args, **kwargs)

        return count

    results: dict[str, Any] = {}
    for layout in layouts:
        with (
            mock.patch.object(PackedAttention, "forward", with_count(PackedAttention.forward, "packed")),
            mock.patch.object(
                te.DotProductAttention, "forward", with_count(te.DotProductAttention.forward, "engine")
            ),
            closing(prefixes.trainer_of(workplace, layout)) as trainer,
        ):
            results[layout] = {"sharing": trainer.passes.pack.shared}
            if trainer.passes.pack.shared != "no":
                calls.clear()
                results[layout] |= {"gaps": prefixes.gaps(trainer), "calls": dict(calls)}
    return results


def main(mode: str, workplace: Path, families: Sequence[str]) -> None:
    sys.path.insert(0, str(ROOT))
    import megatron_patches

    if mode in ("stub", "prefixes"):
        sys.path.insert(0, str(ROOT / "tests/te_stub"))
        megatron_patches.have_transformer_engine = lambda: True
    megatron_patches.apply()
    results: dict[str, Any] = {}
    if mode == "prefixes":
        results = compare_prefixes(workplace, families)
    elif mode != "back":
        results["trained"] = train(mode, workplace, families)
    if mode in ("stub", "back"):
        results["loaded"] = load("plain" if mode == "stub" else "stub", workplace, families)
    if mode == "stub":
        results["converted"] = convert(workplace, families)
    (workplace / f"{mode}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or FAMILIES)
