"""Build of the trainer's layers, as `python -m rlsys.rehearse.build`.

The process reads a config as JSON from stdin, and exits with 0 if the layers can be built. It builds one rank of the
first, the fullest middle and the last pipeline stage. The layers have shapes but no values (torch's device `meta`),
and no other rank exists, so that the build needs no memory, network or weights.
"""

from __future__ import annotations

import sys
import warnings

import megatron_patches
from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import trained_model
from rlsys.core.errors import RlsysError
from rlsys.rehearse import world
from rlsys.rehearse.kinds import kinds_of_rank


def build(config: Config) -> None:
    """Build the layers of the policy and its teachers on the meta device, for one rank at a time.

    Raises:
        UserError: The layout does not fit a model, or a model's folder is invalid.
    """
    megatron_patches.apply()
    import torch

    from rlsys.trainer import setup
    from rlsys.trainer.model.model import build_layers  # imports megatron

    meta = torch.device("meta")
    hf = trained_model(config)
    models = [hf, *_teachers(config)]
    for rank in kinds_of_rank(config, hf):
        with world.of_rank(rank, config.parallel.world_size):
            setup.init_distributed(config)
            try:
                with meta:
                    for model in models:
                        build_layers(config, model, meta)
            finally:
                setup.leave_layout()


def _teachers(config: Config) -> list[HFConfig]:
    """Return the configurations of the teachers that the trainer's ranks load, too."""
    teacher = config.algo.teacher
    if teacher is None or teacher.engine is not None:
        return []
    return [HFConfig.read(folder) for folder in teacher.folders.values()]


def main() -> None:
    warnings.filterwarnings("ignore")
    config = Config.model_validate_json(sys.stdin.read())
    if config.model.fp8_trainer:  # Megatron-Core supports FP8 only with Transformer Engine, which needs a GPU
        config = config.model_copy(update={"model": config.model.model_copy(update={"fp8": "none"})})
    try:
        build(config)
    except RlsysError as e:
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
