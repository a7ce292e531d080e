"""Arguments of `rlsys tenants`, and the resulting config. This process does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import Config, add_config, load_config
from rlsys.convert.hub import pin_models
from rlsys.core.errors import UserError
from rlsys.tenants.keys import check_names, key_file, key_of
from rlsys.tenants.sampler import ADAPTERS_AT_ONCE


@dataclass(frozen=True)
class TenantsOptions:
    """Options of `rlsys tenants`.

    Attributes:
        config: config of the server's engine and trainer.
        host: address to bind.
        port: port to listen on.
        tenants: names of the tenants.
    """

    config: Config
    host: str
    port: int
    tenants: list[str]

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of the server's process."""
        arguments = ["--host", self.host, "--port", str(self.port)]
        return arguments + [argument for name in self.tenants for argument in ("--tenant", name)]


def add_tenants(
    add: Callable[..., argparse.ArgumentParser], run: Callable[[argparse.Namespace], int]
) -> None:
    """Add `rlsys tenants`. `run`: function of the command."""
    sub = add("tenants", run, "train adapters of several clients on one model, with Tinker's protocol")
    add_config(sub)
    sub.add_argument(
        "--tenant", action="append", required=True, metavar="NAME", help="name of a tenant; repeat for each"
    )
    sub.add_argument("--port", type=int, required=True, help="port to listen on, the same at every start")
    sub.add_argument("--host", default="127.0.0.1", help="address to bind; keys are sent unencrypted")


def read_options(args: argparse.Namespace) -> TenantsOptions:
    """Return the options, and the config with the settings that tenants need.

    Raises:
        UserError: an option is invalid, or the config cannot serve several tenants.
    """
    check_names(args.tenant)
    if not 1 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: expected 1 to 65535, the same at every start")
    config = pin_models(load_config(args.config, [*args.overrides, "weights.method=adapter"]))
    if config.parallel.world_size != 1:
        raise UserError(
            f"parallel: the config has {config.parallel.world_size} trainer ranks; expected 1 for `rlsys tenants`"
        )
    if config.engine.count != 1:
        raise UserError(f"engine.count = {config.engine.count}: expected 1 for `rlsys tenants`")
    if config.engine.reference is not None:
        raise UserError(
            f"engine.reference = {config.engine.reference}: expected null for `rlsys tenants`, which uses one engine"
        )
    if config.trainer.balance_loss:
        raise UserError(
            f"trainer.balance_loss = {config.trainer.balance_loss:g}: expected 0 for `rlsys tenants`, because the "
            "loss of a tenant has only the terms that the tenant requests"
        )
    adapter_args = ["--max-loras-per-batch", str(ADAPTERS_AT_ONCE)]
    engine = config.engine.model_copy(update={"extra_args": [*adapter_args, *config.engine.extra_args]})
    config = config.model_copy(update={"engine": engine})
    return TenantsOptions(config, args.host, args.port, args.tenant)


def key_lines(run_dir: Path, options: TenantsOptions) -> list[str]:
    """Return lines with the URL of the server and the file of each tenant's key; create missing keys."""
    lines = [f"TINKER_BASE_URL=http://{options.host}:{options.port}"]
    for name in options.tenants:
        key_of(run_dir, name)
        lines.append(f"{name}: TINKER_API_KEY=$(cat {key_file(run_dir, name)})")
    return lines
