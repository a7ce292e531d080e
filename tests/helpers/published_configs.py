"""Write a table of the result of `rlsys explain` for each published config.json of a folder. With --shrunk, also
check conversions, log-probs, a training step and an export of a tiny random model of each config:

    python -m tests.helpers.published_configs CONFIGS TABLE.md [--shrunk WORKPLACE] [--only WORD ...] [--no-layers]

Without --no-layers, explain builds the layers of every supported model, which takes 20 seconds each.

CONFIGS holds NAME.json files, or folders NAME with a config.json.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 120)] for i in range(1, 4)]
LAYERS = 4
EXACT = 1e-5
"""Largest difference of a log-prob from transformers; its own rounding error in float32 may be larger."""
_EXPERTS_IN_FFN = ("mixtral", "olmoe", "minimax_m2", "gpt_oss")
"""Model types whose intermediate_size is the size of an expert."""
_SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "max_position_embeddings": 256, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "shared_expert_intermediate_size": 64, "rotary_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_window_layers": LAYERS, "sliding_window": 16,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip


def read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the config.json of each model, by name."""
    files = {p.stem: p for p in folder.glob("*.json")} | {
        p.parent.name: p for p in folder.glob("*/config.json")
    }
    return {name: json.loads(files[name].read_text()) for name in sorted(files)}


