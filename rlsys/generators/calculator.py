"""A sandboxed calculator: `python -I -S calculator.py` reads code from standard input and prints the result.

The code may contain assignments and expressions of numbers, lists and a few functions, but no attributes, imports,
strings and definitions. The process has limits of CPU time and memory, which stop expensive expressions such as a
huge power, and cannot open a file, pipe or socket. This file needs only the standard library.
"""

from __future__ import annotations

import ast
import math
import resource
import sys

CPU_SECONDS = 2
MEMORY_BYTES = 256 * 2**20
OUTPUT_CHARACTERS = 200

FUNCTIONS = {
    **{f.__name__: f for f in (abs, divmod, float, int, len, max, min, pow, round, sorted, sum)},
    **{name: f for name, f in vars(math).items() if not name.startswith("_")},
}
ALLOWED = (
    ast.Module, ast.Expr, ast.Assign, ast.AugAssign, ast.Name, ast.Load, ast.Store, ast.Constant, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.List, ast.Tuple, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)  # fmt: skip


def restrict() -> None:
    """Limit CPU time and memory of this process, and forbid new files, pipes and sockets."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))


def forbidden_node(tree: ast.AST) -> str | None:
    """Return a description of the first node that is not allowed; None if all nodes are."""
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            return type(node).__name__
        if isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
            return f"a {type(node.value).__name__}"
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            return "this call"
    return None


def evaluate(code: str) -> str:
    """Run code, and return the value of its last line as text, or a line that starts with `error`."""
    try:
        tree = ast.parse(code.strip())
        if (forbidden := forbidden_node(tree)) is not None:
            return f"error: {forbidden} is not allowed"
        if not tree.body:
            return "error: there is nothing to compute"
        last_statement = tree.body.pop()
        names = {"__builtins__": {}, **FUNCTIONS}
        exec(compile(tree, "calculator", "exec"), names)
        if not isinstance(last_statement, ast.Expr):
            return "error: the last line has no value"
        return str(eval(compile(ast.Expression(last_statement.value), "calculator", "eval"), names))
    except Exception as e:  # noqa: BLE001  (whatever the code raises is its result)
        return f"error: {type(e).__name__}"


if __name__ == "__main__":
    source = sys.stdin.read()
    restrict()
    print(evaluate(source)[:OUTPUT_CHARACTERS])
