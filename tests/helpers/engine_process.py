"""Arguments and environment of engines that tests and benchmarks start on this host."""

from __future__ import annotations

import os
import shlex

from launch.environment import CPU_HOST, EVERYWHERE, environment
from rlsys.config import Config
from rlsys.core.devices import VARIABLE
from rlsys.planner.layout import on_cuda

ENGINE_ARGS = "RLSYS_BENCH_ENGINE_ARGS"
"""Environment variable with further arguments of engines, such as an attention backend of this host."""


def engine_arguments() -> list[str]:
    """Return the further arguments of ENGINE_ARGS."""
    return shlex.split(os.environ.get(ENGINE_ARGS, ""))


def engine_environment(config: Config, variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of an engine on this host: this process's, the product's and `variables`.

    On a GPU host it lacks the variables that a test session sets for CPU hosts. `variables` come with the engine's
    command (launch_args).
    """
    cuda = on_cuda(config)
    cpu_variables = CPU_HOST.keys() - EVERYWHERE.keys() - {VARIABLE} if cuda else set[str]()
    inherited = {k: v for k, v in os.environ.items() if k not in cpu_variables}
    return inherited | environment(config, "engine", cuda=cuda) | variables