def shrink(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config with small sizes and without quantization. Switches, types and group counts stay."""
    config = copy.deepcopy(raw)
    config.pop("quantization_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = _shrink_language(config["text_config"])
        if "vision_config" in config:
            config["vision_config"] |= _TOWER
        return config
    return _shrink_language(config)


def _shrink_language(raw: dict[str, Any]) -> dict[str, Any]:
    small = {name: size for name, size in _SMALL.items() if raw.get(name)}
    is_multi_head = raw.get("num_key_value_heads") == raw.get("num_attention_heads")
    kind, latent = str(raw.get("model_type")), "kv_lora_rank" in raw
    if raw.get("num_key_value_heads"):
        small["num_key_value_heads"] = 4 if is_multi_head else 2
    if raw.get("head_dim"):
        small["head_dim"] = 8 if latent else 16
    small["intermediate_size"] = 32 if kind in _EXPERTS_IN_FFN else 96
    if raw.get(
        "moe_intermediate_size"
    ):  # transformers recognises a transposed tensor of Qwen3-VL by its shape
        small["moe_intermediate_size"] = 128 if kind.startswith("qwen3_vl") else 32
    groups = raw.get("n_group") or 1
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if raw.get(name):
            small[name] = 8 if groups <= 4 else 16
    for name in ("num_experts_per_tok", "moe_k", "experts_per_token"):
        if raw.get(name):
            small[name] = min(raw[name], 2 if groups == 1 else 4)
    for name in ("first_k_dense_replace", "moe_layer_start_index"):
        if raw.get(name):
            small[name] = min(raw[name], 2)
    if raw.get("moe_layer_end_index", -1) != -1:
        small["moe_layer_end_index"] = LAYERS - 1
    for name in ("layer_types", "mlp_layer_types"):
        if raw.get(name):
            small[name] = raw[name][:LAYERS]
    rope = raw.get("rope_scaling") or {}
    if isinstance(rope.get("mrope_section"), list):
        small["rope_scaling"] = {**rope, "mrope_section": [2, 3, 3]}
    spread = 0.1 if kind in ("qwen3_next", "gpt_oss") else 0.2
    return {
        **raw,
        **small,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "initializer_range": spread,
    }


# -- rlsys explain -------------------------------------------------------------------------------------------------


def explain(raw: dict[str, Any], layers: bool = True) -> tuple[str, str]:
    """Run `rlsys explain` on a model folder that holds only this config.json.

    Args:
        raw: The config.json.
        layers: Build the layers of the trainer, as the command does.

    Returns:
        "read", "refused" or "FAULT", and a description of the model or the error.
    """
    from rlsys.cli import main as cli
    from rlsys.cli import preflight
    from rlsys.convert.config import HFConfig

    stderr = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        words = [
            "explain",
            str(ROOT / "configs/quickstart.yaml"),
            f"model.path={folder}",
            f"run.dir={folder}/run",
        ]
        try:
            with ExitStack() as stack:
                stack.enter_context(redirect_stdout(io.StringIO()))
                stack.enter_context(redirect_stderr(stderr))
                if not layers:
                    stack.enter_context(patch.object(preflight.trial, "check_build", lambda config: None))
                code = cli.main(words)
        except SystemExit as e:
            code = int(e.code or 0)
        except Exception:  # noqa: BLE001 - the table reports every fault
            return "FAULT", traceback.format_exc()[-300:]
        message = stderr.getvalue().replace(f"{folder}/", "").replace(folder, "MODEL")
        if code:
            one_line = code == 2 and message.count("\n") == 1
            return ("refused" if one_line else "FAULT"), message.removeprefix("rlsys: error: ")
        hf = HFConfig.read(Path(folder))
    experts = f", {hf.experts} experts, {hf.experts_per_token} a token" if hf.experts else ""
    return "read", f"{hf.family.architecture}, {hf.layers} layers of {hf.hidden_size}{experts}"


# -- checks of a tiny model ----------------------------------------------------------------------------------------


def build(folder: Path, raw: dict[str, Any]) -> None:
    """Write a tiny random model of transformers, with the published form of its config.json."""
    import torch
    import transformers

    from tests.helpers import tiny

    (architecture,) = raw["architectures"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class.from_pretrained(folder)).float()
    for name, weight in model.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            weight.add_(torch.randn_like(weight) * 0.1)
        elif name.endswith("sinks"):
            weight.copy_(weight.bfloat16())
        elif not weight.any():
            weight.normal_(0, 0.2)
    tiny.save(model, folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


def log_probs(folder: Path, dtype: Any = None) -> Any:
    """Return the log-probs of SEQUENCES by transformers, in float32 or `dtype`."""
    import torch

    from tests.helpers import tiny

    model, logps = tiny.load(folder).to(dtype or torch.float32), []
    with torch.no_grad():
        for ids in SEQUENCES:
            logp = model(torch.tensor([ids])).logits[0, :-1].to(dtype).log_softmax(-1)
            logps.append(logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return torch.cat(logps)


def rounding(folder: Path, expected: Any) -> float:
    """Return the distance of transformers' log-probs in float32 from those in float64."""
    import torch

    return float((expected.double() - log_probs(folder, torch.float64)).abs().max())


def round_trip(folder: Path, work: Path) -> str:
    """Convert a model to a Megatron checkpoint of several ranks and back, and compare the tensors."""
    import torch
    from safetensors.torch import load_file

    from rlsys.convert.config import HFConfig
    from rlsys.trainer.checkpoints.conversion import hf_to_megatron, megatron_to_hf, verify

    layout = {"tp": 2, "ep": 2, "etp": 1} if HFConfig.read(folder).experts else {"tp": 2}
    hf_to_megatron(folder, work / "megatron", layout, lambda *_: None)
    megatron_to_hf(work / "megatron", work / "back", lambda *_: None)
    verify(folder, work / "back", lambda *_: None)
    tensors_before, tensors_after = (
        {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
        for path in (folder, work / "back")
    )
    is_equal = tensors_before.keys() == tensors_after.keys() and all(
        torch.equal(tensors_before[n], tensors_after[n]) for n in tensors_before
    )
    return "bit-equal" if is_equal else "equal under other names"


@contextmanager
def open_trainer(folder: Path, work: Path) -> Iterator[Any]:
    from rlsys.trainer import setup
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    trainer = None
    try:
        trainer = Trainer(cases.config_of(folder, work / "run"))
        yield trainer
    finally:
        if trainer is not None:
            trainer.close()
        else:
            setup.leave_layout()


def logprob_gap(trainer: Any, expected: Any) -> float:
    """Return the largest difference of the trainer's log-probs of SEQUENCES from the expected ones."""
    import torch

    logprobs = torch.tensor([logp for canary in trainer.canaries(SEQUENCES) for logp in canary.logp])
    return float((logprobs - expected).abs().max())


def _set_model_type(folder: Path) -> None:
    """Set the model type of transformers' own class, by which it renames experts. It has no type kimi_k2."""
    import transformers

    file = folder / "config.json"
    raw = json.loads(file.read_text())
    model_type = getattr(transformers, raw["architectures"][0]).config_class.model_type
    file.write_text(json.dumps({**raw, "model_type": model_type}))


def check_tiny_model(raw: dict[str, Any], work: Path) -> list[str]:
    """Check a tiny random model of this config.

    Returns:
        The result of the conversion to a checkpoint and back, the difference of log-probs from transformers, the
        rounding error of transformers, the gradient norm of a training step, and the difference of log-probs after
        transformers loads the export.
    """
    from tests.helpers import trainer_cases as cases

    shutil.rmtree(work, ignore_errors=True)
    folder = work / "model"
    build(folder, shrink(raw))
    results = [round_trip(folder, work)]
    with open_trainer(folder, work) as trainer:
        expected = log_probs(folder)
        results.append(f"{logprob_gap(trainer, expected):.1e}")
        results.append(f"{rounding(folder, expected):.1e}")
        update = trainer.update(trainer.passes.pack(cases.samples()), cases.policy_loss, cases.LR)
        results.append(f"{update.grad_norm:.3g}")
        trainer.export_hf(work / "exported")
        _set_model_type(work / "exported")
        results.append(f"{logprob_gap(trainer, log_probs(work / 'exported')):.1e}")
    shutil.rmtree(work, ignore_errors=True)
    return results


def convertible(raw: dict[str, Any]) -> bool:
    """Return whether rlsys supports the model, regardless of how its weights are stored."""
    from rlsys.convert.config import HFConfig
    from rlsys.core.errors import UserError

    try:
        HFConfig.of(shrink(raw), "config.json")
    except (UserError, KeyError):
        return False
    return True


def check_cells(raw: dict[str, Any], work: Path) -> list[str]:
    """Return the table cells of `check_tiny_model`, or a cell with its error."""
    from rlsys.core.errors import RlsysError

    try:
        return check_tiny_model(raw, work)
    except RlsysError as refusal:
        return [f"refused: {str(refusal).rpartition(f'{work}/')[2]}", *[""] * 4]
    except Exception:  # noqa: BLE001 - the table reports every fault
        return [f"FAULT {traceback.format_exc()[-300:]}", *[""] * 4]


def table(rows: Iterable[Iterable[str]]) -> str:
    def cell(text: str) -> str:
        return " ".join(text.replace("|", "\\|").split())

    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a table of published configs.")
    parser.add_argument("configs", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument(
        "--shrunk", type=Path, help="work folder; also check a tiny model of each supported config"
    )
    parser.add_argument("--no-layers", action="store_true", help="explain builds no layers")
    parser.add_argument("--only", nargs="*", default=[], help="take names that contain one of these words")
    args = parser.parse_args()
    if args.shrunk is not None:
        from rlsys.engine.cpu.platform import declare_torchvision_ops

        declare_torchvision_ops()
    rows, counts, first_names = [], Counter[str](), dict[str, str]()
    for name, raw in read_configs(args.configs).items():
        if args.only and not any(word in name for word in args.only):
            continue
        start_time = time.monotonic()
        kind, words = explain(raw, not args.no_layers)
        counts[kind] += 1
        row = [name, kind, words]
        if args.shrunk is not None:
            key = json.dumps(shrink(raw), sort_keys=True) if convertible(raw) else ""
            trial_cells = [f"as {first_names[key]}" if key in first_names else "", *[""] * 4]
            if key and key not in first_names:
                trial_cells, first_names[key] = check_cells(raw, args.shrunk / "model"), name
            row += trial_cells
        rows.append(row)
        print(f"{time.monotonic() - start_time:5.1f} s  {' | '.join(row)}"[:300], file=sys.stderr, flush=True)
    head = ["config", "explain", "says"]
    if args.shrunk is not None:
        head += [
            "conversion and back",
            "log-prob difference from transformers",
            "rounding error of transformers",
            "gradient norm of a step",
            "log-prob difference of the export",
        ]
    args.table.write_text(table([head, ["---"] * len(head), *rows]))
    print(f"{sum(counts.values())} configs: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))


if __name__ == "__main__":
    main()
