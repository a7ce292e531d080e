"""Whole models between Hugging Face folders and Megatron checkpoints, tensor by tensor, by one process.

A checkpoint made here has the model's weights only, beside its config.json and tokenizer: `model.path` may name it.
It has one file for each rank of the layout that it is made for, and loads in every other one too.
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
from rlsys.convert.output import new_folder, partial_of
from rlsys.convert.rules import Rule
from rlsys.convert.stack import stacked
from rlsys.convert.table import Entry, entries
from rlsys.convert.torch_dist import Box, DistReader, DistWriter
from rlsys.core.errors import RunError, UserError
from rlsys.trainer import setup
from rlsys.trainer.checkpoints import checkpoint, manifest
from rlsys.trainer.checkpoints.addresses import Address, addresses
from rlsys.trainer.model.chunks import MTP

Advance = Callable[[int, int], None]
"""Told after each tensor: elements done, elements in all."""

_NOT_THE_MODEL = ("optimizer.", "average.", "reference.", "value_head.", "critic.")
"""Begin the keys of what else a run's checkpoint holds."""


@dataclass(frozen=True)
class Done:
    """What was converted. `carried`: tensors that nobody here trains."""

    tensors: int
    elements: int
    carried: int = 0


# -- Hugging Face -> Megatron -------------------------------------------------------------------------------


def hf_to_megatron(folder: Path, out: Path, layout: dict[str, int], advance: Advance) -> Done:
    """Raises UserError that names the tensor, the size or the folder that does not fit."""
    hf = HFConfig.read(folder)
    config = _config(folder, layout)
    check_layout(config, hf)
    tensors = HFTensors(folder, hf)
    total = _elements(hf)
    done = Done(0, 0, len(tensors.carried))
    partial, size = partial_of(out), tensors.bytes
    with new_folder(out, size), _one_rank(folder) as alone:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with DistWriter(partial) as writer:
            for entry, address in addresses(alone, hf):
                full = to_megatron(entry.rule, [tensors.read(name) for name in entry.hf], hf)
                for rank, start, length in pieces(entry, address, config, hf):
                    part = full[tuple(slice(a, a + n) for a, n in zip(start, length, strict=True))]
                    writer.put(rank, address.key, address.shape, address.box(start, length), part)
                done = Done(done.tensors + len(entry.hf), done.elements + full.numel(), done.carried)
                advance(done.elements, total)
        writer.finish({"step": 0})
        save_carried(partial, tensors)
        copy_side_files(folder, partial)
        manifest.write(partial, 0, None, {})
        publish(partial, out)
    return done


