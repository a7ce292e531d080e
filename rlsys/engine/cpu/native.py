"""SGLang's platform on a host without CUDA.

Only SGLang imports this module, by the path that `platform.activate` returns.
"""

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
        return ngram.cache_locations

    def empty_cache(self) -> None:
        """Do nothing: reference counts free the memory that a flush drops.

        SGLang's own method runs the garbage collector, which takes a third of a second in each flush.
        """
