"""Command line of `rlsys router`."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rlsys.core.errors import UserError
from rlsys.gateway.fleet import FleetInterruption, is_host
from rlsys.gateway.front import FrontLimits
from rlsys.gateway.serve import RouterOptions, run_router
from rlsys.router.strategy import STRATEGIES


def router(args: argparse.Namespace) -> int:
    """Run `rlsys router`: serve an HTTP API in front of running engines, until SIGTERM.

    Raises:
        UserError: an option is invalid.
    """
    for name in ("concurrency", "queue_seconds", "max_body_mb"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: expected more than 0, and finite"
            )
    if args.queue < 0:
        raise UserError(f"--queue {args.queue}: expected 0 or more")
    if args.vocab_size is not None and args.vocab_size < 1:
        raise UserError(f"--vocab-size {args.vocab_size}: expected 1 or more")
    for host in args.allow_engine or ():
        if not is_host(host):
            raise UserError(f"--allow-engine {host[:200]!r}: expected a host name, an address or a network")
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: expected 0 to 65535")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_router(
        RouterOptions(
            engines=args.engine or [],
            port=args.port,
            host=args.host,
            token_file=args.token_file,
            admin_token_file=args.admin_token_file,
            allowed=tuple(args.allow_engine or ()),
            engine_keys=args.engine_keys,
            strategy=args.strategy,
            interruption=args.interruption,
            vocab_size=args.vocab_size,
            model_path=args.model_path,
            queue_seconds=args.queue_seconds,
            limits=FrontLimits(math.ceil(args.max_body_mb * 2**20), args.concurrency, args.queue),
        )
    )
    return 0


def add_router(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `rlsys router`."""
    limits = FrontLimits()
    sub = add("router", router, "serve SGLang's and OpenAI's HTTP APIs in front of running engines")
    sub.add_argument(
        "--engine", action="append", metavar="URL", help="URL of an SGLang server; may be repeated"
    )
    sub.add_argument("--port", type=int, required=True, help="port to listen on; 0 chooses a free one")
    sub.add_argument(
        "--host", default="127.0.0.1", help="address to bind; other addresses than loopback require a token"
    )
    sub.add_argument("--token-file", type=Path, metavar="FILE", help="file with the bearer token of clients")
    sub.add_argument(
        "--admin-token-file",
        type=Path,
        metavar="FILE",
        help="file with the token for /engines and weight updates",
    )
    sub.add_argument(
        "--allow-engine",
        action="append",
        metavar="HOST",
        help="host or network of engines that may join by POST /engines (default: the hosts of --engine)",
    )
    sub.add_argument(
        "--engine-keys",
        type=Path,
        metavar="FILE",
        help="the engines' --config file, with api-key and admin-api-key",
    )
    sub.add_argument("--strategy", choices=sorted(STRATEGIES), default="prefix_affinity")
    sub.add_argument(
        "--interruption",
        choices=get_args(FleetInterruption),
        default="retract",
        help="treatment of running requests during a weight update",
    )
    sub.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary size, if the model folder is not readable"
    )
    sub.add_argument(
        "--model-path",
        type=Path,
        metavar="FOLDER",
        help="folder of the model's tokenizer (default: the one that the engines name)",
    )
    sub.add_argument(
        "--queue-seconds", type=float, default=120.0, help="maximum wait for an engine in seconds"
    )
    sub.add_argument(
        "--max-body-mb", type=float, default=limits.body_bytes / 2**20, help="maximum request size"
    )
    sub.add_argument(
        "--concurrency", type=int, default=limits.concurrency, help="maximum number of concurrent samples"
    )
    sub.add_argument(
        "--queue", type=int, default=limits.queue, help="maximum number of further samples that wait"
    )
