"""Which mutants are tried: one change each of a line of code, the lines drawn with equal chances.

The changes are those of cosmic-ray, of its many pairs of operators those that a slip of the hand makes (`<` for
`<=`, `+` for `-`), and statements left out. What is drawn hangs on the text of a line and of its function, not on
where it stands: an edit elsewhere does not draw anew.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import parso
import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
PAIRS = {
    "ReplaceComparisonOperator": "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is",
    "ReplaceBinaryOperator": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr",
    "ReplaceUnaryOperator": "USub_UAdd Delete_Not Delete_Invert",
}
"""Of cosmic-ray's operators that replace one sign by another, the pairs we use; of its others, those below."""
OTHERS = [
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
]
ARITHMETIC = ("arith_expr", "term", "power", "expr", "and_expr")
"""Where a sign stands between values: cosmic-ray takes `f(*, a)` and `{**a}` for products and powers."""

Position = tuple[tuple[int, int], tuple[int, int]]
"""Line and column of the first and of the last letter."""


class DropStatement(Operator):
    """`pass` in the place of a call, or of a value put into an attribute or an item."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type != "simple_stmt":
            return
        statement = node.children[0]
        assigned = statement.type == "expr_stmt" and statement.children[0].type in ("atom_expr", "power")
        is_call = statement.type in ("atom_expr", "power") and statement.get_code().rstrip().endswith(")")
        if assigned or is_call:
            yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        old = node.children[0]
        new = parso.parse("pass").children[0]
        new.prefix, new.parent = old.get_first_leaf().prefix, node
        node.children[0] = new
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("f(x)\n", "pass\n"), Example("a.b = 1\n", "pass\n"), Example("a[0] += 1\n", "pass\n"))


class CatchNothing(Operator):
    """An empty tuple in the place of the exceptions of an `except`. cosmic-ray's own fails on dotted names."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type == "except_clause" and len(node.children) > 1:
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        empty = parso.parse("()").children[0]
        empty.get_first_leaf().prefix = " "
        node.children[1] = empty
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("try: f()\nexcept a.B as e: g()\n", "try: f()\nexcept () as e: g()\n"),)


def operators() -> dict[str, list[Operator]]:
    """Family -> its operators. A line's family is drawn before the operator in it."""
    provider = OperatorProvider()
    families = {
        family: [provider[f"{family}_{pair}"]() for pair in pairs.split()] for family, pairs in PAIRS.items()
    }
    return {
        **families,
        **{name: [provider[name]()] for name in OTHERS},
        "CatchNothing": [CatchNothing()],
        "DropStatement": [DropStatement()],
    }


@dataclass(frozen=True)
class Mutant:
    """`function`: with its class, or "" outside; `before` and `after`: what changed, stripped, each in one line."""

    file: str
    line: int
    function: str
    before: str
    after: str
    mutated: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.before, self.after

    def diff(self, original: str) -> str:
        lines = difflib.unified_diff(
            original.splitlines(), self.mutated.splitlines(), f"a/{self.file}", f"b/{self.file}", lineterm=""
        )
        return "\n".join(lines)


def meaning(source: str) -> str | None:
    """The program without prose and what only types and schemas read (annotations, a Protocol's inside); None when it
    is no program."""
    try:
        tree = _Types().visit(ast.parse(source))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "Protocol" for b in node.bases):
            node.body = [ast.Pass()]
    return ast.dump(tree)


class _Types(ast.NodeTransformer):
    """Leaves out what an attribute is said to be before it has a value."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return ast.Pass() if node.value is None and isinstance(node.target, ast.Attribute) else node


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[range, str]]:
    """Lines and name of each function or class, the outer ones first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}".lstrip(".")
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield range(first, (node.end_lineno or node.lineno) + 1), name
            yield from functions(node, name)
        else:
            yield from functions(node, inside)


def statement_lines(source: str, line: int) -> range:
    """Lines of the statement around a line: of an `if`, a loop or a function, its head alone."""
    statement_range = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else (node.end_lineno or node.lineno)
        lines = range(node.lineno, max(last, node.lineno) + 1)
        if line in lines:
            statement_range = lines  # ast.walk goes inwards: the innermost is the last
    return statement_range


def around(source: str, line: int) -> list[range]:
    """Lines of the statement, of its function or class, of what that is in, and of the file."""
    inside = [lines for lines, _ in functions(ast.parse(source)) if line in lines]
    return [statement_lines(source, line), *reversed(inside), range(1, source.count("\n") + 2)]


def chance(*words: object) -> str:
    """Sorting by it shuffles; the same words always have the same one."""
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


