"""The platform that `cpu_platform.activate` names. Imported by SGLang only."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from rlsys.engine.cpu import ngram


class CpuNativePlatform(SRTPlatform, CpuDeviceMixin):
    """A CPU on which every op runs as plain torch."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "NGRAM"

    def get_speculative_worker_cls(self, algorithm: str) -> object:
        return ngram.worker(algorithm)

    def get_speculative_cache_locs_fn(self) -> object:
        return ngram.extended_places

    def empty_cache(self) -> None:
        """Nothing, where SGLang's own collects garbage: a walk through all that it imports, a third of a second in
        every flush. What a flush drops is freed by its reference counts.
        """
