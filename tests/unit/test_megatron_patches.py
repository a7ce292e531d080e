"""The patches' own machinery; that they work shows in tests/integration/test_trainer.py."""

from __future__ import annotations

import ast
import sys
from types import ModuleType

import pytest
import torch

import megatron_patches
from megatron_patches import cpu_import
from megatron_patches.registry import PatchError, target


def rewritten(source: str) -> tuple[str, dict[str, int]]:
    rewrite = cpu_import.Rewrite()
    return ast.unparse(rewrite.visit(ast.parse(source))), rewrite.found


@pytest.mark.parametrize(
    ("source", "expected", "kind"),
    [
        ("torch.cuda.synchronize()", "__cuda_on_cpu__.synchronize()", "torch.cuda"),
        ("torch.zeros(2, device='cuda')", "torch.zeros(2, device='cpu')", "device='cuda'"),
        ("x.cuda()", "x.cpu()", "x.cuda()"),
        ("x.to('cuda')", "x.to('cpu')", "x.to('cuda')"),
        ("t == 'torch.cuda.FloatTensor'", "t == 'torch.FloatTensor'", "'torch.cuda.*Tensor'"),
        ("empty(2, pin_memory=True)", "empty(2, pin_memory=False)", "pin_memory=True"),
    ],
)
def test_cuda_literals_are_rewritten(source: str, expected: str, kind: str) -> None:
    assert rewritten(source) == (expected, {kind: 1})


@pytest.mark.parametrize(
    "source", ["x.cuda", "y = 'cuda'", "self.cuda.run()", "try:\n    import triton\nexcept E:\n    a()"]
)
def test_other_code_stays(source: str) -> None:
    assert rewritten(source) == (source, {})


def test_nothing_for_a_cpu_is_active_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no-cuda" not in {p.when for p in megatron_patches.active()}
    finder = megatron_patches._Finder(megatron_patches.active())
    spec = finder.find_spec("megatron")
    assert spec is None or not isinstance(spec.loader, cpu_import.CpuLoader)


def test_defects_that_do_not_depend_on_the_device_stay_mended_without_te(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = {p.name for p in megatron_patches.active()}
    assert {"distributed_optimizer_step", "norm_sequence_parallel", "moe_gemm"} <= names


def test_every_patch_says_what_it_is_for() -> None:
    assert len({p.name for p in megatron_patches.PATCHES}) == len(megatron_patches.PATCHES)
    for patch in megatron_patches.PATCHES:
        text = sys.modules[patch.edit.__module__].__doc__ or ""
        for part in ("Symptom", "Upstream: ", "Why numbers stay equal: ", "Delete "):
            assert part in text, f"{patch.name}: no {part!r} in its docstring"
        assert patch.edit.__module__ == f"megatron_patches.{patch.name}"


def an_upstream_function() -> int:
    return 1


def test_a_changed_target_is_an_error_that_names_it() -> None:
    here = sys.modules[__name__]
    assert target("some_patch", here, "an_upstream_function", "return 1") is an_upstream_function
    with pytest.raises(
        PatchError, match=r"megatron_patches.some_patch: .*an_upstream_function no longer says"
    ):
        target("some_patch", here, "an_upstream_function", "return 2")
    with pytest.raises(PatchError, match=r"some_patch: upstream\.missing is gone"):
        target("some_patch", ModuleType("upstream"), "missing")
