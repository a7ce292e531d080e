"""Before `rlsys train` or `submit`, and by `explain`: a config that passes here starts.

Names, parameters and what has no meaning together first; then each plug-in is made and run once, those of the
rollout process on the run's own first prompts, those of the trainer on a made-up step. Last, the trainer's layers are
built with the installed packages. Imports torch; needs no GPU, no engine and no network, and writes nothing.
"""

from __future__ import annotations

from rlsys.algo.preflight import check, notes
from rlsys.algo.trial import try_objective
from rlsys.config import Config
from rlsys.obs.packages import mismatches
from rlsys.rehearse import trial
from rlsys.rollout.dry_run import dry_run
from rlsys.rollout.preflight import check_names


def check_start(config: Config) -> list[str]:
    """What is worth knowing of a run that can start, one line each. Raises UserError, one line.

    A folder without a tokenizer is no mistake here (rlsys.planner.model_preflight.check_model says that it cannot be
    trained): a line says what was not checked.
    """
    check_names(config)
    check(config)
    tried = dry_run(config)
    try_objective(config, tried.rewards)
    trial.check_build(config)
    found = [*notes(config), *tried.notes, *map(str, mismatches().values())]
    if tried.rewards is None:
        found.append(
            f"NOT CHECKED: {config.model.path} has no tokenizer.json: the first prompt, its generator and its reward"
        )
    return found
