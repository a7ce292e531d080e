"""Selection of the backend by launch.backend."""

from __future__ import annotations

import os

from launch.backends import Backend
from rlsys.config import Config


def open_backend(config: Config, lock_fd: int) -> Backend:
    """Open the backend that launch.backend names.

    Args:
        config: config of the run.
        lock_fd: file descriptor of the run's lock, which keepers inherit.

    Raises:
        UserError: the backend is not available on this machine.
    """
    if config.launch.backend == "slurm":
        from launch.backends.slurm import SlurmBackend

        return SlurmBackend(config, lock_fd)
    if config.launch.backend == "ray":
        if "RAY_ADDRESS" not in os.environ:
            # With this value, which Ray reads on import, a private Ray of one machine listens on loopback only.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from launch.backends.ray_actors import RayBackend  # importing ray takes a second

        return RayBackend(config)
    from launch.backends.local import LocalBackend

    return LocalBackend(config, lock_fd)
