"""Algorithms as plug-ins without I/O. `build` makes a plug-in from its short name or import path.

Importing this package imports no torch, because the rollout process builds planners, prompt choosers and group
rewards with it. A plug-in on tensors imports torch when it is built.
"""

from rlsys.algo.registry import build, check

__all__ = ["build", "check"]
