"""Conversion of whole models between Hugging Face folders and Megatron checkpoints, tensor by tensor, in one process.

A converted checkpoint contains only the model's weights, its config.json and its tokenizer, and can be used as
`model.path`. It has one file for each rank of the requested layout, and any other layout can load it, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rlsys.config import Config, explain_error, load_config, load_run_config
from rlsys.config.trainer import LoraConfig, ModelConfig, ParallelConfig
from rlsys.convert.adapters import ADAPTERS, adapted
from rlsys.convert.carried import save_carried, with_carried
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout, stage_layers
from rlsys.convert.hf import HFTensors, copy_side_files, publish, write_hf
from rlsys.convert.layout import sections, to_hf, to_megatron
from rlsys.convert.output import guard_output, partial_of
from rlsys.convert.rules import Rule
from rlsys.convert.stack import stack_experts
from rlsys.convert.table import Entry, entries
from rlsys.convert.torch_dist import Box, DistReader, DistWriter
from rlsys.core.errors import RunError, UserError
from rlsys.trainer import setup
from rlsys.trainer.checkpoints import checkpoint, manifest
from rlsys.trainer.checkpoints.addresses import Address, addresses
from rlsys.trainer.model.chunks import MTP

ProgressCallback = Callable[[int, int], None]
"""Callback after each tensor: (number of converted elements, total number of elements)."""

_OTHER_PREFIXES = ("optimizer.", "average.", "reference.", "value_head.", "critic.")
"""Prefixes of the keys of a run's checkpoint that do not belong to the exported model."""


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion or a comparison.

    Attributes:
        tensors: Number of converted tensors of the Hugging Face folder.
        elements: Number of their elements.
        carried: Number of tensors that are copied, because the trainer does not train them.
    """

    tensors: int
    elements: int
    carried: int = 0

    def add(self, tensors: int, elements: int) -> ConversionResult:
        """Return the result with additional tensors."""
        return replace(self, tensors=self.tensors + tensors, elements=self.elements + elements)


# -- Hugging Face -> Megatron -------------------------------------------------------------------------------


def hf_to_megatron(
    folder: Path, out: Path, layout: dict[str, int], advance: ProgressCallback
) -> ConversionResult:
    """Convert a Hugging Face folder to a Megatron checkpoint.

    Args:
        folder: The Hugging Face folder.
        out: The new checkpoint.
        layout: Fields of `parallel`, by name; the checkpoint gets one file for each rank of this layout.
        advance: Progress callback.

    Raises:
        UserError: A tensor does not match config.json, the layout does not fit the model, `out` exists, or the disk
            is too small.
    """
    hf = HFConfig.read(folder)
    config = _config(folder, layout)
    check_layout(config, hf)
    tensors = HFTensors(folder, hf)
    total = _elements(hf)
    result = ConversionResult(0, 0, len(tensors.carried))
    partial = partial_of(out)
    with guard_output(out, tensors.bytes), _one_rank(folder) as single_rank:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with DistWriter(partial) as writer:
            for entry, address in addresses(single_rank, hf):
                full = to_megatron(entry.rule, [tensors.read(name) for name in entry.hf], hf)
                for rank, start, length in rank_slices(entry, address, config, hf):
                    part = full[tuple(slice(a, a + n) for a, n in zip(start, length, strict=True))]
                    writer.write(rank, address.key, address.shape, address.box(start, length), part)
                result = result.add(len(entry.hf), full.numel())
                advance(result.elements, total)
        writer.finish({"step": 0})
        save_carried(partial, tensors)
        copy_side_files(folder, partial)
        manifest.write(partial, 0, None, {})
        publish(partial, out)
    return result


def rank_slices(
    entry: Entry, address: Address, config: Config, hf: HFConfig
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the parts of a parameter that ranks hold.

    Yields:
        (global rank in Megatron's order, index of the part's first element, shape of the part).
    """
    p, shape = config.parallel, address.parameter_shape
    ranks_per_stage = p.world_size // p.pp
    first_rank = _stage(entry, config, hf) * ranks_per_stage
    ranks = p.tp
    if entry.expert is not None:
        ranks = p.expert_tp
        first_rank += entry.expert // (hf.experts // p.ep) * ranks
    shard_axis = entry.rule.shard_axis or 0
    for rank, start, length in _rank_sections(entry.rule, shape, ranks):
        yield (
            first_rank + rank,
            tuple(start if axis == shard_axis else 0 for axis in range(len(shape))),
            tuple(length if axis == shard_axis else n for axis, n in enumerate(shape)),
        )


