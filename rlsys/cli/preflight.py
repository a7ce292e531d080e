"""Preflight of `rlsys train`, `submit` and `explain`: checks that a run of a config can start.

First it checks names, parameters and combinations. Then it creates and runs each plug-in once: the plug-ins of the
rollout process on the run's first prompts, those of the trainer on a synthetic step. Last, it builds the trainer's
layers with the installed packages. It imports torch, needs no GPU, no engine and no network, and writes nothing.
"""

from __future__ import annotations

from rlsys.algo.preflight import check, notes
from rlsys.algo.trial import try_objective
from rlsys.config import Config
from rlsys.data import Tokenizer
from rlsys.data.traces import trace_batches
from rlsys.obs.packages import mismatches
from rlsys.rehearse import trial
from rlsys.rollout.dry_run import dry_run
from rlsys.rollout.preflight import check_names
from rlsys.weights.weight_transport import check_transport


def check_fine_tuning(config: Config) -> list[str]:
    """Check that `rlsys sft` can start: loss, model folder, rows of the first step, and the trainer's layers.

    Returns:
        Notes for the user, one line each.

    Raises:
        UserError: the run cannot start.
    """
    from rlsys.trainer.sft.sft import build_loss

    build_loss(config.sft.loss)
    lines = [str(mismatch) for mismatch in mismatches().values()]
    if not config.model.path.exists():
        return [*lines, f"NOT CHECKED: {config.model.path} does not exist: the rows and the trainer's layers"]
    check_answers(config)
    trial.check_build(config)
    return lines


def check_answers(config: Config) -> None:
    """Check the rows of the first step of `rlsys sft`.

    Raises:
        UserError: a row cannot be trained.
    """
    next(iter(trace_batches(config, Tokenizer.of(config), 0)))


def check_start(config: Config) -> list[str]:
    """Check that a run can start.

    A model folder without a tokenizer is not an error of this check, but of
    rlsys.planner.model_preflight.check_model.

    Returns:
        Notes for the user, one line each. Without a tokenizer, a note lists what was not checked.

    Raises:
        UserError: the run cannot start.
    """
    check_names(config)
    check_transport(config)
    check(config)
    trial_result = dry_run(config)
    try_objective(config, trial_result.rewards)
    trial.check_build(config)
    lines = [*notes(config), *trial_result.notes, *map(str, mismatches().values())]
    if trial_result.rewards is None:
        lines.append(
            f"NOT CHECKED: {config.model.path} has no tokenizer.json: the first prompt, its generator and its reward"
        )
    return lines
