"""The algorithms: pure plug-ins, each named by a short name or an import path, all built by `build`.

Importing this package imports no torch: the rollout process builds planners, prompt choosers and group rewards
with it. Tensor plug-ins import torch when they are built.
"""

from rlsys.algo.registry import build, check

__all__ = ["build", "check"]
