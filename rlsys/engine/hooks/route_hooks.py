"""Hook into SGLang: write the routed experts of a finished request to the run's folder; the response has a pointer.

It applies to requests with rlsys.segments.route_records.ROUTES_PARAM. All others get SGLang's own response.
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
    """Return the writer of this scheduler process; None for a scheduler that sends no responses."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    return route_writer(ranks.tp_rank) if ranks.attn_tp_rank == 0 and ranks.attn_cp_rank == 0 else None


def write_routes(result: None, processor: Any, request: Any) -> None:
    """Replace `request.routed_experts` `[positions, layers, topk]` int32, which SGLang has just set, by a pointer."""
    experts = request.routed_experts
    requested = (request.sampling_params.custom_params or {}).get(ROUTES_PARAM)
    if experts is None or not len(experts) or not requested or (writer := _writer()) is None:
        return
    try:
        pointer = writer.append(experts.numpy(), request.routed_experts_start_len)
    except (OSError, ValueError) as e:
        log.warning("cannot write routed experts to the run's folder; the response contains them: %s", e)
        return
    request.routed_experts = torch.frombuffer(bytearray(pointer), dtype=torch.uint8)
