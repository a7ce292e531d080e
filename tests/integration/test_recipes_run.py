"""bench/recipes.py on the real stack: a recipe with the shipped model, two steps, from nothing to its record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from recipes import Place, Recipe, run

pytestmark = pytest.mark.integration

SMALL = ["trainer.steps=2", "rollout.groups_per_step=4", "eval.interval=1", "eval.prompts=8"]


def test_a_recipe_runs_once_from_scratch_to_its_record(tmp_path: Path) -> None:
    recipe = dataclasses.replace(Recipe.read("chain_sum"), short={"rl": SMALL})
    location = Place(tmp_path, recipe, "short", 1)
    record = run(location)
    assert [step for step, _ in record["curve"]] == [0, 1, 2]
    assert record["prompts"] == 8 and len(record["rewards"]) == 2
    assert record["stages"]["rl"]["cpu_seconds"] > 1, "of all processes, the engine too"
    assert json.loads(location.record.read_text()) == record
    log = location.folder / "rl.log"
    size = log.stat().st_size
    assert run(location) == record and log.stat().st_size == size, "it is not run again"
