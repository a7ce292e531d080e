"""Base classes of megatron-core's layers."""

from . import distributed, fp8, ops, optimizers
from .attention import DotProductAttention
from .linear import GroupedLinear, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "ops",
    "optimizers",
]


class LayerNorm:
    """Class in megatron-core's specs that is never instantiated, because every supported family has RMSNorm."""
