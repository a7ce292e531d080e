"""Sharded push: the trainer ranks that own tensors send them, concurrently (rlsys.weights.shard_plan). Collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.hooks.bucket_order import Buckets, TensorSpec, aligned_size, encode_description
from rlsys.engine.weight_calls import load_from_senders
from rlsys.trainer.control import Control
from rlsys.trainer.trainer import Trainer
from rlsys.weights.buckets import Bucket, FlatBucket, StagingBuffers, as_bytes, send_pipelined
from rlsys.weights.fp8 import quantise_for_engines
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.receivers import Answers, Receivers
from rlsys.weights.senders_group import SendersGroup, SendersGroupCache
from rlsys.weights.shard_plan import Part, SendersPlan, plan_senders
from rlsys.weights.shards import Shards
from rlsys.weights.transports import prepare_sglang
from rlsys.weights.weight_transport import (
    Digests,
    Tensors,
    WeightTransport,
    engine_checksums,
    merge_over_ranks,
)

Prepare = Callable[[Tensors], Iterator[tuple[str, Tensor]]]


class ShardedPush(WeightTransport):
    """Sends weights from all trainer ranks.

    Rank 0 sends one request to each engine; the engines then receive all buckets in order
    (rlsys.engine.hooks.bucket_order). All ranks iterate over the buckets in rounds: in each round a rank sends its
    own bucket, and its shards to the other senders. Ranks and engines never wait for each other in a circle, because
    all buckets of a round are gathered before any rank starts the round after the next.
    """

    ranks_send_parts = True

    def __init__(
        self, config: Config, plan: SendersPlan, shards: Shards, control: Control, rank: int
    ) -> None:
        """Create the transport, and exchange the sizes of the buckets (collective).

        Args:
            config: config of the run.
            plan: the senders and their buckets.
            shards: this rank's shards.
            control: collective operations of the trainer ranks.
            rank: this trainer rank.
        """
        self._config, self._plan, self._shards, self._control = config, plan, shards, control
        self._rank = rank
        self._buffers = StagingBuffers(shared=False)
        self._groups = SendersGroupCache(
            control, rank, config.parallel.world_size, config.work_seconds, config.answer_seconds
        )
        own_schedules = [(index, s) for index, s in enumerate(plan.schedules) if s.sender == rank]
        self._sender_index = own_schedules[0][0] if own_schedules else None
        """Index of this rank among the senders; None if it sends only shards to other senders."""
        sizes = [self._size(parts) for _, schedule in own_schedules for parts in schedule.buckets]
        all_sizes: list[list[int]] = control.gather(sizes)
        self._sizes = tuple(tuple(all_sizes[schedule.sender]) for schedule in plan.schedules)
        self.excluded, self.sent_bytes = {}, 0

    @classmethod
    def create(cls, trainer: Trainer, plan: PushPlan) -> Self:
        senders = plan_senders(
            trainer.config, trainer.served_config, experts_together=not torch.cuda.is_available()
        )
        shards = Shards(trainer.local_weights(), trainer.served_config)
        return cls(trainer.config, senders, shards, trainer.control, trainer.rank)

    def prepare(self) -> None:
        """Import the modules of SGLang that a push uses."""
        prepare_sglang()

    def update_engines(self, trainer: Trainer, update: WeightUpdate) -> Digests:
        checksums = engine_checksums(trainer, shares=False)

        def prepare(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
            return checksums.watch(quantise_for_engines(self._config, tensors))

        self.sent_bytes = self._push(update, prepare)
        return merge_over_ranks(trainer, checksums)

    def _push(self, update: WeightUpdate, prepare: Prepare) -> int:
        """Load the trainer's weights into every engine of the update.

        An engine that fails or refuses is `excluded` from this push, and its group closed.

        Args:
            update: the receivers.
            prepare: transforms the tensors of a bucket before they are sent.

        Returns:
            Bytes that this rank sent to each engine.
        """
        self.excluded = {}
        if not update.engines:
            return 0
        with Receivers(update.engines, self._config.work_seconds) as receivers:
            group = self._groups.get(receivers)
            if not receivers.present:
                self.excluded = receivers.excluded
                self._groups.leave(group)
                return 0
            answers = self._request(group, receivers)
            failed = group.connect()

            def send(flat: FlatBucket) -> None:
                assert self._sender_index is not None
                group.send(flat.memory, self._sender_index, failed)

            sent_bytes = send_pipelined(self._gather(prepare), self._flatten, send)
            receivers.wait_all(answers)
            # An engine's error response explains the broken connection, so it takes precedence.
            self.excluded = failed | receivers.excluded
        if failed_urls := set().union(*self._control.gather(set(self.excluded))):
            self._groups.leave(group, failed_urls)
        return sent_bytes

    def close(self) -> None:
        """Leave the engines' process groups."""
        self._groups.close()

    def _request(self, group: SendersGroup, receivers: Receivers) -> Answers:
        """Request each engine to receive all buckets, on rank 0. Other ranks only clear the list of engines."""
        if self._rank != 0:
            receivers.present = []
            return {}
        ranks, count = tuple(s.sender for s in self._plan.schedules), len(group.members)
        descriptions = [Buckets(ranks, self._sizes, number, count) for number in range(count)]
        return receivers.post_all([load_from_senders(group.name, buckets) for buckets in descriptions])

    def _gather(self, prepare: Prepare) -> Iterator[Bucket]:
        """Yield the buckets that this rank sends; between them, send its shards to the other senders."""
        for number in range(max(len(s.buckets) for s in self._plan.schedules)):
            for schedule in self._plan.schedules:
                if number >= len(schedule.buckets):
                    continue
                if schedule.sender == self._rank:
                    yield list(prepare(self._shards.collect(schedule.buckets[number])))
                else:
                    self._shards.send_shards(schedule.buckets[number], schedule.sender)

    def _flatten(self, bucket: Bucket) -> FlatBucket:
        """Concatenate the tensors of a bucket, each padded to `aligned_size`, and their encoded description."""
        parts = [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        device = bucket[0][1].device
        pieces = []
        for _, tensor in bucket:
            pieces.append(as_bytes(tensor))
            if missing := aligned_size(tensor.nbytes) - tensor.nbytes:
                pieces.append(torch.zeros(missing, dtype=torch.uint8, device=device))
        header = bytearray(encode_description([_describe(name, tensor) for name, tensor in bucket]))
        pieces.append(torch.frombuffer(header, dtype=torch.uint8).to(device))
        return FlatBucket(self._buffers.flatten_bytes(pieces), parts)

    def _size(self, parts: Iterable[Part]) -> int:
        """Return the number of bytes that `_flatten` will return for the bucket of these parameters."""
        tensors = list(quantise_for_engines(self._config, self._shards.meta_tensors(tuple(parts))))
        data = sum(aligned_size(tensor.nbytes) for _, tensor in tensors)
        return data + len(encode_description([_describe(name, tensor) for name, tensor in tensors]))


def _describe(name: str, tensor: Tensor) -> TensorSpec:
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
