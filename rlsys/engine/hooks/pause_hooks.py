"""Hook into SGLang: an engine that pauses sends its generated tokens before weights change.

A stream sends tokens in chunks. A chunk has only the weight version at the time of sending, so it must not contain
tokens from before and after a push. Only the request's last chunk lists all versions, and it is lost if the engine
dies earlier.

Delete this when SGLang does the same, or lists versions in each chunk; checked with 0.5.23.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.pause_generation"


def flush_streams(result: None, scheduler: Any, _request: Any) -> None:
    """Send all generated tokens after a pause. The requests are then queued or still running."""
    requests = {*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue}
    requests |= {scheduler.chunked_req} - {None}
    waiting = [
        r for r in requests if r.stream and not r.finished() and len(r.output_ids) > r.send_token_offset
    ]
    if not waiting:
        return
    intervals = [r.sampling_params.stream_interval for r in waiting]
    for request in waiting:
        request.sampling_params.stream_interval = 1
    scheduler.output_streamer.stream_output(waiting, any(r.return_logprob for r in waiting))
    for request, interval in zip(waiting, intervals, strict=True):
        request.sampling_params.stream_interval = interval