def pieces(
    entry: Entry, address: Address, config: Config, hf: HFConfig
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(rank that will load it, first element, size) of the parts of one parameter, in megatron's order of ranks."""
    p, size = config.parallel, address.parameter
    lanes = p.world_size // p.pp
    first = _stage(entry, config, hf) * lanes
    ranks = p.tp
    if entry.expert is not None:
        ranks = p.expert_tp
        first += entry.expert // (hf.experts // p.ep) * ranks
    for rank, start, length in _cuts(entry.rule, size, ranks):
        cut = entry.rule.cut or 0
        yield (
            first + rank,
            tuple(start if axis == cut else 0 for axis in range(len(size))),
            tuple(length if axis == cut else n for axis, n in enumerate(size)),
        )


def _cuts(rule: Rule, size: tuple[int, ...], ranks: int) -> Iterator[tuple[int, int, int]]:
    """(rank, first, length) along the axis of the cut; each section is cut (rlsys.convert.layout)."""
    if rule.cut is None:
        yield 0, 0, size[0]
        return
    pieces = sections(rule) * ranks
    length = size[rule.cut] // pieces
    for i in range(pieces):
        yield i % ranks, i * length, length


def _stage(entry: Entry, config: Config, hf: HFConfig) -> int:
    pp = config.parallel.pp
    if entry.layer is not None:
        return entry.layer // stage_layers(hf.layers, pp)[0]
    return 0 if entry.megatron.startswith("embedding.") else pp - 1


# -- Megatron -> Hugging Face -------------------------------------------------------------------------------


def megatron_to_hf(where: Path, out: Path, advance: Advance) -> Done:
    """`where`: a converted checkpoint, a run folder (its newest), or one of the checkpoints in it.

    Raises UserError for what is no checkpoint, one that is damaged, or one of another model.
    """
    found = find_checkpoint(where)
    model = model_of(found)
    hf = _as_held(found, HFConfig.read(model))
    _check_whole(found)
    lora = _lora_of(found)
    total, done = _elements(hf), Done(0, 0)
    with _one_rank(model) as alone:
        source: MegatronTensors | AdaptedTensors
        if lora is not None:
            source = AdaptedTensors(found, _source(model, hf, alone), hf, lora)
            base: HFTensors | MegatronTensors
            base = HFTensors(model, hf) if is_hf(model) else MegatronTensors(model, alone, hf)
            needed = base.bytes
        else:
            source = MegatronTensors(found, alone, hf)
            needed = source.bytes
        with new_folder(out, needed):

            def tensors() -> Iterator[tuple[str, Tensor]]:
                nonlocal done
                for name, tensor in source.tensors():
                    yield name, tensor
                    done = Done(done.tensors + 1, done.elements + tensor.numel())
                    advance(done.elements, total)

            write_hf(out, model, with_carried(stacked(tensors(), hf), model, hf))
    return done


def find_checkpoint(where: Path) -> Path:
    """Raises UserError when there is none."""
    if not where.is_dir():
        raise UserError(f"{where}: no such folder")
    folder = where / "checkpoints"
    if steps := checkpoint.steps(folder):
        return checkpoint.path_of(folder, steps[-1])
    if not (where / ".metadata").is_file():
        raise UserError(f"{where}: neither a Megatron checkpoint in torch_dist format nor a run that has one")
    return where


def model_of(found: Path) -> Path:
    """The folder with the config.json and the tokenizer of a checkpoint."""
    if (found / "config.json").is_file():
        return found
    run = found.parent.parent
    if not (run / "config.yaml").is_file():
        raise UserError(
            f"{found}: no config.json in it, and {run} is not a run folder, so the model is unknown"
        )
    return load_run_config(run).model.path


def _lora_of(found: Path) -> LoraConfig | None:
    """Of the run that left the checkpoint."""
    run = found.parent.parent / "config.yaml"
    return load_config(run).trainer.lora if not (found / "config.json").is_file() else None


def _as_held(where: Path, hf: HFConfig) -> HFConfig:
    """With layers for multi-token prediction, if a checkpoint has trained ones."""
    trained = not is_hf(where) and any(key.startswith(MTP) for key in DistReader(where).shapes)
    return replace(hf, mtp=trained)


class AdaptedTensors:
    """A model with a checkpoint's adapters merged. Raises UserError for a checkpoint that does not hold them."""

    def __init__(
        self, folder: Path, model: Iterable[tuple[str, Tensor]], hf: HFConfig, lora: LoraConfig
    ) -> None:
        self._reader, self._model, self._scale = DistReader(folder), model, lora.alpha / lora.rank
        self._keys: dict[str, tuple[str, str]] = {}
        for entry, pairs in adapted(hf, lora):
            for name, pair in zip((list(entry.hf)[pair.part] for pair in pairs), pairs, strict=True):
                a, b = (ADAPTERS + next(iter(factor.hf)) for factor in (pair.a, pair.b))
                self._keys[name] = a, b
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
    """A checkpoint's model under Hugging Face names. Raises UserError unless each tensor has its place, and fits."""

    def __init__(self, folder: Path, alone: Config, hf: HFConfig) -> None:
        self._reader = DistReader(folder)
        self._hf = hf
        self._addresses = list(addresses(alone, hf))
        expected = {address.key: address.shape for _, address in self._addresses}
        stored = self._reader.shapes
        for key, shape in expected.items():
            if key not in stored:
                raise UserError(f"{folder}: a checkpoint of another model: {key} is missing")
            if stored[key] != shape:
                raise UserError(
                    f"{folder}: a checkpoint of another model: {key} has shape {stored[key]}, expected {shape}"
                )
        self._reader.check_types(expected)
        rest = sorted(stored.keys() - expected.keys())
        beside = _NOT_THE_MODEL if hf.mtp else (*_NOT_THE_MODEL, MTP)
        if extra := [key for key in rest if not key.startswith(beside)]:
            raise UserError(f"{folder}: {len(extra)} tensor(s) have no place in the model, first: {extra[0]}")
        self.bytes = sum(self._reader.bytes_of(key) for key in expected)
        """Of the model; a run's checkpoint also holds the optimizer's state."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for entry, address in self._addresses:
            full = self._reader.read(address.key, address.box()).reshape(address.parameter)
            yield from zip(entry.hf, to_hf(entry.rule, full, self._hf), strict=True)


# -- comparison ---------------------------------------------------------------------------------------------


def verify(a: Path, b: Path, advance: Advance) -> Done:
    """Compare two models, each a Hugging Face folder or a Megatron checkpoint, bit for bit.

    Raises RunError that says how many tensors differ, and names the first and by how much.
    """
    configs = [HFConfig.read(_model_folder(where)) for where in (a, b)]
    if all(_has_predictions(where, hf) for where, hf in zip((a, b), configs, strict=True)):
        configs = [replace(hf, mtp=True) for hf in configs]
    for field in fields(HFConfig):
        x, y = (getattr(c, field.name) for c in configs)
        if x != y and field.name not in ("family", "prediction_layers", "quantised"):
            raise RunError(f"{a} and {b} differ: {field.name} is {x} and {y}")
    done, differ, total = Done(0, 0), [], _elements(configs[0])
    with _one_rank(_model_folder(a)) as alone:
        sources = [_source(where, hf, alone) for where, hf in zip((a, b), configs, strict=True)]
        for (name, x), (_, y) in zip(*sources, strict=True):
            if x.dtype != y.dtype:
                differ.append(f"{name} ({x.dtype} and {y.dtype})")
            elif not torch.equal(_bits(x), _bits(y)):
                differ.append(f"{name} (by up to {(x.double() - y.double()).abs().max():.3g})")
            done = Done(done.tensors + 1, done.elements + x.numel())
            advance(done.elements, total)
    if differ:
        raise RunError(f"{len(differ)} of {done.tensors} tensors differ, first: {differ[0]}")
    return done


def _bits(x: Tensor) -> Tensor:
    """As whole numbers: NaN equals itself, and the two zeros differ."""
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def _has_predictions(where: Path, hf: HFConfig) -> bool:
    """Whether it has whole layers for multi-token prediction under the names of its family."""
    if not is_hf(where):
        return _as_held(find_checkpoint(where), hf).mtp
    wanted = {name for entry in entries(replace(hf, mtp=True)) for name in entry.hf}
    wanted -= {name for entry in entries(hf) for name in entry.hf}
    return bool(hf.family.mtp and wanted) and wanted <= HFTensors(where, hf).carried


def is_hf(where: Path) -> bool:
    return any(where.glob("*.safetensors"))


def _model_folder(where: Path) -> Path:
    return where if is_hf(where) else model_of(find_checkpoint(where))


def _source(where: Path, hf: HFConfig, alone: Config) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the name table's order. Folders are checked before the first one."""
    if not is_hf(where):
        found = find_checkpoint(where)
        _check_whole(found)
        if (lora := _lora_of(found)) is not None:
            return AdaptedTensors(found, _source(model_of(found), hf, alone), hf, lora).tensors()
        return MegatronTensors(found, alone, hf).tensors()
    tensors = HFTensors(where, hf)
    return ((name, tensors.read(name)) for entry in entries(hf) for name in entry.hf)


# -- common -------------------------------------------------------------------------------------------------


def _check_whole(found: Path) -> None:
    if told := manifest.damaged(found):
        raise UserError(f"{found}: the checkpoint is damaged: {'; '.join(told)}")


def _config(folder: Path, layout: dict[str, int]) -> Config:
    """Checked as a layout, but not as a run: nothing is trained."""
    try:
        parallel = ParallelConfig.model_validate(layout)
    except ValidationError as e:
        raise UserError(f"--{explain_error(e, ParallelConfig)}") from None
    return Config(model=ModelConfig(path=folder)).model_copy(update={"parallel": parallel})


class _one_rank:
    """Megatron's process groups for this process alone: asking it for addresses needs them."""

    def __init__(self, folder: Path) -> None:
        self._config = _config(folder, {})

    def __enter__(self) -> Config:
        setup.init_distributed(self._config)
        return self._config

    def __exit__(self, *_: Any) -> None:
        setup.leave_layout()


def _elements(hf: HFConfig) -> int:
    return sum(entry.elements for entry in entries(hf))
