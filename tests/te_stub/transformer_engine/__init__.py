"""Stands for Transformer Engine 2.11 where there is no CUDA: its layers in plain torch, in one process.

Parameters of every method are those of the real one at tag v2.11 (transformer_engine/pytorch/module/*.py,
attention/dot_product_attention/dot_product_attention.py, attention/rope.py, permutation.py,
optimizers/fused_adam.py), so that Python itself refuses a call that the real one would refuse; what the real one
demands of values is asserted. On the path only of tests that put `tests/te_stub` there; `rlsys` never imports it.
"""

from . import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
