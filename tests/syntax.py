"""Syntax trees of sources."""

from __future__ import annotations

import ast

from samestep.host import no_garbage_collection


def parse(source: str) -> ast.Module:
    """Return the syntax tree of a module.

    Before 3.11.8, all parsers of CPython 3.11 share a count of their depth. If a collection of
    garbage interrupts one, finalizers and other threads run, of which each that parses (to format
    a traceback, say) changes the count: "AST constructor recursion depth mismatch".
    https://github.com/python/cpython/issues/106905
    """
    with no_garbage_collection():
        return ast.parse(source)  # noqa: TID251
