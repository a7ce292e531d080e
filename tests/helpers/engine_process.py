"""Arguments and environment of an engine that a test or a bench starts: those of the product, on this host."""

from __future__ import annotations

import os
import shlex

from launch.environment import CPU_HOST, EVERYWHERE, environment
from rlsys.config import Config
from rlsys.core.devices import VARIABLE
from rlsys.planner.layout import on_cuda

ENGINE_ARGS = "RLSYS_BENCH_ENGINE_ARGS"
"""Environment variable: further arguments of every engine that tests and benches start, such as an attention backend
that this node has."""


def engine_arguments() -> list[str]:
    """Arguments that this host asks for."""
    return shlex.split(os.environ.get(ENGINE_ARGS, ""))


def engine_environment(config: Config, own: dict[str, str]) -> dict[str, str]:
    """This process's environment with that of an engine on this host. `own`: what its command asks for (launch_args).

    On a GPU host the variables that a test session sets for a CPU host are left out.
    """
    cuda = on_cuda(config)
    of_a_cpu = CPU_HOST.keys() - EVERYWHERE.keys() - {VARIABLE} if cuda else set[str]()
    inherited = {k: v for k, v in os.environ.items() if k not in of_a_cpu}
    return inherited | environment(config, "engine", cuda=cuda) | own
