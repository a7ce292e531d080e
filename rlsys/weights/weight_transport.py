"""Interface of a weight transport, the class that `weights.method` names. Runs on every trainer rank.

Most transports are subclasses of GatheredTransport, whose `push` receives the gathered tensors of the whole model in
order. A transport that does not gather tensors, or sends other data than the model, is a subclass of WeightTransport.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from rlsys.config import Config
from rlsys.config.weight_methods import WEIGHT_METHODS
from rlsys.core.errors import UserError
from rlsys.core.imports import import_attribute
from rlsys.core.weight_updates import WeightUpdate
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums, merge_checksums
from rlsys.weights.fp8 import quantise_for_engines
from rlsys.weights.push_plan import PushPlan

Tensors = Iterable[tuple[str, Tensor]]
"""Tensors with their Hugging Face names, in the trainer's dtype, or quantised for the engines."""


@dataclass(frozen=True)
class Digests:
    """Checksums of the tensors of a push.

    Attributes:
        expected: checksums that engines must report: for each engine rank, one engine size after the other, tensor
            name -> checksum (rlsys.weights.checksums). Complete on rank 0 only.
        hash_seconds: hashing time of the slowest trainer rank.
    """

    expected: list[dict[str, str]]
    hash_seconds: float = 0.0


class WeightTransport(ABC):
    """Transport of the trainer's weights to the engines of an update. It owns the state between pushes.

    Every trainer rank has an instance and calls each method at the same time (collective). `check`, `prepare`,
    `close` and `metrics` are optional.
    """

    ranks_send_parts: ClassVar[bool] = False
    """Whether several ranks each send a part of the model to every engine. If not, one rank sends all of it."""
    excluded: dict[str, str]
    """URL -> reason, for engines that did not get all tensors of the last push from this rank. These engines do not
    serve, and the next push must send them all tensors."""
    sent_bytes: int
    """Bytes that this rank sent to each engine in its last push."""

    @classmethod
    @abstractmethod
    def create(cls, trainer: Trainer, plan: PushPlan) -> Self:
        """Create the transport. `plan`: which trainer rank serves which engine (rlsys.weights.push_plan)."""

    @classmethod  # noqa: B027
    def check(cls, config: Config) -> None:
        """Check that the transport supports the config, before the run starts.

        Raises:
            UserError: the transport does not support the config.
        """

    def prepare(self) -> None:  # noqa: B027
        """Import modules and compile kernels that a push uses. Called while engines start."""

    @abstractmethod
    def update_engines(self, trainer: Trainer, update: WeightUpdate) -> Digests:
        """Load the weights into every engine of the update; set `excluded` and `sent_bytes`.

        Returns:
            Checksums that the engines must report.
        """

    def close(self) -> None:  # noqa: B027
        """Release the state that is kept between pushes, for example process groups with engines."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push, for metrics.jsonl."""
        return {}


class GatheredTransport(WeightTransport):
    """Base of transports that send gathered tensors of the whole model."""

    def __init__(self, config: Config, rank: int = 0, plan: PushPlan | None = None) -> None:
        """Create the transport.

        Args:
            config: config of the run.
            rank: this trainer rank.
            plan: the senders of each engine; None: rank 0 serves all engines.
        """
        self.config, self.rank = config, rank
        self.plan = PushPlan({}, group=False) if plan is None else plan
        self.excluded, self.sent_bytes = {}, 0

    @classmethod
    def create(cls, trainer: Trainer, plan: PushPlan) -> Self:
        return cls(trainer.config, trainer.rank, plan)

    def update_engines(self, trainer: Trainer, update: WeightUpdate) -> Digests:
        checksums = engine_checksums(trainer, shares=True)
        tensors = quantise_for_engines(self.config, trainer.served_tensors())
        self.sent_bytes = self.push(checksums.watch(tensors), update)
        return merge_over_ranks(trainer, checksums)

    @abstractmethod
    def push(self, tensors: Tensors, update: WeightUpdate) -> int:
        """Load `tensors` into every engine of the update; add engines that fail or refuse to `excluded`.

        Every rank must iterate over all tensors, because gathering is collective.

        Returns:
            Bytes that this rank sent to each engine; 0 on a rank that sends nothing.
        """


def engine_checksums(trainer: Trainer, *, shares: bool) -> EngineChecksums:
    """Create the object that computes the checksums of the engines' tensors.

    It ignores the layers for multi-token prediction, which engines do not report.

    Args:
        trainer: trainer of this rank.
        shares: whether all trainer ranks watch the same tensors and each hashes a share of them.
    """
    model = replace(trainer.served_config, mtp=False)
    ranks = trainer.config.parallel.world_size if shares else 1
    return EngineChecksums(
        model, *trainer.config.engine.tps, rank=trainer.rank if ranks > 1 else 0, ranks=ranks
    )


def merge_over_ranks(trainer: Trainer, checksums: EngineChecksums) -> Digests:
    """Merge the checksums of all trainer ranks (collective). The result is complete on rank 0 only."""
    results = trainer.control.to_main((checksums.partial_digests(), checksums.seconds))
    expected = merge_checksums([partial for partial, _ in results])
    return Digests(expected, max((seconds for _, seconds in results), default=0.0))


def transport_class(config: Config) -> type[WeightTransport]:
    """Return the class of weights.method.

    Raises:
        UserError: the import path does not name a subclass of WeightTransport, or the class has abstract methods.
    """
    field, method = "weights.method", config.weights.method
    built_in = WEIGHT_METHODS.get(method)
    transport = import_attribute(field, method if built_in is None else built_in.transport)
    if not isinstance(transport, type) or not issubclass(transport, WeightTransport):
        raise UserError(
            f"{field} = {method!r}: expected a subclass of rlsys.weights.weight_transport.WeightTransport, found "
            f"{'nothing of this name' if transport is None else repr(transport)}"
        )
    if inspect.isabstract(transport):
        missing = ", ".join(sorted(transport.__abstractmethods__))
        raise UserError(f"{field} = {method!r}: {transport.__name__} does not implement {missing}")
    return transport


def check_transport(config: Config) -> None:
    """Check that the class of weights.method exists and supports the config.

    Raises:
        UserError: the class does not exist, or does not support the config.
    """
    transport_class(config).check(config)
