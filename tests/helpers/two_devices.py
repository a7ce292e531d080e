"""A host and a GPU on one CPU: tensors on the device `cpu:7` count as the GPU's.

All tensors are ordinary CPU tensors, so numbers, autograd and optimizers are real. `TwoDevices` notes which storages
are on the pretended GPU, answers `device`, `is_cuda`, `.cpu()` and `.to()` accordingly, and records

- each operation that CUDA refuses because its tensors are on different devices (`refused`),
- launches, synchronisations, copies to the device and host operations, by operation and place (`Counts`).

    with TwoDevices() as devices:
        step()
    assert not devices.refused
    devices.counts.launches.total()

Counts are those of operations at torch's dispatcher: an operation that computes is one launch, a view none. Kernels
inside one operation (a fused optimizer, a sort) are not told apart, and collectives are not counted.

`import_trainer()` must come before the first import of megatron.core: it has megatron's CUDA literals rewritten to
the pretended GPU. A process that called it runs no other test.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cpu", 7), torch.device("cpu")
_ROOT = Path(__file__).resolve().parents[2]
_TORCH = str(Path(torch.__file__).parent)

_ANY_DEVICE = {"aten::copy_", "aten::_to_copy", "aten::set_", "aten::_foreach_copy_"}
"""Operations that take tensors of both devices."""
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""CUDA takes their indices from the host, too."""
_READS = {
    "aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero", "aten::masked_select": "masked_select",
    "aten::_unique2": "unique", "aten::unique_consecutive": "unique", "aten::unique_dim": "unique",
    "aten::bincount": "bincount", "aten::equal": "equal", "aten::is_nonzero": "item",
}  # fmt: skip
"""The host waits for their result, or for its size."""
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::detach", "aten::alias")
_FACTORIES = {
    "zeros", "ones", "empty", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint", "eye", "linspace",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty",
    "new_full", "new_ones", "new_tensor", "from_numpy", "frombuffer", "empty_strided", "randperm", "scalar_tensor",
    "tril_indices", "triu_indices", "Tensor",
}  # fmt: skip


@dataclass
class Counts:
    """By operation and place, `OPERATION at FILE:LINE`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations that compute on the GPU."""
    synchronizations: Counter[str] = field(default_factory=Counter)
    """Waits of the host for the GPU: a scalar, a list or a copy is read, or a shape depends on values."""
    copies_to_device: Counter[str] = field(default_factory=Counter)
    host_operations: Counter[str] = field(default_factory=Counter)
    """Operations that compute on host tensors alone."""

    def totals(self) -> dict[str, int]:
        return {name: counter.total() for name, counter in vars(self).items()}


