"""verl's launch scripts and YAML (trainer/config/ppo_trainer.yaml, ppo_megatron_trainer.yaml) -> a config of ours.

Read as of August 2026; defaults that a script omits are verl's own.
"""

from rlsys.importers.verl.fields import VERL
from rlsys.importers.verl.settings import EXPECTED, program_index, read_settings, read_yaml
from rlsys.importers.verl.translation import translate

__all__ = ["EXPECTED", "VERL", "program_index", "read_settings", "read_yaml", "translate"]