def _rank_sections(rule: Rule, shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first index, length) of the parts along the sharded axis.

    Every section of the parameter (rlsys.convert.layout) is sharded separately. A parameter without a sharded axis
    belongs to rank 0.
    """
    if rule.shard_axis is None:
        yield 0, 0, shape[0]
        return
    parts = sections(rule) * ranks
    length = shape[rule.shard_axis] // parts
    for i in range(parts):
        yield i % ranks, i * length, length


def _stage(entry: Entry, config: Config, hf: HFConfig) -> int:
    """Return the pipeline stage that holds the entry."""
    pp = config.parallel.pp
    if entry.layer is not None:
        return entry.layer // stage_layers(hf.layers, pp)[0]
    return 0 if entry.megatron.startswith("embedding.") else pp - 1


# -- Megatron -> Hugging Face -------------------------------------------------------------------------------


def megatron_to_hf(path: Path, out: Path, advance: ProgressCallback) -> ConversionResult:
    """Convert a Megatron checkpoint to a Hugging Face folder.

    Args:
        path: A converted checkpoint, a checkpoint of a run, or a run folder, whose newest checkpoint is converted.
        out: The new folder.
        advance: Progress callback.

    Raises:
        UserError: `path` is not a checkpoint, is damaged, or belongs to another model, `out` exists, or the disk is
            too small.
    """
    checkpoint_path = find_checkpoint(path)
    model = model_of(checkpoint_path)
    hf = _with_mtp_layers(checkpoint_path, HFConfig.read(model))
    _check_intact(checkpoint_path)
    total, result = _elements(hf), ConversionResult(0, 0)
    with _one_rank(model) as single_rank:
        named_tensors, size = _merged_tensors(checkpoint_path, model, hf, single_rank)
        with guard_output(out, size):

            def tensors() -> Iterator[tuple[str, Tensor]]:
                nonlocal result
                for name, tensor in named_tensors:
                    yield name, tensor
                    result = result.add(1, tensor.numel())
                    advance(result.elements, total)

            write_hf(out, model, with_carried(stack_experts(tensors(), hf), model, hf))
    return result


def _merged_tensors(
    checkpoint_path: Path, model: Path, hf: HFConfig, single_rank: Config
) -> tuple[Iterator[tuple[str, Tensor]], int]:
    """Return (name, tensor) of a checkpoint's model, adapters merged, and the size of these tensors in bytes."""
    lora = _lora_of(checkpoint_path)
    if lora is None:
        source = MegatronTensors(checkpoint_path, single_rank, hf)
        return source.tensors(), source.bytes
    adapted_tensors = AdaptedTensors(checkpoint_path, _source(model, hf, single_rank), hf, lora)
    base: HFTensors | MegatronTensors
    base = HFTensors(model, hf) if is_hf(model) else MegatronTensors(model, single_rank, hf)
    return adapted_tensors.tensors(), base.bytes


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint if it is a run folder.

    Raises:
        UserError: `path` is not a folder, or contains no checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    folder = path / "checkpoints"
    if steps := checkpoint.steps(folder):
        return checkpoint.path_of(folder, steps[-1])
    if not (path / ".metadata").is_file():
        raise UserError(
            f"{path}: expected a Megatron checkpoint in torch_dist format, or a run folder with one"
        )
    return path


def model_of(checkpoint_path: Path) -> Path:
    """Return the folder that contains the config.json and the tokenizer of a checkpoint.

    It is the checkpoint itself if it is a converted one, otherwise model.path of the run.

    Raises:
        UserError: The checkpoint is not converted, and its run has no config.yaml.
    """
    if (checkpoint_path / "config.json").is_file():
        return checkpoint_path
    run = checkpoint_path.parent.parent
    if not (run / "config.yaml").is_file():
        raise UserError(
            f"{checkpoint_path}: its model is unknown; expected a config.json in this folder, or a run in {run}"
        )
    return load_run_config(run).model.path


