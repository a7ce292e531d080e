"""Simulated GPU on a CPU: tensors on the device `cpu:7` count as GPU tensors.

All tensors are ordinary CPU tensors, so numbers, autograd and optimizers are real. `TwoDevices` tracks which storages
are on the simulated GPU, returns `device`, `is_cuda`, `.cpu()` and `.to()` accordingly, and records

- each operation that CUDA refuses because its tensors are on different devices (`refused`),
- launches, synchronizations, copies to the device and host operations, by operation and source line (`Counts`).

    with TwoDevices() as devices:
        step()
    assert not devices.refused
    devices.counts.launches.total()

Counts refer to operations at torch's dispatcher: an operation that computes is one launch, a view is none. Several
kernels of one operation (a fused optimizer, a sort) count once, and collectives are not counted.

Call `import_trainer()` before the first import of megatron.core: it rewrites Megatron's CUDA literals to the
simulated GPU. A process that called it must run no other test.
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
"""Operations that take tensors on both devices."""
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations for which CUDA also takes indices on the host."""
_SYNCHRONIZING = {
    "aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero", "aten::masked_select": "masked_select",
    "aten::_unique2": "unique", "aten::unique_consecutive": "unique", "aten::unique_dim": "unique",
    "aten::bincount": "bincount", "aten::equal": "equal", "aten::is_nonzero": "item",
}  # fmt: skip
"""Operations for whose result, or its size, the host waits: dispatcher name -> name in `Counts`."""
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::detach", "aten::alias")
_FACTORIES = {
    "zeros", "ones", "empty", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint", "eye", "linspace",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty",
    "new_full", "new_ones", "new_tensor", "from_numpy", "frombuffer", "empty_strided", "randperm", "scalar_tensor",
    "tril_indices", "triu_indices", "Tensor",
}  # fmt: skip


@dataclass
class Counts:
    """Counts by operation and source line, `OPERATION at FILE:LINE`."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations that compute on the GPU."""
    synchronizations: Counter[str] = field(default_factory=Counter)
    """Waits of the host for the GPU: it reads a scalar, a list or a copy, or a shape depends on values."""
    copies_to_device: Counter[str] = field(default_factory=Counter)
    host_operations: Counter[str] = field(default_factory=Counter)
    """Operations that compute on host tensors alone."""

    def totals(self) -> dict[str, int]:
        return {name: counter.total() for name, counter in vars(self).items()}


