"""TODO"""

from __future__ import annotations

CONFIG_FILE = "config.yaml"