def _lora_of(checkpoint_path: Path) -> LoraConfig | None:
    """Read trainer.lora of the run that wrote the checkpoint; None for a converted checkpoint."""
    if (checkpoint_path / "config.json").is_file():
        return None
    return load_config(checkpoint_path.parent.parent / "config.yaml").trainer.lora


def _with_mtp_layers(path: Path, hf: HFConfig) -> HFConfig:
    """Return the model's configuration, with MTP layers if the checkpoint contains trained ones."""
    trained = not is_hf(path) and any(key.startswith(MTP) for key in DistReader(path).shapes)
    return replace(hf, mtp=trained)


class AdaptedTensors:
    """Tensors of a base model with a checkpoint's adapters merged.

    Args:
        folder: The checkpoint, which contains the adapters.
        model: (name, tensor) of the base model.
        hf: The model's configuration.
        lora: Configuration of the adapters.

    Raises:
        UserError: The checkpoint lacks an adapter.
    """

    def __init__(
        self, folder: Path, model: Iterable[tuple[str, Tensor]], hf: HFConfig, lora: LoraConfig
    ) -> None:
        self._reader = DistReader(folder)
        self._model = model
        self._scale = lora.alpha / lora.rank
        self._keys: dict[str, tuple[str, str]] = {}
        for entry, pairs in adapted(hf, lora):
            names = list(entry.hf)
            for pair in pairs:
                a, b = (ADAPTERS + next(iter(factor.hf)) for factor in (pair.a, pair.b))
                self._keys[names[pair.part]] = a, b
        if missing := {key for keys in self._keys.values() for key in keys} - self._reader.shapes.keys():
            raise UserError(f"{folder}: a checkpoint of another model: {min(missing)} is missing")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model:
            if name in self._keys:
                a, b = (self._read(key) for key in self._keys[name])
                tensor = torch.addmm(tensor.float(), b, a, alpha=self._scale).to(tensor.dtype)
            yield name, tensor

    def _read(self, key: str) -> Tensor:
        shape = self._reader.shapes[key]
        return self._reader.read(key, Box((0,) * len(shape), shape)).float()


class MegatronTensors:
    """Tensors of a checkpoint's model under Hugging Face names.

    Raises:
        UserError: A tensor of the checkpoint is missing or unexpected, or has another shape than the model's.
    """

    def __init__(self, folder: Path, single_rank: Config, hf: HFConfig) -> None:
        self._reader = DistReader(folder)
        self._hf = hf
        self._addresses = list(addresses(single_rank, hf))
        expected = {address.key: address.shape for _, address in self._addresses}
        shapes = self._reader.shapes
        for key, shape in expected.items():
            if key not in shapes:
                raise UserError(f"{folder}: a checkpoint of another model: {key} is missing")
            if shapes[key] != shape:
                raise UserError(
                    f"{folder}: a checkpoint of another model: {key} has shape {shapes[key]}, expected {shape}"
                )
        self._reader.check_types(expected)
        unexpected = sorted(shapes.keys() - expected.keys())
        prefixes = _OTHER_PREFIXES if hf.mtp else (*_OTHER_PREFIXES, MTP)
        if extra := [key for key in unexpected if not key.startswith(prefixes)]:
            raise UserError(f"{folder}: {len(extra)} tensor(s) do not belong to the model, first: {extra[0]}")
        self.bytes = sum(self._reader.bytes_of(key) for key in expected)
        """Size of the model; a run's checkpoint also contains the optimizer's state."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for entry, address in self._addresses:
            full = self._reader.read(address.key, address.box()).reshape(address.parameter_shape)
            yield from zip(entry.hf, to_hf(entry.rule, full, self._hf), strict=True)


# -- comparison ---------------------------------------------------------------------------------------------


def verify(a: Path, b: Path, advance: ProgressCallback) -> ConversionResult:
    """Compare two models, each a Hugging Face folder or a Megatron checkpoint, bit by bit.

    Args:
        a: The first model.
        b: The second model.
        advance: Progress callback.

    Raises:
        UserError: One of the models cannot be read.
        RunError: The models differ. The message states the number of different tensors, and the name and the largest
            difference of the first one.
    """
    configs = [HFConfig.read(_model_folder(path)) for path in (a, b)]
    if all(_has_predictions(path, hf) for path, hf in zip((a, b), configs, strict=True)):
        configs = [replace(hf, mtp=True) for hf in configs]
    for field in fields(HFConfig):
        x, y = (getattr(c, field.name) for c in configs)
        if x != y and field.name not in ("family", "prediction_layers", "quantised"):
            raise RunError(f"{a} and {b} differ: {field.name} is {x} and {y}")
    result, total = ConversionResult(0, 0), _elements(configs[0])
    differences: list[str] = []
    with _one_rank(_model_folder(a)) as single_rank:
        sources = [_source(path, hf, single_rank) for path, hf in zip((a, b), configs, strict=True)]
        for (name, tensor), (_, second) in zip(*sources, strict=True):
            if difference := _difference(tensor, second):
                differences.append(f"{name} ({difference})")
            result = result.add(1, tensor.numel())
            advance(result.elements, total)
    if differences:
        raise RunError(f"{len(differences)} of {result.tensors} tensors differ, first: {differences[0]}")
    return result


def _difference(x: Tensor, y: Tensor) -> str:
    """Describe the difference between two tensors; "" if they are equal."""
    if x.dtype != y.dtype:
        return f"{x.dtype} and {y.dtype}"
    if torch.equal(_bits(x), _bits(y)):
        return ""
    return f"by up to {(x.double() - y.double()).abs().max():.3g}"


def _bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, so that NaN equals itself and 0 differs from -0."""
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def _has_predictions(path: Path, hf: HFConfig) -> bool:
    """Return whether the model at `path` contains complete MTP layers, under the names of its family."""
    if not is_hf(path):
        return _with_mtp_layers(find_checkpoint(path), hf).mtp
    mtp_names = {name for entry in entries(replace(hf, mtp=True)) for name in entry.hf}
    mtp_names -= {name for entry in entries(hf) for name in entry.hf}
    return bool(hf.family.mtp and mtp_names) and mtp_names <= HFTensors(path, hf).carried


