"""The patches' own machinery; that they work shows in tests/integration/test_trainer.py."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

import megatron_patches
from megatron_patches import cpu_import, gloo_device
from megatron_patches.registry import PatchError, target


def rewritten(source: str) -> tuple[str, dict[str, int]]:
    rewrite = cpu_import.Rewrite()
    return ast.unparse(rewrite.visit(ast.parse(source))), rewrite.counts


@pytest.mark.parametrize(
    ("source", "expected", "kind"),
    [
        ("torch.cuda.synchronize()", "__cuda_on_cpu__.synchronize()", "torch.cuda"),
        ("torch.zeros(2, device='cuda')", "torch.zeros(2, device='cpu')", "device='cuda'"),
        ("x.cuda()", "x.cpu()", "x.cuda()"),
        ("x.to('cuda')", "x.to('cpu')", "x.to('cuda')"),
        ("t == 'torch.cuda.FloatTensor'", "t == 'torch.FloatTensor'", "'torch.cuda.*Tensor'"),
        ("fuser = torch.compile", "fuser = __not_compiled__", "torch.compile"),
        ("empty(2, pin_memory=True)", "empty(2, pin_memory=False)", "pin_memory=True"),
    ],
)
def test_cuda_literals_are_rewritten(source: str, expected: str, kind: str) -> None:
    assert rewritten(source) == (expected, {kind: 1})


@pytest.mark.parametrize(
    "source", ["x.cuda", "y = 'cuda'", "self.cuda.run()", "try:\n    import triton\nexcept E:\n    a()"]
)
def test_other_code_is_unchanged(source: str) -> None:
    assert rewritten(source) == (source, {})


def test_a_rewritten_module_is_cached_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source, rewrites = tmp_path / "fused.py", list[ast.AST]()
    plain = cpu_import.Rewrite.visit

    def visit(self: cpu_import.Rewrite, node: ast.AST) -> Any:
        rewrites.extend([node] if isinstance(node, ast.Module) else [])
        return plain(self, node)

    monkeypatch.setattr(cpu_import.Rewrite, "visit", visit)
    for text, rewrite_count in (("cuda = 1", 1), ("cuda = 1", 1), ("cuda = 2", 2)):
        source.write_text(f"import torch\n{text}\n@torch.compile(dynamic=True)\ndef f(): return torch.cuda\n")
        module = ModuleType("fused")
        cpu_import.CpuLoader("fused", str(source)).exec_module(module)
        assert module.f() is cpu_import.CUDA_ON_CPU and len(rewrites) == rewrite_count
        assert cpu_import.CpuLoader.rewritten.pop("fused") == {"torch.cuda": 1, "torch.compile": 1}


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-9], lambda b: b[:16] + bytes(len(b) - 16)], ids=["cut", "zeros"]
)
def test_bytecode_torn_by_a_crash_is_regenerated(
    spoil: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: EOFError, or ValueError of marshal, at each start of a trainer."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = tmp_path / "torn.py"
    source.write_text("import torch\ndef f(): return torch.cuda\n")
    for _ in range(2):
        module = ModuleType("torn")
        cpu_import.CpuLoader("torn", str(source)).exec_module(module)
        assert module.f() is cpu_import.CUDA_ON_CPU
        (bytecode_path,) = (tmp_path / "__pycache__").iterdir()
        bytecode = bytecode_path.read_bytes()
        bytecode_path.write_bytes(spoil(bytecode))
    cpu_import.CpuLoader.rewritten.pop("torn")


def test_cpu_patches_are_inactive_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no-cuda" not in {p.when for p in megatron_patches.active()}
    finder = megatron_patches._Finder(megatron_patches.active())
    spec = finder.find_spec("megatron")
    assert spec is None or not isinstance(spec.loader, cpu_import.CpuLoader)


def test_device_independent_patches_are_active_without_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = {p.name for p in megatron_patches.active()}
    assert {"distributed_optimizer_step", "norm_sequence_parallel", "moe_gemm"} <= names


def test_every_patch_documents_its_purpose() -> None:
    assert len({p.name for p in megatron_patches.PATCHES}) == len(megatron_patches.PATCHES)
    for patch in megatron_patches.PATCHES:
        text = sys.modules[patch.edit.__module__].__doc__ or ""
        for part in ("Symptom", "Upstream: ", "Why numbers stay equal: ", "Delete "):
            assert part in text, f"{patch.name}: no {part!r} in its docstring"
        assert patch.edit.__module__ == f"megatron_patches.{patch.name}"


def an_upstream_function() -> int:
    return 1


def test_a_changed_target_is_an_error_that_names_it() -> None:
    module = sys.modules[__name__]
    assert target("some_patch", module, "an_upstream_function", "return 1") is an_upstream_function
    with pytest.raises(
        PatchError, match=r"megatron_patches.some_patch: .*an_upstream_function no longer contains"
    ):
        target("some_patch", module, "an_upstream_function", "return 2")
    with pytest.raises(PatchError, match=r"some_patch: upstream\.missing is missing"):
        target("some_patch", ModuleType("upstream"), "missing")


def create_group() -> None:
    """Stands for megatron's, which asks torch.distributed.new_group."""


def new_process_group_2_14(opts: SimpleNamespace) -> Any:
    """As torch 2.14 makes a gloo group, in a function of its own."""
    c10d_module: Any = c10d
    return c10d_module.ProcessGroupGloo(
        opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout, enable_reconfigure=False
    )


def test_gloo_groups_share_a_device_with_torch_2_14_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment for GPUs has it, and a process there that is not to see a GPU runs on gloo (rlsys rehearse)."""
    # torch's own, which another test of this session may have patched already; put back at the end
    monkeypatch.setattr(c10d, "ProcessGroupGloo", ProcessGroupGloo)
    monkeypatch.setattr(c10d, "_new_process_group_helper", create_group)
    monkeypatch.setattr(c10d, "_create_gloo_process_group", new_process_group_2_14, raising=False)
    gloo_device.PATCH.edit(sys.modules[__name__])
    store, timeout = dist.HashStore(), timedelta(seconds=5)
    groups = [
        new_process_group_2_14(SimpleNamespace(store=dist.PrefixStore(f"{i}", store), group_rank=0, group_size=1,
                                               timeout=timeout))
        for i in range(2)
    ]  # fmt: skip
    first, second = (group.options._devices for group in groups)
    assert len(first) == 1 and first == second
