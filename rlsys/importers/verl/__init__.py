"""Translates verl's launch scripts and YAML into a config, as of August 2026.

A setting that a script does not set has the default of verl's trainer/config/ppo_trainer.yaml or
ppo_megatron_trainer.yaml.
"""

from rlsys.importers.verl.fields import VERL
from rlsys.importers.verl.settings import EXPECTED, program_index, read_settings, read_yaml
from rlsys.importers.verl.translation import translate

__all__ = ["EXPECTED", "VERL", "program_index", "read_settings", "read_yaml", "translate"]
