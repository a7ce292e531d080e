"""Replacement of megatron-core's CUDA literals during import, on hosts without CUDA.

Symptom: About 390 places contain torch.cuda, device="cuda", .cuda() or pin_memory=True, so that hardly anything
except seeding runs.
Upstream: 0.16.1 - 0.19.2. With CUDA, the rewrite is never active.
How: The import rewrites the syntax trees of megatron's modules. It changes no file and no global name of torch. It
also removes torch.compile, because the import of the compiler takes seconds and its use takes minutes.
Why numbers stay equal: Only the device of tensors changes. A CPU compiles nothing in any case
(TORCH_COMPILE_DISABLE), and streams and events have no effect on sequential execution.
Delete when: megatron-core takes its device from one setting that can be "cpu".
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

_CPU = torch.device("cpu")


class _Stream:
    """Stand-in for CUDA's streams and events. On a CPU, every operation has already completed."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _CudaOnCpu(types.ModuleType):
    """Stand-in for torch.cuda in megatron, with the attributes of torch.cuda unless they are overridden."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _make_cuda_on_cpu() -> _CudaOnCpu:
    """Return the stand-in, with functions that have no effect or use the CPU's generator."""
    shim = _CudaOnCpu("megatron_patches.cuda_on_cpu")
    stream = _Stream()
    no_op = lambda *a, **k: None  # noqa: E731
    overrides: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": no_op,
        "synchronize": no_op,
        "empty_cache": no_op,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *a, **k: stream,
        "default_stream": lambda *a, **k: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "is_current_stream_capturing": lambda: False,
        "nvtx": types.SimpleNamespace(
            range_push=no_op, range_pop=no_op, range=lambda *a, **k: contextlib.nullcontext()
        ),
    }
    for name, value in overrides.items():
        setattr(shim, name, value)
    return shim


def _not_compiled(function: Any = None, **options: Any) -> Any:
    """Return the function unchanged, in place of torch.compile, as a decorator with or without options."""
    return _not_compiled if function is None else function


class _MissingTriton:
    """Stand-in for triton in modules that import it unconditionally. Its decorators return the function unchanged."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Rewrite(ast.NodeTransformer):
    """Transformer that replaces the CUDA literals of a module. `counts`: number of replacements, by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._inside_try = False
        self.no_triton = importlib.util.find_spec("triton") is None

    def _count(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def visit_Try(self, node: ast.Try) -> ast.AST:
        # An `import triton` in a try statement handles a missing package itself.
        previous, self._inside_try = self._inside_try, True
        self.generic_visit(node)
        self._inside_try = previous
        return node

    def _stub(self, node: ast.stmt, names: Sequence[str]) -> list[ast.stmt]:
        self._count("import triton")
        value = ast.Name("__missing_triton__", ast.Load())
        return [ast.copy_location(ast.Assign([ast.Name(n, ast.Store())], value), node) for n in names]

    def visit_Import(self, node: ast.Import) -> ast.AST | list[ast.stmt]:
        bare = not self._inside_try and self.no_triton
        if bare and all(a.name.split(".")[0] == "triton" for a in node.names):
            return self._stub(node, [a.asname or "triton" for a in node.names])
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        bare = not self._inside_try and self.no_triton and not node.level
        if bare and (node.module or "").split(".")[0] == "triton":
            return self._stub(node, [a.asname or a.name for a in node.names])
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        value = node.value
        if node.attr == "cuda" and isinstance(value, ast.Name) and value.id == "torch":
            self._count("torch.cuda")
            return ast.copy_location(ast.Name("__cuda_on_cpu__", ast.Load()), node)
        if node.attr == "compile" and isinstance(value, ast.Name) and value.id == "torch":
            self._count("torch.compile")
            return ast.copy_location(ast.Name("__not_compiled__", ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute):
            return node
        if function.attr == "cuda":
            self._count("x.cuda()")
            method = ast.copy_location(ast.Attribute(function.value, "cpu", ast.Load()), function)
            return ast.copy_location(ast.Call(method, [], []), node)
        if function.attr in ("to", "device") and node.args and _is(node.args[0], "cuda"):
            self._count("x.to('cuda')")
            node.args[0] = ast.copy_location(ast.Constant("cpu"), node.args[0])
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "pin_memory" and _is(node.value, True):
            self._count("pin_memory=True")
            node.value = ast.copy_location(ast.Constant(False), node.value)
        if node.arg in ("device", "device_type") and _is(node.value, "cuda"):
            self._count("device='cuda'")
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        # The optimizers compare tensor types by their names.
        text = node.value
        if isinstance(text, str) and text.startswith("torch.cuda.") and text.endswith("Tensor"):
            self._count("'torch.cuda.*Tensor'")
            return ast.copy_location(ast.Constant(text.replace("torch.cuda.", "torch.")), node)
        return node


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


class CpuLoader(importlib.machinery.SourceFileLoader):
    """Loader that rewrites and compiles a module.

    It caches the bytecode in Python's cache folder under another name, so that hosts with CUDA do not use it.
    """

    rewritten: ClassVar[dict[str, dict[str, int]]] = {}

    def get_code(self, fullname: str) -> types.CodeType:
        source = self.get_data(self.get_filename(fullname))
        cache = importlib.util.cache_from_source(self.path, optimization="oncpu")
        rewrite = Rewrite()
        stamp = importlib.util.source_hash(source + _OWN_SOURCE + bytes(rewrite.no_triton))
        counts, code = _read_cache(cache, stamp) or (None, None)
        if code is None:
            tree = ast.fix_missing_locations(rewrite.visit(ast.parse(source, self.path)))
            counts, code = rewrite.counts, compile(tree, self.path, "exec", dont_inherit=True)
            # As for Python's own cache, a folder that is not writable is ignored.
            if not sys.dont_write_bytecode:
                payload = marshal.dumps((counts, code))
                self.set_data(cache, stamp + importlib.util.source_hash(payload) + payload)
        if counts:
            self.rewritten[fullname] = counts
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(
            __cuda_on_cpu__=CUDA_ON_CPU,
            __missing_triton__=_MissingTriton(),
            __not_compiled__=_not_compiled,
        )
        super().exec_module(module)


def _read_cache(cache: str, stamp: bytes) -> tuple[dict[str, int], types.CodeType] | None:
    """Return counts and bytecode from a cache file; None if it is missing, incomplete or outdated.

    `stamp`: hash of the module's source and of this file.
    """
    with contextlib.suppress(OSError):
        content = Path(cache).read_bytes()
        payload = content[2 * len(stamp) :]
        if content[: 2 * len(stamp)] == stamp + importlib.util.source_hash(payload):
            counts, code = marshal.loads(payload)
            return counts, code
    return None


_OWN_SOURCE = Path(__file__).read_bytes()
CUDA_ON_CPU = _make_cuda_on_cpu()


def needs_rewrite(path: str) -> bool:
    """Return whether the module in this file may contain CUDA literals."""
    source = Path(path).read_bytes()
    return any(literal in source for literal in (b"cuda", b"triton", b"torch.compile"))
