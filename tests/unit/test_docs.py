"""What the docs name is there: files, headings that links point to, config fields."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rlsys.config import Config
from rlsys.config.weight_methods import WEIGHT_METHODS

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("bench", "slurm")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
FOLDERS = "rlsys|launch|megatron_patches|tests|docs|bench|configs|slurm|examples|requirements"


def anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading: the text of links, lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors_of(markdown: str) -> set[str]:
    """Return the anchors of all headings. GitHub adds -1, -2 and so on to those of repeated headings."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    anchors, counts = set[str](), Counter[str]()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        name = anchor(heading)
        anchors.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return anchors


def test_anchors_are_githubs() -> None:
    markdown = "# A `b`: c_d\n```sh\n# comment\n```\n## [Link](x.md), too\n## Same\n## Same\n"
    assert anchors_of(markdown) == {"a-b-c_d", "link-too", "same", "same-1"}


@pytest.fixture(params=DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def doc(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_files_named_in_the_docs_exist(doc: Path) -> None:
    paths = re.findall(rf"(?<![\w/.<])((?:{FOLDERS})/[\w./-]*\w)", doc.read_text(encoding="utf-8"))
    assert [name for name in paths if not (ROOT / name).exists() and not (doc.parent / name).exists()] == []


def test_links_lead_somewhere(doc: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", doc.read_text(encoding="utf-8")):
        path, _, fragment = target.partition("#")
        target_file = (doc.parent / path).resolve() if path else doc
        assert target_file.exists(), target
        if fragment:
            assert fragment in anchors_of(target_file.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", ["SECURITY.md", "tests/findings_security.md"])
def test_tests_named_in_the_threat_tables_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    tests = {test for source in sources.values() for test in re.findall(r"def (test_\w+)\(", source)}
    paths = re.findall(r"`((?:unit|integration|cluster)/[\w/.]*\w)[`:]", text)
    assert paths and [path for path in paths if not (ROOT / "tests" / path).exists()] == []
    files = [
        name for name in re.findall(r"`(test_\w+\.py)`", text) if not any(p.name == name for p in sources)
    ]
    assert files == []
    test_names = re.findall(r"\b(test_\w+?)(?:\.\.\.)?`", text)
    test_names += [f"test_security_{finding}" for finding in re.findall(r"(?<![/\w])(a\d\d(?:_\w+)?)", text)]
    assert test_names and [test for test in test_names if not any(t.startswith(test) for t in tests)] == []
    for path, finding in re.findall(r"`(unit/[\w/]+\.py)` (a\d\d)", text):
        assert f"def test_security_{finding}_" in sources[ROOT / "tests" / path], (path, finding)


def test_every_way_of_pushing_weights_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert "disk_delta" in WEIGHT_METHODS
    assert [
        method for method in WEIGHT_METHODS if not re.search(rf"`(weights\.method=)?{method}`", text)
    ] == []


def test_pre_commit_hooks_name_existing_commands() -> None:
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


def test_config_fields_named_in_the_docs_exist(doc: Path) -> None:
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    references = re.findall(rf"`({'|'.join(sections)})\.(\w+)\b(?!\.|\()", doc.read_text(encoding="utf-8"))
    files = ("py", "md", "sbatch", "yaml")
    unknown_fields = {
        f"{section}.{field}"
        for section, field in references
        if field not in files
        and not field.endswith("_")  # a family of fields: `weights.canary_*`
        and not hasattr(sections[section], field)
        and field not in getattr(sections[section], "model_fields", {})
    }
    assert unknown_fields == set()
