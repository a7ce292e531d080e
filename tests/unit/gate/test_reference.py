"""docs/config.md, docs/commands.md and docs/recipes.md are what `python -m tests.gate.reference` writes."""

from __future__ import annotations

from rlsys.config import Config
from tests.gate.reference import (
    COMMANDS_PAGE,
    CONFIG_PAGE,
    RECIPES_PAGE,
    commands_page,
    config_page,
    recipes_page,
)


def test_the_reference_of_the_config_is_current() -> None:
    assert CONFIG_PAGE.read_text(encoding="utf-8") == config_page()


def test_the_reference_of_the_commands_is_current() -> None:
    assert COMMANDS_PAGE.read_text(encoding="utf-8") == commands_page()


def test_the_list_of_recipes_is_current() -> None:
    assert RECIPES_PAGE.read_text(encoding="utf-8") == recipes_page()


def test_every_section_and_an_option_of_a_subcommand_is_listed() -> None:
    config, commands = config_page(), commands_page()
    assert all(f"\n## {section}\n" in config for section in Config.model_fields)
    assert "- **`checkpoint_every`** (integer, above 0; default `10`): " in config
    assert "### engine.pools\n" in config, "a section inside a section"
    assert "- **`stop`** (list of text; default `[]`): " in config, "a default that a factory makes"
    assert "### rlsys engines join\n" in commands and "| `--host HOST` |" in commands
