from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint


def checkpoint(
    function: Callable[..., Any], *args: Any, distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None, tp_group: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> AbstractContextManager[None]:
    return nullcontext()


def is_fp8_activation_recompute_enabled() -> bool:
    return False


class CudaRNGStatesTracker: ...
