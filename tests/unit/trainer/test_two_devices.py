"""The instrument itself (tests/helpers/two_devices.py), and branches on `is_cuda` that it reaches."""

from __future__ import annotations

import pytest
import torch

from rlsys.weights.buckets import StagingBuffers
from rlsys.weights.checksums import _EngineTensor
from rlsys.weights.hashes import PartDigests, TilePart
from tests.helpers.two_devices import GPU, HOST, TwoDevices, on_gpu

pytestmark = pytest.mark.gate


def test_an_operation_on_tensors_of_both_devices_is_recorded_with_its_place() -> None:
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


def test_a_tensor_says_where_it_is() -> None:
    with TwoDevices():
        there = torch.zeros(2, device=GPU)
        assert there.is_cuda and there.device == GPU and not there.is_cpu
        assert there.view(1, 2).is_cuda and there.double().is_cuda and (there * 2).is_cuda
        assert there.to(GPU) is there and torch.zeros_like(there).is_cuda and there.new_ones(3).is_cuda
        assert not there.cpu().is_cuda and not there.to("cpu").is_cuda
        assert there.cpu().data_ptr() != there.data_ptr()
        here = torch.zeros(2)
        assert here.device == HOST and not here.is_cuda and here.cpu() is here
        assert here.to(GPU).is_cuda and here.to(there).is_cuda and here.to(GPU).data_ptr() != here.data_ptr()
        assert not here.is_cuda
        assert torch.tensor([1.0], device=GPU).is_cuda and torch.as_tensor([1.0], device=GPU).is_cuda
        module = torch.nn.Linear(2, 2).to(GPU)
        module(there).sum().backward()
        assert module.weight.is_cuda and module.weight.grad is not None and on_gpu(module.weight.grad)


def test_launches_waits_copies_and_host_operations_are_counted() -> None:
    with TwoDevices() as devices:
        there = torch.ones(4, device=GPU)
        launches = devices.counts.launches.total()
        product = there * 2
        product.view(2, 2)
        product.add_(1)
        assert devices.counts.launches.total() - launches == 2, "a view launches nothing"
        assert not devices.counts.synchronizations
        for wait in (
            lambda: product.sum().item(), lambda: bool(product[0] > 0), product.tolist, product.cpu,
            product.nonzero, lambda: product[product > 1], lambda: float(product.max()),
        ):  # fmt: skip
            before = devices.counts.synchronizations.total()
            wait()  # type: ignore[no-untyped-call]
            assert devices.counts.synchronizations.total() == before + 1, devices.counts.synchronizations
        torch.ones(3).to(GPU)
        there.copy_(torch.ones(4))
        assert devices.counts.copies_to_device.total() == 2
        assert not any(key.startswith(("copy_", "_to_copy")) for key in devices.counts.launches)
    assert devices.counts.host_operations.total() == 2, devices.counts.host_operations
    assert devices.counts.totals()["copies_to_device"] == 2


def test_a_tensor_of_the_gpu_is_hashed_and_laid_out_as_there() -> None:
    """Branches on `is_cuda` of rlsys.weights."""
    whole = torch.randn(6, 4096)
    with TwoDevices() as devices:
        tensor = whole.to(GPU)
        areas = StagingBuffers(shared=True)
        parts = [t.view(torch.uint8) for t in (tensor[0], tensor[1])]
        assert (
            areas.flatten_bytes(parts).is_cuda
            and not areas.flatten_bytes([whole[0].view(torch.uint8)]).is_cuda
        )
        digests = PartDigests()
        joined = _EngineTensor(digests, 6, experts=True)
        for place in (3, 4, 5, 0, 1, 2):
            joined.add(place, [tensor[place]])
        digest = joined.digest(0, digests.results())
        on_host = _EngineTensor(PartDigests(), 1)
        on_host.add(0, [whole])
    assert not devices.refused
    assert isinstance(digest, TilePart), "a GPU's digest is a sum, so experts may come in any order"
    assert isinstance(on_host.digest(0, []), str), "a host's digest is of the bytes in order"


def test_a_record_ends_with_its_context() -> None:
    with TwoDevices() as devices:
        there = torch.ones(2, device=GPU)
    assert not there.is_cuda
    there + torch.ones(2)
    assert not devices.refused
    with pytest.raises(RuntimeError, match="size"), TwoDevices():
        torch.ones(2) + torch.ones(3)
