"""The command `rlsys tenants`: its arguments, and the config that they make. No torch in this process."""

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
    config: Config
    host: str
    port: int
    tenants: list[str]

    @property
    def arguments(self) -> list[str]:
        """Of the server's process."""
        words = ["--host", self.host, "--port", str(self.port)]
        return words + [word for name in self.tenants for word in ("--tenant", name)]


def add_tenants(
    add: Callable[..., argparse.ArgumentParser], run: Callable[[argparse.Namespace], int]
) -> None:
    """`add` makes a sub-command: name, function, help."""
    sub = add("tenants", run, "train adapters of several clients on one model, by Tinker's protocol")
    add_config(sub)
    sub.add_argument(
        "--tenant", action="append", required=True, metavar="NAME", help="who may come; may be repeated"
    )
    sub.add_argument("--port", type=int, required=True)
    sub.add_argument("--host", default="127.0.0.1", help="address to bind; keys go over it in plain text")


def read_options(args: argparse.Namespace) -> TenantsOptions:
    """Raises UserError for a config that cannot serve several tenants."""
    check_names(args.tenant)
    if not 1 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: expected 1 to 65535, the same at every start")
    config = pin_models(load_config(args.config, [*args.overrides, "weights.method=adapter"]))
    if config.parallel.world_size != 1:
        raise UserError(f"parallel: {config.parallel.world_size} ranks; `rlsys tenants` has one so far")
    if config.engine.count != 1 or config.engine.reference is not None:
        raise UserError(f"engine.count = {config.engine.count}: `rlsys tenants` has one engine so far")
    if config.trainer.balance_loss:
        raise UserError("trainer.balance_loss: a tenant's loss is its own alone; use 0")
    more = ["--max-loras-per-batch", str(ADAPTERS_AT_ONCE)]
    engine = config.engine.model_copy(update={"extra_args": [*more, *config.engine.extra_args]})
    config = config.model_copy(update={"engine": engine})
    return TenantsOptions(config, args.host, args.port, args.tenant)


def key_lines(run_dir: Path, options: TenantsOptions) -> list[str]:
    """What tenants have to know. Makes keys that are not there yet."""
    lines = [f"TINKER_BASE_URL=http://{options.host}:{options.port}"]
    for name in options.tenants:
        key_of(run_dir, name)
        lines.append(f"{name}: TINKER_API_KEY=$(cat {key_file(run_dir, name)})")
    return lines
