"""Random choice of mutants: each changes one line of code, and all lines are equally likely.

The mutation operators are those of cosmic-ray, limited to replacements that occur as slips (`<` for `<=`, `+` for
`-`), and the removal of statements. The choice depends on the text of a line and on its function, not on its line
number, so that edits elsewhere do not change the choice.
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
"""cosmic-ray's replacements of one operator by another that are used."""
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
"""Node types of arithmetic, because cosmic-ray mistakes `f(*, a)` and `{**a}` for products and powers."""

Position = tuple[tuple[int, int], tuple[int, int]]
"""Line and column of the first and of the last character."""


class DropStatement(Operator):
    """Replace a call, or an assignment to an attribute or an item, by `pass`."""

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
    """Replace the exceptions of an `except` by an empty tuple. cosmic-ray's operator fails on dotted names."""

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
    """Return the operators by family. The family of a line is chosen before the operator."""
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
    """A changed file.

    Attributes:
        file: Path of the file relative to the root.
        line: Line of the change.
        function: Qualified name of the function, "" outside of functions.
        before: The changed lines of the original, stripped and joined to one line.
        after: The changed lines of the mutant, likewise.
        mutated: Text of the changed file.
    """

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
    """Return a dump of the program without annotations and the bodies of Protocols, or None for invalid syntax."""
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
    """Removes annotations of attributes without a value."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return ast.Pass() if node.value is None and isinstance(node.target, ast.Attribute) else node


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[range, str]]:
    """Yield the lines and the qualified name of each function or class, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}".lstrip(".")
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield range(first, (node.end_lineno or node.lineno) + 1), name
            yield from functions(node, name)
        else:
            yield from functions(node, inside)


def statement_lines(source: str, line: int) -> range:
    """Return the lines of the statement at a line. A compound statement has only the lines of its header."""
    statement_range = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else (node.end_lineno or node.lineno)
        lines = range(node.lineno, max(last, node.lineno) + 1)
        if line in lines:
            statement_range = lines  # ast.walk visits inner statements last
    return statement_range


def around(source: str, line: int) -> list[range]:
    """Return the lines of the statement, of the enclosing functions and classes, innermost first, and of the file."""
    inside = [lines for lines, _ in functions(ast.parse(source)) if line in lines]
    return [statement_lines(source, line), *reversed(inside), range(1, source.count("\n") + 2)]


def chance(*words: object) -> str:
    """Return a hash of the words. Sorting by it is a deterministic shuffle."""
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


class Source:
    """A source file and all positions of mutation operators in it."""

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
        """Return the sort key and the number of each line with a mutation operator."""
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
        """Return the mutant of a line that `luck` chooses among those that change the program, or None."""
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
    """Return the changed lines of the original and of the mutant, each stripped and joined to one line."""
    old, new = original.splitlines(), mutated.splitlines()
    blocks = [b for b in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if b[0] != "equal"]
    lines_before = [line.strip() for _, i, j, _, _ in blocks for line in old[i:j]]
    lines_after = [line.strip() for _, _, _, i, j in blocks for line in new[i:j]]
    return " ".join(lines_before), " ".join(lines_after)


@dataclass
class Equivalents:
    """Equivalent mutants, which no test can kill, from equivalent_mutants.yaml."""

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
        """Return a message for each entry whose line is no longer in its file."""
        stale_entries = []
        for file, function, old_line, _ in self.entries:
            path = root / file
            text = " ".join(path.read_text(encoding="utf-8").split()) if path.exists() else ""
            if " ".join(old_line.split()) not in text:
                stale_entries.append(f"{file}: {function}: no longer there: {old_line}")
        return stale_entries


def files(root: Path, places: Iterable[str]) -> list[str]:
    """Return the Python files of folders and single files, relative to the root."""
    paths = [
        path
        for entry in places
        for path in ((root / entry).rglob("*.py") if (root / entry).is_dir() else [root / entry])
    ]
    return sorted(str(path.relative_to(root)) for path in paths)


def draw(root: Path, places: Iterable[str], count: int, seed: int, known: Equivalents) -> list[Mutant]:
    """Return up to `count` mutants of different lines that are not known to be equivalent."""
    sources = {file: Source(root, file) for file in files(root, places)}
    lines = sorted(
        (luck, file, line) for file, source in sources.items() for luck, line in source.lines(seed)
    )
    drawn = (sources[file].mutant(line, luck) for luck, file, line in lines)
    return list(islice((mutant for mutant in drawn if mutant and mutant not in known), count))
