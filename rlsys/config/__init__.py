"""The config of a run: its sections and fields, loading from YAML, and validation with errors of one line."""

from rlsys.config.load import (
    add_config,
    dump_config,
    load_config,
    load_run_config,
    parse_overrides,
    read_layers,
)
from rlsys.config.mistakes import ConfigError, explain_error
from rlsys.config.same_run import identity, identity_fields
from rlsys.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "add_config",
    "dump_config",
    "explain_error",
    "identity",
    "identity_fields",
    "load_config",
    "load_run_config",
    "parse_overrides",
    "read_layers",
]
