"""Traces of whole train steps by torch's profiler, for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from rlsys.config import Config

FOLDER = "profiles"
"""Folder of the traces in the run folder."""


class StepProfiler:
    """Writer of the traces that `run.profile` selects, for this rank.

    The trace of step 3 on rank 0 is RUN/profiles/step-000003-rank-0.json.gz.
    """

    def __init__(self, config: Config, rank: int) -> None:
        section = config.run.profile
        self._steps = set(section.steps) if section is not None and rank in section.ranks else set()
        self._folder, self._rank = config.run.dir / FOLDER, rank

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Return a context that traces its body if run.profile selects the step. An error leaves no file."""
        if step not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            yield
        self._folder.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(self._folder / f"step-{step:06d}-rank-{self._rank}.json.gz"))
