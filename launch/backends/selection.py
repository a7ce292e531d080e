"""Selection of the backend by launch.backend."""

from __future__ import annotations

import os

from launch.backends import Backend
from rlsys.config import Config


def open_backend(config: Config, lock_fd: int) -> Backend:
    """Open the backend that launch.backend names.

    Raises:
        UserError: it is not available here.
    """
    if config.launch.backend == "slurm":
        from launch.backends.slurm import SlurmBackend

        return SlurmBackend(config, lock_fd)
    if config.launch.backend == "ray":
        if "RAY_ADDRESS" not in os.environ:
            # Ray reads this on import: a private Ray, on this machine only, listens on loopback only.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from launch.backends.ray_actors import RayBackend  # ray costs a second to import

        return RayBackend(config)
    from launch.backends.local import LocalBackend

    return LocalBackend(config, lock_fd)
