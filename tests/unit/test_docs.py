"""What the docs name is there: files, headings that links point to, config fields."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rlsys.config import Config
from rlsys.config.rollout import WeightsConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("bench", "examples", "slurm")),
]
FOLDERS = "rlsys|launch|megatron_patches|tests|docs|bench|configs|slurm|examples|requirements"


def anchor(heading: str) -> str:
    """As GitHub makes it: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.fixture(params=DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def doc(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_files_are_there(doc: Path) -> None:
    named = re.findall(rf"(?<![\w/.<])((?:{FOLDERS})/[\w./-]*\w)", doc.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists() and not (doc.parent / name).exists()] == []


def test_links_lead_somewhere(doc: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", doc.read_text(encoding="utf-8")):
        path, _, place = target.partition("#")
        there = (doc.parent / path).resolve() if path else doc
        assert there.exists(), target
        if place:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in {anchor(heading) for heading in headings}, target


def test_every_way_of_pushing_weights_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    methods = get_args(WeightsConfig.model_fields["method"].annotation)
    assert "disk_delta" in methods
    assert [method for method in methods if not re.search(rf"`(weights\.method=)?{method}`", text)] == []


def test_hooks_of_pre_commit_name_commands_that_are_there() -> None:
    """The lint and the format of `make check`, and that no key gets into a commit."""
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["id"]: hook for repo in repos for hook in repo["hooks"]}
    assert hooks.keys() >= {"ruff-format", "ruff", "detect-private-key"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in (hook["entry"].split() for hook in hooks.values() if "entry" in hook):
        folder, name = command[0].rsplit("/", 1)
        assert folder == ".venv/bin", "where `make setup-dev` puts it"
        assert Path(sys.prefix, "bin", name).is_file()
        assert f"$(VENV)/{' '.join([name, *command[1:]])} " in makefile
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", r["rev"]) for r in repos if r["repo"] != "local")


def test_config_fields_are_there(doc: Path) -> None:
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    named = re.findall(rf"`({'|'.join(sections)})\.(\w+)\b(?!\.|\()", doc.read_text(encoding="utf-8"))
    files = ("py", "md", "sbatch", "yaml")
    gone = {
        f"{section}.{field}"
        for section, field in named
        if field not in files
        and not field.endswith("_")  # a family of fields: `weights.canary_*`
        and not hasattr(sections[section], field)
        and field not in getattr(sections[section], "model_fields", {})
    }
    assert gone == set()
