"""A launch with the real supervisor and exporter, and an idle trainer: `... exporter_stage.py FOLDER PORT`."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.backends.local import LocalBackend
from launch.exporter import run_plan
from launch.plan import LaunchPlan, Node
from launch.rundir import open_run_dir
from launch.stops import StopSignals
from rlsys.obs.role import run_role
from tests.helpers.supervisor_stage import Stage


def main(folder: Path, port: int) -> None:
    stage = Stage(folder)
    launch = stage.config.launch.model_copy(update={"metrics_port": port})
    config = stage.config.model_copy(update={"launch": launch})
    trainer = stage.role("trainer", "while True: signal.pause()")
    with StopSignals().listening() as stop, open_run_dir(config, stage.display.phase) as run_dir:
        plan = LaunchPlan([trainer], [Node("n0")])
        run_plan(
            config, plan, LocalBackend(config, run_dir.lock_fd), run_dir, stage.display, stop, lambda: None
        )


if __name__ == "__main__":
    run_role(lambda: main(Path(sys.argv[1]), int(sys.argv[2])))
