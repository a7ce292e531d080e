"""Translates supervised fine-tuning, for `rlsys sft`."""

from __future__ import annotations

from rlsys.importers.draft import Draft
from rlsys.importers.sizes import Sizes, set_layout, set_steps
from rlsys.importers.verl.names import first_present
from rlsys.importers.verl.optimizer import is_old_fine_tuning, translate_optimizer
from rlsys.importers.verl.sizes import layout_names
from rlsys.importers.verl.trainer import translate_checkpoints, translate_lora


def translate_fine_tuning(d: Draft) -> None:
    """Translate supervised fine-tuning, for `rlsys sft`."""
    d.is_fine_tuning = True
    d.consumed.add("data.messages_key")
    model = first_present(d, "model.path", "model.partial_pretrain")
    d.require(model)
    d.require("data.train_files")
    run_setting = first_present(d, "trainer.default_local_dir", "trainer.experiment_name")
    run_dir = d.text("trainer.default_local_dir") or f"runs/{d.text(run_setting, 'imported')}"
    d.set_field("run.dir", run_dir, run_setting)
    d.set_field("model.path", d.text(model), model)
    d.set_field("model.dtype", "bfloat16")
    d.set_field("sft.traces", "chats")
    d.set_field("sft.params.path", d.get("data.train_files"), "data.train_files")
    batch = d.integer("data.train_batch_size", 256)
    d.set_field("sft.params.batch", batch, "data.train_batch_size")
    if d.text("data.messages_key", "messages") != "messages":
        d.reject("data.messages_key", "expected messages, the key of a row's chat in rlsys sft")
    for name in ("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys"):
        d.reject(
            name, "no counterpart: rows of rlsys sft have the keys `messages`, or `prompt` and `completion`"
        )
    set_steps(d, "trainer.total_training_steps", "trainer.total_epochs", 30)
    translate_optimizer(d, "optim", "sft", 1e-5 if is_old_fine_tuning(d) else 1e-3)
    translate_checkpoints(d)
    translate_lora(d, "model")
    m = first_present(d, "engine.tensor_model_parallel_size", "megatron.tensor_model_parallel_size")
    m = m.removesuffix(".tensor_model_parallel_size")
    names = layout_names(m) | {"nodes": ("trainer.nnodes",), "gpus": ("trainer.n_gpus_per_node",)}
    sizes = Sizes(
        nodes=d.integer("trainer.nnodes", 1), gpus=d.integer("trainer.n_gpus_per_node", 8),
        etp=d.integer(names["etp"][0], 0) or None,
        **{name: d.integer(names[name][0], 1) for name in ("tp", "pp", "cp", "ep")},
    )  # fmt: skip
    set_layout(d, sizes, names, batch)
