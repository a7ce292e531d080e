"""Stub of Transformer Engine 2.11 without CUDA: its layers in plain torch, on one rank.

The parameters of every method are those of tag v2.11 (transformer_engine/pytorch/module/*.py,
attention/dot_product_attention/dot_product_attention.py, attention/rope.py, permutation.py,
optimizers/fused_adam.py), so that Python refuses invalid calls; assertions check constraints on values. Only tests
that add `tests/te_stub` to the path import the stub; `rlsys` never does.
"""

from . import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