class _Storages:
    """Set of live storages."""

    def __init__(self) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self._prune_at = 2**16

    def __contains__(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        if storage is None or (reference := self._references.get(storage._cdata)) is None:
            return False
        if reference.expired():  # a new storage has the same address
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


_gpu_storages, _unplaced_storages = _Storages(), _Storages()
"""`_unplaced_storages`: storages that C++ creates without a device visible to Python; no device check applies."""


def _storage(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()
        except NotImplementedError:  # a tensor without a storage
            return None


def on_gpu(tensor: Tensor) -> bool:
    return tensor in _gpu_storages


def _set_device(tensor: Tensor, gpu: bool) -> None:
    _unplaced_storages.discard(tensor)
    if gpu:
        _gpu_storages.add(tensor)
    else:
        _gpu_storages.discard(tensor)


def _is_gpu(device: object) -> bool:
    return isinstance(device, torch.device) and device == GPU


def _caller() -> FrameType | None:
    """Return the innermost frame outside torch and this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith((_TORCH, "<"))
    ):
        frame = frame.f_back
    return frame


def _caller_location() -> str:
    """Return FILE:LINE of the caller."""
    frame = _caller()
    if frame is None:
        return "?"
    name = frame.f_code.co_filename.rpartition("site-packages/")[2].removeprefix(f"{_ROOT}/")
    return f"{name}:{frame.f_lineno}"


class TwoDevices:
    """Context manager that simulates the GPU.

    Attributes:
        refused: `PROBLEM: OPERATION at FILE:LINE` -> count of operations that CUDA would refuse.
        stacks: One call stack per key of `refused`.
        counts: Counts of operations.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.stacks: dict[str, str] = {}
        self.counts = Counts()
        self._modes = (_FunctionMode(self), _DispatchMode(self))

    def __enter__(self) -> TwoDevices:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def refuse(self, problem: str, operation: str) -> None:
        key = f"{problem}: {operation} at {_caller_location()}"
        self.refused[key] += 1
        if key not in self.stacks:
            self.stacks[key] = "".join(traceback.format_stack(_caller(), limit=8))

    def synchronize(self, operation: str) -> None:
        self.counts.synchronizations[f"{operation} at {_caller_location()}"] += 1


def _same_storage(one: Tensor, other: Tensor) -> bool:
    a, b = _storage(one), _storage(other)
    return a is not None and b is not None and a._cdata == b._cdata


class _DispatchMode(TorchDispatchMode):
    """Handle operations at torch's dispatcher, including backward passes in C++."""

    def __init__(self, owner: TwoDevices) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("c10d"):  # a process group has a backend per device
            return func(*args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        gpu = [t for t in inputs if on_gpu(t)]
        self._check(name, args, inputs, gpu)
        read = self._count_synchronization(name, args, gpu)
        out = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        new_tensors = [t for t in outputs if not any(_same_storage(t, x) for x in inputs)]
        for tensor in new_tensors:
            self._place_tensor(tensor, name, inputs, bool(gpu), kwargs.get("device"))
        self._count(func, name, inputs, new_tensors, gpu, read)
        return out

    def _check(self, name: str, args: Any, inputs: list[Tensor], gpu: list[Tensor]) -> None:
        if not gpu or name in _ANY_DEVICE:
            return
        if name in _INDEXED:
            target = args[0]
            if target in _unplaced_storages:
                return
            if not on_gpu(target) and any(t is not None and on_gpu(t) for t in args[1]):
                self._owner.refuse("host tensor indexed by a GPU tensor", name)
            value = args[2] if len(args) > 2 else None
            if isinstance(value, Tensor) and value.dim() and on_gpu(value) != on_gpu(target):
                self._owner.refuse("values of another device", name)
        elif any(t.dim() and not on_gpu(t) and t not in _unplaced_storages for t in inputs):
            self._owner.refuse("mixed devices", name)

    def _count_synchronization(self, name: str, args: Any, gpu: list[Tensor]) -> bool:
        """Return whether the host waits for the GPU, and count the synchronization."""
        if not gpu:
            return False
        operation = _SYNCHRONIZING.get(name)
        if name in _INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            operation = "index by a mask"
        if name == "aten::repeat_interleave" and len(args) == 1:
            operation = "repeat_interleave"
        if name == "aten::copy_" and not on_gpu(args[0]):
            operation = "copy to the host"
        if operation is not None:
            self._owner.synchronize(operation)
        return operation is not None

    def _place_tensor(
        self, tensor: Tensor, name: str, inputs: list[Tensor], gpu: bool, device: object
    ) -> None:
        """Set the device of a new tensor."""
        if torch._C._current_graph_task_id() != -1 and not _is_gpu(device):  # in a backward pass
            if gpu:
                _set_device(tensor, True)
            else:
                _unplaced_storages.add(tensor)
        elif name == "aten::_to_copy" and not _is_gpu(device):
            _set_device(tensor, gpu)  # _FunctionMode handles copies to the host
        elif inputs and not gpu and any(t in _unplaced_storages for t in inputs):
            _unplaced_storages.add(tensor)
        elif not inputs and _function_stack and _function_stack[-1] not in _FACTORIES:
            _unplaced_storages.add(tensor)  # inside a composite operation, which reads a tensor's real device
        elif isinstance(device, torch.device):
            _set_device(tensor, _is_gpu(device))
        else:
            _set_device(tensor, gpu)

    def _count(
        self,
        func: Any,
        name: str,
        inputs: list[Tensor],
        new_tensors: list[Tensor],
        gpu: list[Tensor],
        read: bool,
    ) -> None:
        if name.startswith(_ALLOCATIONS) or not (new_tensors or func._schema.is_mutable or read):
            return  # an allocation or a view
        counts, key = self._owner.counts, f"{name.removeprefix('aten::')} at {_caller_location()}"
        to_gpu = any(on_gpu(t) for t in new_tensors) or (
            func._schema.is_mutable and bool(inputs) and on_gpu(inputs[0])
        )
        if name in _ANY_DEVICE and inputs and to_gpu and not all(on_gpu(t) for t in inputs):
            counts.copies_to_device[key] += 1
        elif gpu or to_gpu:
            counts.launches[key] += 1
        else:
            counts.host_operations[key] += 1


_function_stack: list[str] = []
"""Names of the active torch functions, innermost last."""


class _FunctionMode(TorchFunctionMode):
    """Handle a tensor's device attributes and copies between devices in Python."""

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
        _function_stack.append(name)
        try:
            out = func(*args, **kwargs)
        finally:
            _function_stack.pop()
        if name in ("tensor", "as_tensor", "scalar_tensor", "asarray") and isinstance(out, Tensor):
            device = kwargs.get("device")
            if device is not None:
                gpu = _is_gpu(torch.device(device))
                if gpu and out is first and not on_gpu(first):
                    out = out.clone()
                _set_device(out, gpu)
        return out

    def _to(self, func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
        other = kwargs.get("other", args[1] if len(args) > 1 else None)
        if isinstance(other, Tensor):
            args, kwargs = (tensor, GPU if on_gpu(other) else HOST, other.dtype), {}
        device = _device_of((*args[1:], *kwargs.values()))
        if _is_gpu(device) and on_gpu(tensor) and not kwargs.get("copy"):
            # The tensor is already there, although its real device is not `cpu:7`.
            dtypes = [a for a in (*args[1:], kwargs.get("dtype")) if isinstance(a, torch.dtype)]
            return func(tensor, dtypes[0]) if dtypes else tensor
        out: Tensor = func(*args, **kwargs)
        leaves = device is not None and not _is_gpu(device) and on_gpu(tensor)
        return self._to_host(out) if leaves else out

    def _to_host(self, tensor: Tensor) -> Tensor:
        self._owner.synchronize("copy to the host")
        with torch._C._DisableTorchDispatch():
            out = tensor.clone()
        _set_device(out, False)
        return out


def _device_of(values: Sequence[object]) -> torch.device | None:
    for value in values:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"):
            return torch.device(value)
    return None


def import_trainer() -> None:
    """Import rlsys.trainer and megatron-core such that they use the simulated GPU."""
    from megatron_patches import cpu_import

    class SimulatedGpuRewrite(cpu_import.Rewrite):
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
        """Loader that writes no bytecode, because ordinary runs use the same cache file."""

        def get_code(self, fullname: str) -> CodeType:
            with mock.patch.object(sys, "dont_write_bytecode", True):
                return super().get_code(fullname)

    cpu_import.Rewrite, cpu_import.CpuLoader = SimulatedGpuRewrite, Loader  # type: ignore[misc]
    cpu_import._read_cache = lambda cache, stamp: None
    cpu_import.CUDA_ON_CPU.__dict__["current_device"] = lambda: GPU
    Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]  # the simulated GPU has no streams

    from rlsys.trainer import setup

    setup.local_device = lambda: GPU
