"""The instrument itself (tests/helpers/two_devices.py), and branches on `is_cuda` that it reaches."""

from __future__ import annotations

import pytest
import torch

from rlsys.weights.buckets import StagingBuffers
from rlsys.weights.checksums import _EngineTensor
from rlsys.weights.hashes import PartDigests, TilePart
from tests.helpers.two_devices import GPU, HOST, TwoDevices, on_gpu

pytestmark = pytest.mark.gate


def test_an_operation_on_tensors_of_both_devices_is_recorded_with_its_location() -> None:
    with TwoDevices() as devices:
        here, there = torch.ones(4), torch.ones(4, device=GPU)
        there + 1.0
        there + torch.tensor(1.0)  # CUDA takes a scalar tensor of the host
        there[torch.tensor([0, 1])]  # and its indices
        there.copy_(here)
        assert not devices.refused
        there + here
        torch.cat([here, there])
        here[torch.tensor([0, 1], device=GPU)]
        there.numpy()
    problems = [key.partition(" at ")[0] for key in devices.refused]
    assert problems == [
        "mixed devices: aten::add", "mixed devices: aten::cat",
        "host tensor indexed by a GPU tensor: aten::index", "numpy of a GPU tensor: numpy",
    ]  # fmt: skip
    assert all(" at tests/unit/trainer/test_two_devices.py:" in key for key in devices.refused)
    assert "there + here" in next(iter(devices.stacks.values()))


def test_a_tensor_reports_its_device() -> None:
    with TwoDevices():
        gpu_tensor = torch.zeros(2, device=GPU)
        assert gpu_tensor.is_cuda and gpu_tensor.device == GPU and not gpu_tensor.is_cpu
        assert gpu_tensor.view(1, 2).is_cuda and gpu_tensor.double().is_cuda and (gpu_tensor * 2).is_cuda
        assert (
            gpu_tensor.to(GPU) is gpu_tensor
            and torch.zeros_like(gpu_tensor).is_cuda
            and gpu_tensor.new_ones(3).is_cuda
        )
        assert not gpu_tensor.cpu().is_cuda and not gpu_tensor.to("cpu").is_cuda
        assert gpu_tensor.cpu().data_ptr() != gpu_tensor.data_ptr()
        host_tensor = torch.zeros(2)
        assert host_tensor.device == HOST and not host_tensor.is_cuda and host_tensor.cpu() is host_tensor
        assert (
            host_tensor.to(GPU).is_cuda
            and host_tensor.to(gpu_tensor).is_cuda
            and host_tensor.to(GPU).data_ptr() != host_tensor.data_ptr()
        )
        assert not host_tensor.is_cuda
        assert torch.tensor([1.0], device=GPU).is_cuda and torch.as_tensor([1.0], device=GPU).is_cuda
        module = torch.nn.Linear(2, 2).to(GPU)
        module(gpu_tensor).sum().backward()
        assert module.weight.is_cuda and module.weight.grad is not None and on_gpu(module.weight.grad)


def test_launches_waits_copies_and_host_operations_are_counted() -> None:
    with TwoDevices() as devices:
        gpu_tensor = torch.ones(4, device=GPU)
        launches = devices.counts.launches.total()
        product = gpu_tensor * 2
        product.view(2, 2)
        product.add_(1)
        assert devices.counts.launches.total() - launches == 2, "a view launches nothing"
        assert not devices.counts.synchronizations
        for wait in (
            lambda: product.sum().item(), lambda: bool(product[0] > 0), product.tolist, product.cpu,
            product.nonzero, lambda: product[product > 1], lambda: float(product.max()),
        ):  # fmt: skip
            wait_count = devices.counts.synchronizations.total()
            wait()  # type: ignore[no-untyped-call]
            assert devices.counts.synchronizations.total() == wait_count + 1, devices.counts.synchronizations
        torch.ones(3).to(GPU)
        gpu_tensor.copy_(torch.ones(4))
        assert devices.counts.copies_to_device.total() == 2
        assert not any(key.startswith(("copy_", "_to_copy")) for key in devices.counts.launches)
    assert devices.counts.host_operations.total() == 2, devices.counts.host_operations
    assert devices.counts.totals()["copies_to_device"] == 2


def test_gpu_tensors_take_the_cuda_branches_of_hashing_and_staging() -> None:
    """Branches on `is_cuda` of rlsys.weights."""
    host_tensor = torch.randn(6, 4096)
    with TwoDevices() as devices:
        tensor = host_tensor.to(GPU)
        areas = StagingBuffers(shared=True)
        parts = [t.view(torch.uint8) for t in (tensor[0], tensor[1])]
        assert (
            areas.flatten_bytes(parts).is_cuda
            and not areas.flatten_bytes([host_tensor[0].view(torch.uint8)]).is_cuda
        )
        digests = PartDigests()
        joined = _EngineTensor(digests, 6, experts=True)
        for expert_index in (3, 4, 5, 0, 1, 2):
            joined.add(expert_index, [tensor[expert_index]])
        digest = joined.digest(0, digests.results())
        on_host = _EngineTensor(PartDigests(), 1)
        on_host.add(0, [host_tensor])
    assert not devices.refused
    assert isinstance(digest, TilePart), "a GPU's digest is a sum, so experts may come in any order"
    assert isinstance(on_host.digest(0, []), str), "a host's digest is of the bytes in order"


def test_a_record_ends_with_its_context() -> None:
    with TwoDevices() as devices:
        gpu_tensor = torch.ones(2, device=GPU)
    assert not gpu_tensor.is_cuda
    gpu_tensor + torch.ones(2)
    assert not devices.refused
    with pytest.raises(RuntimeError, match="size"), TwoDevices():
        torch.ones(2) + torch.ones(3)
