"""Weight updates that send only the LoRA adapter (trainer.lora), from rank 0 through shared memory of one machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.peft import adapter_config
from rlsys.core.errors import RunError
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.weight_calls import load_adapter, unload_adapter
from rlsys.trainer.trainer import Trainer
from rlsys.weights.buckets import StagingBuffers
from rlsys.weights.checksums import base_layer_name
from rlsys.weights.push_plan import PushPlan
from rlsys.weights.receivers import EngineUnreachable, Receivers
from rlsys.weights.transports import flattened_payload, prepare_sglang, serializer
from rlsys.weights.weight_transport import Digests, WeightTransport, engine_checksums, merge_over_ranks


class AdapterPush(WeightTransport):
    """Sends the adapter to engines, which unload the previous adapter and load the new one under the same name.

    An engine compares the tensors that it received with their checksums, and exits on a difference.
    """

    def __init__(self, config: Config, hf: HFConfig, rank: int) -> None:
        assert config.trainer.lora is not None
        self._rank = rank
        self._adapter_config = adapter_config(config.model.path, config.trainer.lora, hf)
        self._seconds = config.work_seconds
        self.excluded, self.sent_bytes = {}, 0
        self._base: Digests | None = None
        """Checksums of the base model; None before the first push. The base model never changes."""

    @classmethod
    def create(cls, trainer: Trainer, plan: PushPlan) -> Self:
        return cls(trainer.config, trainer.hf, trainer.rank)

    def prepare(self) -> None:
        """Import the modules that a push uses, on rank 0."""
        if self._rank == 0:
            prepare_sglang()
            # Also with a GPU: the tensors are sent from host memory, and each engine copies them to its device.
            torch.multiprocessing.set_sharing_strategy("file_system")

    def update_engines(self, trainer: Trainer, update: WeightUpdate) -> Digests:
        """Load the adapter into every engine of the update.

        Returns:
            Checksums of the base model, because engines report those; computed in the first push.
        """
        self.sent_bytes = self.push(trainer.named_factors(), update)
        if self._base is not None:
            return self._base
        checksums = engine_checksums(trainer, shares=True)
        for _ in checksums.watch(trainer.named_base_tensors()):
            pass
        digests = merge_over_ranks(trainer, checksums)
        expected = [
            {base_layer_name(name): digest for name, digest in rank_digests.items()}
            for rank_digests in digests.expected
        ]
        self._base = Digests(expected)
        return Digests(expected, digests.hash_seconds)

    def push(self, factors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> int:
        """Load the adapter into every engine of the update (collective).

        Args:
            factors: PEFT names and the A and B matrices. Every rank consumes them.
            update: the receivers.

        Returns:
            Bytes sent to each engine; 0 on all ranks but 0.
        """
        self.excluded = {}
        if self._rank != 0 or not update.engines:
            for _ in factors:
                pass
            return 0
        self.prepare()
        bucket = [(name, factor.detach().cpu()) for name, factor in factors]
        sums = {name: _sha256(factor) for name, factor in bucket}
        serialize, tensors = serializer(), flattened_payload(StagingBuffers(shared=True).flatten(bucket))
        with Receivers(update.engines, self._seconds) as receivers:
            self._unload(receivers)
            # A handle can be opened only once, so each engine rank gets its own.
            handles = [[serialize(tensors) for _ in range(engine.tp)] for engine in receivers.present]
            receivers.wait_all(
                receivers.post_all(
                    [load_adapter(self._adapter_config, rank_handles, sums) for rank_handles in handles]
                )
            )
        self.excluded = receivers.excluded
        return sum(factor.nbytes for _, factor in bucket)

    @staticmethod
    def _unload(receivers: Receivers) -> None:
        """Unload the previous adapter. Refusals are ignored: a newly started engine has no adapter."""
        answers = receivers.post_all([unload_adapter()] * len(receivers.present))
        for engine in list(receivers.present):
            try:
                answers[engine.url].result()
            except EngineUnreachable as e:
                receivers.exclude(engine, e)
            except RunError as e:
                if engine.holds >= 0:
                    receivers.exclude(engine, e)


def _sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in hexadecimal, as SGLang computes it."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