class Source:
    """A file and every place at which it can be changed."""

    def __init__(self, root: Path, file: str) -> None:
        self.file = file
        self.text = (root / file).read_text(encoding="utf-8")
        self._lines = self.text.splitlines()
        self._meaning = meaning(self.text)
        self._functions = list(functions(ast.parse(self.text)))
        self._places: dict[int, dict[str, list[tuple[Operator, int]]]] = {}
        nodes = list(ast_nodes(get_ast(self.text)))
        for family, members in operators().items():
            for operator in members:
                positions = [
                    (node, start[0]) for node in nodes for start, _ in operator.mutation_positions(node)
                ]
                for occurrence, (node, line) in enumerate(positions):
                    if family != "ReplaceBinaryOperator" or node.parent.type in ARITHMETIC:
                        self._places.setdefault(line, {}).setdefault(family, []).append(
                            (operator, occurrence)
                        )

    def lines(self, seed: int) -> list[tuple[str, int]]:
        """Chance and number of each line that can be changed."""
        occurrences: dict[tuple[str, str], int] = {}
        chances = []
        for line in sorted(self._places):
            words = self.function(line), self._lines[line - 1].strip()
            occurrences[words] = occurrences.get(words, 0) + 1
            chances.append((chance(seed, self.file, *words, occurrences[words]), line))
        return chances

    def function(self, line: int) -> str:
        return next((name for lines, name in reversed(self._functions) if line in lines), "")

    def mutant(self, line: int, luck: str) -> Mutant | None:
        """Of the line's changes that mean something, the one that luck chooses."""
        for family in sorted(self._places[line], key=lambda name: chance(luck, name)):
            choices = self._places[line][family]
            for n in sorted(range(len(choices)), key=lambda n: chance(luck, family, n)):
                operator, occurrence = choices[n]
                mutated = mutate_code(self.text, operator, occurrence)
                if mutated is None or (changed := meaning(mutated)) is None or changed == self._meaning:
                    continue
                text_before, text_after = changed_lines(self.text, mutated)
                return Mutant(self.file, line, self.function(line), text_before, text_after, mutated)
        return None


def changed_lines(original: str, mutated: str) -> tuple[str, str]:
    """What stood there and what stands there now, each in one line."""
    old, new = original.splitlines(), mutated.splitlines()
    blocks = [b for b in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if b[0] != "equal"]
    lines_before = [line.strip() for _, i, j, _, _ in blocks for line in old[i:j]]
    lines_after = [line.strip() for _, _, _, i, j in blocks for line in new[i:j]]
    return " ".join(lines_before), " ".join(lines_after)


@dataclass
class Equivalents:
    """What no test can notice, read from equivalent_mutants.yaml."""

    entries: dict[tuple[str, str, str, str], str]
    anywhere: dict[str, str]

    @classmethod
    def read(cls, file: Path = EQUIVALENT) -> Equivalents:
        listed = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = {
            (e["file"], e["function"], e["before"], e["after"]): e["reason"] for e in listed["mutants"]
        }
        return cls(entries, {e["text"]: e["reason"] for e in listed["anywhere"]})

    def __contains__(self, mutant: Mutant) -> bool:
        removed_texts = (
            text for text in self.anywhere if mutant.before.count(text) > mutant.after.count(text)
        )
        return mutant.key in self.entries or any(removed_texts)

    def stale(self, root: Path) -> list[str]:
        """A line for each entry whose line is no longer in its file."""
        stale_entries = []
        for file, function, old_line, _ in self.entries:
            path = root / file
            text = " ".join(path.read_text(encoding="utf-8").split()) if path.exists() else ""
            if " ".join(old_line.split()) not in text:
                stale_entries.append(f"{file}: {function}: no longer there: {old_line}")
        return stale_entries


def files(root: Path, places: Iterable[str]) -> list[str]:
    """Python files of folders and the files themselves, relative to the root."""
    paths = [
        path
        for entry in places
        for path in ((root / entry).rglob("*.py") if (root / entry).is_dir() else [root / entry])
    ]
    return sorted(str(path.relative_to(root)) for path in paths)


def draw(root: Path, places: Iterable[str], count: int, seed: int, known: Equivalents) -> list[Mutant]:
    """`count` mutants of different lines, or as many as there are, none of them known to be equivalent."""
    sources = {file: Source(root, file) for file in files(root, places)}
    lines = sorted(
        (luck, file, line) for file, source in sources.items() for luck, line in source.lines(seed)
    )
    drawn = (sources[file].mutant(line, luck) for luck, file, line in lines)
    return list(islice((mutant for mutant in drawn if mutant and mutant not in known), count))
