"""A hook into SGLang: routes of a finished request go to the run's folder, and its answer carries a pointer.

Only for requests with rlsys.segments.route_records.ROUTES_PARAM; all others get SGLang's own answer.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from rlsys.engine.hooks.route_writer import RouteWriter, route_writer
from rlsys.segments.route_records import ROUTES_PARAM

TARGET = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)

log = logging.getLogger("rlsys.engine")


@functools.cache
def _writer() -> RouteWriter | None:
    """Of this process, a scheduler; None also for one that answers nobody."""
    from sglang.srt.runtime_context import get_parallel

    here = get_parallel()
    return route_writer(here.tp_rank) if here.attn_tp_rank == 0 and here.attn_cp_rank == 0 else None


def write_routes(result: None, processor: Any, request: Any) -> None:
    """Called by SGLang after it has set `request.routed_experts` to `[positions, layers, topk]` int32."""
    experts = request.routed_experts
    asked = (request.sampling_params.custom_params or {}).get(ROUTES_PARAM)
    if experts is None or not len(experts) or not asked or (writer := _writer()) is None:
        return
    try:
        found = writer.append(experts.numpy(), request.routed_experts_start_len)
    except (OSError, ValueError) as e:
        log.warning("routes go into the answer: %s", e)
        return
    request.routed_experts = torch.frombuffer(bytearray(found), dtype=torch.uint8)
