"""Names of files in a run folder."""

from __future__ import annotations

CONFIG_FILE = "config.yaml"
