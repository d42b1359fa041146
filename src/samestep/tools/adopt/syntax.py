"""What is read of single nodes of a syntax tree, as text or as other nodes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from functools import cache

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Branch = ast.If | ast.IfExp | ast.While


def dotted(node: ast.AST | None) -> str:
    """Return `a.b.c` of a name or of an attribute of one, "" of another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def code(node: ast.AST | None) -> str:
    """Return the source of a node on one line, "..." without one."""
    return re.sub(r"\s+", " ", ast.unparse(node)) if node else "..."


def is_stored(node: ast.AST) -> bool:
    """Return whether a node is a name or an attribute that a statement assigns."""
    return isinstance(getattr(node, "ctx", None), ast.Store)


def flags_of(node: ast.AST) -> list[str]:
    """Return the flags such as --resume that a call of `add_argument` adds."""
    match node:
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=arguments):
            texts = [code(argument)[1:-1] for argument in arguments]
            return [text for text in texts if text.startswith("--")]
    return []


def bare(node: ast.AST | None) -> str:
    """Return the source of a node without parentheses around it."""
    return re.sub(r"^\((.*)\)$", r"\1", code(node))


def head(node: ast.AST) -> str:
    """Return the first line of a statement, or an expression."""
    if isinstance(node, ast.For):
        return f"for {bare(node.target)} in {code(node.iter)}:"
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {code(node.test)}:"
    return f"class {node.name}:" if isinstance(node, ast.ClassDef) else code(node)


def shown(node: ast.AST) -> str:
    """Return how an entry names a place: by its code, but an argument of the script by its flag."""
    return next(iter(flags_of(node)), head(node))


def key_of(node: ast.AST) -> str:
    """Return the text by which a subscript takes an entry, "" of another one."""
    match node:
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            return key
    return ""


def bound_name(node: ast.AST) -> str:
    """Return the name that a node binds, "" if it binds none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.alias(name=name, asname=other):
            return (other or name).partition(".")[0]
    return ""


def nodes_of(statements: Iterable[ast.AST]) -> list[ast.AST]:
    """Return all nodes of statements."""
    return [node for statement in statements for node in ast.walk(statement)]


@cache
def returned(function: Function) -> list[ast.expr]:
    """Return what a function returns."""
    returns = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return [value for value in returns if value is not None]


def targets_of(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of the targets that a loop or a comprehension assigns."""
    loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
    return [part for loop in loops for part in ast.walk(loop.target)]


def place_of(node: ast.AST) -> tuple[int, int]:
    """Return the line and the column of a node."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def lines_of(nodes: Sequence[ast.stmt]) -> str:
    """Return the lines of statements as text."""
    first, last = nodes[0].lineno, nodes[-1].end_lineno
    return f"line {first}" if first == last else f"lines {first} to {last}"


def iterated(loop: Loop) -> list[ast.AST]:
    """Return the nodes of what a loop iterates."""
    return [*ast.walk(loop.iter)] if isinstance(loop, ast.For) else []


def range_of(loop: Loop) -> tuple[str, ast.expr | None]:
    """Return the start of a loop over a range, "" if it is 0, and the end, None of others."""
    call = loop.iter if isinstance(loop, ast.For) else None
    for node in (call, *getattr(call, "args", [])[:1]):  # of tqdm
        match node:
            case ast.Call(func=func, args=[end] | [_, end, *_]) if code(func).endswith("range"):
                start = code(node.args[0]) if node.args[1:] else "0"
                return start.removeprefix("0"), end
    return "", None


def passes_of(loop: Loop) -> str:
    """Return the number of passes of a loop over a range, `...` of `while`, "" of others."""
    start, end = range_of(loop)
    if end is None:
        return "..." if isinstance(loop, ast.While) else ""
    if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add):
        terms = [code(end.left), code(end.right)]
        if start in terms:
            return terms[1 - terms.index(start)]
    # a start that is no number is where the old job resumed
    return f"{code(end)} - {start}" if start.isdigit() else code(end)
