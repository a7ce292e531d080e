"""A hook into SGLang: an engine that pauses sends what it has made so far, before weights change.

A stream brings tokens in parts, and a part says one version of the weights: the one when it was sent. One that the
engine went on with after a push would call its first tokens by the wrong version until the request's last part, which
tells all versions; and who dies before that part comes has them wrong for ever.

To delete when SGLang does so itself, or names versions in every part; seen in 0.5.23.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.pause_generation"


def send_what_is_made(result: None, scheduler: Any, _request: Any) -> None:
    """Called by SGLang after it has paused: the requests are in its queue, or stay where they were."""
    kept = {*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue}
    kept |= {scheduler.chunked_req} - {None}
    waiting = [r for r in kept if r.stream and not r.finished() and len(r.output_ids) > r.send_token_offset]
    if not waiting:
        return
    usual = [r.sampling_params.stream_interval for r in waiting]
    for request in waiting:
        request.sampling_params.stream_interval = 1
    scheduler.output_streamer.stream_output(waiting, any(r.return_logprob for r in waiting))
    for request, interval in zip(waiting, usual, strict=True):
        request.sampling_params.stream_interval = interval
