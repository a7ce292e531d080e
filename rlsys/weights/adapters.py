"""Sends the adapters of trainer.lora and nothing else, through the memory of one machine. Rank 0 sends them all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.peft import adapter_config
from rlsys.core.errors import RunError
from rlsys.core.weight_updates import PushTicket
from rlsys.engine.weight_calls import forget_adapter, load_adapter
from rlsys.weights.buckets import Areas
from rlsys.weights.receivers import Gone, Receivers
from rlsys.weights.transports import as_handed_over, prepare_sglang, serializer


class AdapterPush:
    """An engine forgets the adapter of the last push and takes the new one, under the same name. It compares
    checksums of what it got, and dies of a difference."""

    def __init__(self, config: Config, hf: HFConfig, rank: int) -> None:
        assert config.trainer.lora is not None
        self._rank = rank
        self._told = adapter_config(config.model.path, config.trainer.lora, hf)
        self._seconds = config.work_seconds
        self.left_out: dict[str, str] = {}
        """Engines that the last push could not give the adapter to: URL -> why."""

    def prepare(self) -> None:
        """Import what the first push needs."""
        if self._rank == 0:
            prepare_sglang()
            # Also beside a GPU: what is sent lies in host memory, from where each engine copies it to its own.
            torch.multiprocessing.set_sharing_strategy("file_system")

    def push(self, factors: Iterable[tuple[str, Tensor]], ticket: PushTicket) -> int:
        """Consume `factors` (collective) and load them into every engine of the ticket; their bytes."""
        self.left_out = {}
        if self._rank != 0 or not ticket.engines:
            for _ in factors:
                pass
            return 0
        self.prepare()
        bucket = [(name, factor.detach().cpu()) for name, factor in factors]
        sums = {name: _sha256(factor) for name, factor in bucket}
        serialize, tensors = serializer(), as_handed_over(Areas(shared=True).lay(bucket))
        with Receivers(ticket.engines, self._seconds) as receivers:
            self._forget(receivers)
            # One handle for each engine rank: opening uses it up.
            handles = [[serialize(tensors) for _ in range(engine.tp)] for engine in receivers.present]
            receivers.settle(receivers.ask([load_adapter(self._told, of, sums) for of in handles]))
        self.left_out = receivers.left_out
        return sum(factor.nbytes for _, factor in bucket)

    @staticmethod
    def _forget(receivers: Receivers) -> None:
        """An engine that has just started refuses, as it knows none; one that failed half-way may know one."""
        answers = receivers.ask([forget_adapter()] * len(receivers.present))
        for engine in list(receivers.present):
            try:
                answers[engine.url].result()
            except Gone as e:
                receivers.leave_out(engine, e)
            except RunError as e:
                if engine.holds >= 0:
                    receivers.leave_out(engine, e)


def _sha256(tensor: Tensor) -> str:
    """As SGLang compares it."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