class _Storages:
    """A set of living storages."""

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self._prune_at = 2**16

    def __contains__(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        if storage is None or (reference := self._references.get(storage._cdata)) is None:
            return False
        if reference.expired():  # another storage has its address now
            del self._references[storage._cdata]
            return False
        return True

    def add(self, tensor: Tensor) -> None:
        if (storage := _storage(tensor)) is not None:
            self._references[storage._cdata] = StorageWeakRef(storage)
        if len(self._references) > self._prune_at:
            self._references = {key: r for key, r in self._references.items() if not r.expired()}
            self._prune_at = 2 * len(self._references) + 2**16

    def discard(self, tensor: Tensor) -> None:
        if (storage := _storage(tensor)) is not None:
            self._references.pop(storage._cdata, None)


_on_gpu, _anywhere = _Storages(), _Storages()
"""`_anywhere`: storages made by C++ without a device that Python sees, on whatever device CUDA would choose."""


def _storage(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()
        except NotImplementedError:  # a tensor without a storage
            return None


def on_gpu(tensor: Tensor) -> bool:
    return tensor in _on_gpu


def _put(tensor: Tensor, gpu: bool) -> None:
    _anywhere.discard(tensor)
    if gpu:
        _on_gpu.add(tensor)
    else:
        _on_gpu.discard(tensor)


def _is_gpu(device: object) -> bool:
    return isinstance(device, torch.device) and device == GPU


def _caller() -> FrameType | None:
    """The innermost frame outside torch and this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith((_TORCH, "<"))
    ):
        frame = frame.f_back
    return frame


def _place() -> str:
    """FILE:LINE of the caller."""
    frame = _caller()
    if frame is None:
        return "?"
    name = frame.f_code.co_filename.rpartition("site-packages/")[2].removeprefix(f"{_ROOT}/")
    return f"{name}:{frame.f_lineno}"


class TwoDevices:
    """Context manager. `refused`: `PROBLEM: OPERATION at FILE:LINE` -> count; `stacks` has one call stack of each."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.stacks: dict[str, str] = {}
        self.counts = Counts()
        self._modes = (_Calls(self), _Operations(self))

    def __enter__(self) -> TwoDevices:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def refuse(self, problem: str, operation: str) -> None:
        key = f"{problem}: {operation} at {_place()}"
        self.refused[key] += 1
        if key not in self.stacks:
            self.stacks[key] = "".join(traceback.format_stack(_caller(), limit=8))

    def synchronize(self, operation: str) -> None:
        self.counts.synchronizations[f"{operation} at {_place()}"] += 1


def _same_storage(one: Tensor, other: Tensor) -> bool:
    a, b = _storage(one), _storage(other)
    return a is not None and b is not None and a._cdata == b._cdata


class _Operations(TorchDispatchMode):
    """What reaches torch's dispatcher, backward passes in C++ included."""

    def __init__(self, owner: TwoDevices) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("c10d"):  # a group has a backend for each device
            return func(*args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        gpu = [t for t in inputs if on_gpu(t)]
        self._check(name, args, inputs, gpu)
        read = self._reads(name, args, gpu)
        out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        new_tensors = [t for t in outputs if not any(_same_storage(t, x) for x in inputs)]
        for tensor in new_tensors:
            self._locate(tensor, name, inputs, bool(gpu), kwargs.get("device"))
        self._count(func, name, inputs, new_tensors, gpu, read)
        return out

    def _check(self, name: str, args: Any, inputs: list[Tensor], gpu: list[Tensor]) -> None:
        if not gpu or name in _ANY_DEVICE:
            return
        if name in _INDEXED:
            target = args[0]
            if target in _anywhere:
                return
            if not on_gpu(target) and any(t is not None and on_gpu(t) for t in args[1]):
                self._owner.refuse("host tensor indexed by a GPU tensor", name)
            value = args[2] if len(args) > 2 else None
            if isinstance(value, Tensor) and value.dim() and on_gpu(value) != on_gpu(target):
                self._owner.refuse("values of another device", name)
        elif any(t.dim() and not on_gpu(t) and t not in _anywhere for t in inputs):
            self._owner.refuse("mixed devices", name)

    def _reads(self, name: str, args: Any, gpu: list[Tensor]) -> bool:
        """Whether the host waits here; counts it."""
        if not gpu:
            return False
        operation = _READS.get(name)
        if name in _INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            operation = "index by a mask"
        if name == "aten::repeat_interleave" and len(args) == 1:
            operation = "repeat_interleave"
        if name == "aten::copy_" and not on_gpu(args[0]):
            operation = "copy to the host"
        if operation is not None:
            self._owner.synchronize(operation)
        return operation is not None

    def _locate(self, tensor: Tensor, name: str, inputs: list[Tensor], gpu: bool, device: object) -> None:
        """Where a new tensor is."""
        if torch._C._current_graph_task_id() != -1 and not _is_gpu(device):  # in a backward pass
            if gpu:
                _put(tensor, True)
            else:
                _anywhere.add(tensor)
        elif name == "aten::_to_copy" and not _is_gpu(device):
            _put(tensor, gpu)  # _Calls takes care of what goes to the host
        elif inputs and not gpu and any(t in _anywhere for t in inputs):
            _anywhere.add(tensor)
        elif not inputs and _inside and _inside[-1] not in _FACTORIES:
            _anywhere.add(tensor)  # inside a composite operation, which asks a tensor for its real device
        elif isinstance(device, torch.device):
            _put(tensor, _is_gpu(device))
        else:
            _put(tensor, gpu)

    def _count(
        self, func: Any, name: str, inputs: list[Tensor], made: list[Tensor], gpu: list[Tensor], read: bool
    ) -> None:
        if name.startswith(_ALLOCATIONS) or not (made or func._schema.is_mutable or read):
            return  # memory without contents, or a view
        counts, key = self._owner.counts, f"{name.removeprefix('aten::')} at {_place()}"
        to_gpu = any(on_gpu(t) for t in made) or (
            func._schema.is_mutable and bool(inputs) and on_gpu(inputs[0])
        )
        if name in _ANY_DEVICE and inputs and to_gpu and not all(on_gpu(t) for t in inputs):
            counts.copies_to_device[key] += 1
        elif gpu or to_gpu:
            counts.launches[key] += 1
        else:
            counts.host_operations[key] += 1


_inside: list[str] = []
"""Names of the torch functions that run, the innermost last."""


class _Calls(TorchFunctionMode):
    """What Python asks of a tensor: its device, and copies to one."""

    def __init__(self, owner: TwoDevices) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__" and first is not None:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute in ("device", "is_cuda", "is_cpu"):
                gpu = on_gpu(first)
                return {"device": GPU if gpu else HOST, "is_cuda": gpu, "is_cpu": not gpu}[attribute]
        if first is not None:
            if name == "cpu":
                return self._to_host(first) if on_gpu(first) else first
            if name == "to":
                return self._to(func, first, args, kwargs)
            if name == "pin_memory":
                return first
            if name == "record_stream":
                return None
            if on_gpu(first) and name in ("numpy", "__array__"):
                self._owner.refuse("numpy of a GPU tensor", name)
            if on_gpu(first) and name == "tolist":
                self._owner.synchronize(name)
        _inside.append(name)
        try:
            out = func(*args, **kwargs)
        finally:
            _inside.pop()
        if name in ("tensor", "as_tensor", "scalar_tensor", "asarray") and isinstance(out, Tensor):
            device = kwargs.get("device")
            if device is not None:
                gpu = _is_gpu(torch.device(device))
                if gpu and out is first and not on_gpu(first):
                    out = out.clone()
                _put(out, gpu)
        return out

    def _to(self, func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
        other = kwargs.get("other", args[1] if len(args) > 1 else None)
        if isinstance(other, Tensor):
            args, kwargs = (tensor, GPU if on_gpu(other) else HOST, other.dtype), {}
        device = _device_of((*args[1:], *kwargs.values()))
        if _is_gpu(device) and on_gpu(tensor) and not kwargs.get("copy"):
            # Nothing to copy, though the real device is not `cpu:7`.
            dtypes = [a for a in (*args[1:], kwargs.get("dtype")) if isinstance(a, torch.dtype)]
            return func(tensor, dtypes[0]) if dtypes else tensor
        out: Tensor = func(*args, **kwargs)
        leaves = device is not None and not _is_gpu(device) and on_gpu(tensor)
        return self._to_host(out) if leaves else out

    def _to_host(self, tensor: Tensor) -> Tensor:
        self._owner.synchronize("copy to the host")
        with torch._C._DisableTorchDispatch():
            out = tensor.clone()
        _put(out, False)
        return out


def _device_of(values: Sequence[object]) -> torch.device | None:
    for value in values:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"):
            return torch.device(value)
    return None


def import_trainer() -> None:
    """Import rlsys.trainer such that it and megatron-core work on the pretended GPU."""
    from megatron_patches import cpu_import

    class OnPretendedGpu(cpu_import.Rewrite):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            function = node.func
            if isinstance(function, ast.Attribute):
                if function.attr == "cuda":
                    function.attr, node.args, node.keywords = "to", [ast.Constant(str(GPU))], []
                elif function.attr in ("to", "device") and node.args and cpu_import._is(node.args[0], "cuda"):
                    node.args[0] = ast.Constant(str(GPU))
            return super().visit_Call(node)

        def visit_keyword(self, node: ast.keyword) -> ast.AST:
            if node.arg == "device" and cpu_import._is(node.value, "cuda"):
                node.value = ast.Constant(str(GPU))
            return super().visit_keyword(node)

    class Loader(cpu_import.CpuLoader):
        """Keeps no bytecode: its file is that of ordinary runs."""

        def get_code(self, fullname: str) -> CodeType:
            with mock.patch.object(sys, "dont_write_bytecode", True):
                return super().get_code(fullname)

    cpu_import.Rewrite, cpu_import.CpuLoader = OnPretendedGpu, Loader  # type: ignore[misc]
    cpu_import._read_cache = lambda cache, stamp: None
    cpu_import.CUDA_ON_CPU.__dict__["current_device"] = lambda: GPU
    Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]  # there are no streams here

    from rlsys.trainer import setup

    setup.local_device = lambda: GPU
