"""A test for each finding about GPUs that shows on layers of megatron-core on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func.overloadpacket) in ("aten.mm", "aten.addmm", "aten._grouped_mm", "aten.bmm")
        return func(*args, **(kwargs or {}))


def test_gpu_p13_the_products_of_a_pass_do_not_grow_with_the_experts(tmp_path: Path) -> None:
    """torch._grouped_mm takes the experts of a layer at once, on a CPU too."""
    counts = []
    with cases.trainer_factory(tmp_path / "run") as start:
        for experts in (4, 16):
            folder = cases.write_model(tmp_path / str(experts), num_experts=experts)
            trainer = start(folder, model={"dtype": "bfloat16"})
            batch = trainer.passes.pack(cases.samples())
            with Products() as products:
                trainer.passes.logprobs(batch)
            counts.append(products.count)
    assert counts[1] <= counts[0], f"{counts[0]} matrix products with 4 experts a layer, {counts[1]} with 16"