def is_hf(path: Path) -> bool:
    """Return whether `path` contains safetensors files, as Hugging Face folders do."""
    return any(path.glob("*.safetensors"))


def _model_folder(path: Path) -> Path:
    return path if is_hf(path) else model_of(find_checkpoint(path))


def _source(path: Path, hf: HFConfig, single_rank: Config) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (name, tensor) of the model at `path`, in the order of the name table.

    Checks the files at once, before the first tensor is read.

    Raises:
        UserError: `path` contains no model, or its files do not match `hf`.
    """
    if not is_hf(path):
        checkpoint_path = find_checkpoint(path)
        _check_intact(checkpoint_path)
        if (lora := _lora_of(checkpoint_path)) is not None:
            return AdaptedTensors(
                checkpoint_path, _source(model_of(checkpoint_path), hf, single_rank), hf, lora
            ).tensors()
        return MegatronTensors(checkpoint_path, single_rank, hf).tensors()
    tensors = HFTensors(path, hf)
    return ((name, tensors.read(name)) for entry in entries(hf) for name in entry.hf)


# -- common -------------------------------------------------------------------------------------------------


def _check_intact(checkpoint_path: Path) -> None:
    if messages := manifest.find_damage(checkpoint_path):
        raise UserError(f"{checkpoint_path}: the checkpoint is damaged: {'; '.join(messages)}")


def _config(folder: Path, layout: dict[str, int]) -> Config:
    """Return a config with the model `folder` and the layout; all other fields have their defaults.

    Raises:
        UserError: The layout is not a valid `parallel` section.
    """
    try:
        parallel = ParallelConfig.model_validate(layout)
    except ValidationError as e:
        raise UserError(f"--{explain_error(e, ParallelConfig)}") from None
    return Config(model=ModelConfig(path=folder)).model_copy(update={"parallel": parallel})


class _one_rank:
    """Context in which Megatron's process groups exist for this single process; `addresses` requires them.

    Entering it returns a config of the model without parallelism.
    """

    def __init__(self, folder: Path) -> None:
        self._config = _config(folder, {})

    def __enter__(self) -> Config:
        setup.init_distributed(self._config)
        return self._config

    def __exit__(self, *_: Any) -> None:
        setup.leave_layout()


def _elements(hf: HFConfig) -> int:
    """Return the number of elements of all entries of the name table."""
    return sum(entry.elements for entry in entries(hf))
