"""What only some workers of an old job do, and what of it all of them need."""

from __future__ import annotations

import ast
from typing import Final

from samestep.tools.adopt.roles import Names
from samestep.tools.adopt.rules import matcher, rules
from samestep.tools.adopt.syntax import (
    Branch,
    Function,
    Loop,
    dotted,
    is_stored,
    nodes_of,
    place_of,
    targets_of,
)

ENDS: Final = ast.Return | ast.Break | ast.Continue


class Ranks:
    """The branches of a script that depend on the number of a worker, in `branches`.

    `unneeded` has the nodes of the functions that only form the group of workers.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self.branches = {
            node
            for node in names.nodes
            if isinstance(node, Branch)
            and any(self.role_in_test(part) == "<rank>" for part in ast.walk(node.test))
        }
        self.unneeded = {*nodes_of(self._unneeded_functions())}

    def role_in_test(self, node: ast.AST) -> str:
        """Return whether a node says which worker this is, or whether there are several."""
        parent = self._names.parents.get(node)  # None of `Load`, which nodes share
        test = parent if isinstance(parent, ast.Compare) else node  # rank == -1
        roles = {value.role for value in self._names.values(node)}
        if "rank" in roles:
            roles = {value.role for value in self._names.values(test)}
        return next((f"<{role}>" for role in ("distributed", "rank") if role in roles), "")

    def _unneeded_functions(self) -> list[Function]:
        """Return the functions that form the group of workers, and those that only they call."""
        group, names = matcher(*rules()["group"].patterns), self._names
        calls_of_group = [node for node in names.nodes if group.fullmatch(names.visit(node))]
        functions = [function for function in map(names.callee, calls_of_group) if function]
        for outer in functions:  # which grows
            inside = {*ast.walk(outer)}
            called = (inner for inner, by in names.callers.items() if inside.issuperset(by))
            functions += [inner for inner in called if inner not in functions]
        return functions

    def matters(self, branch: Branch) -> bool:
        """Return whether a branch does what all workers have to do, or need the result of."""
        nodes = {*ast.walk(branch)} - {*ast.walk(branch.test)}
        values = [node.value for node in nodes if isinstance(node, ast.Assign)]
        return (
            any(isinstance(node, ENDS) for node in nodes)
            or any(map(self._names.callee, values))
            or any(self._names.is_for(node, "made by all workers") for node in nodes)
            or bool(self.read_elsewhere(branch))
        )

    def read_elsewhere(self, branch: ast.AST) -> list[str]:
        """Return the names that a branch of some workers assigns, and that all read later."""
        if isinstance(branch, ast.IfExp):
            branch = next(self._names.around(branch))  # the assignment of its value
        inside = {*ast.walk(branch)}
        texts: list[str] = []
        for store in filter(is_stored, ast.walk(branch)):
            if any(isinstance(node, ast.comprehension) for node in self._names.around(store)):
                continue
            text, home = dotted(store), self._names.home(store, dotted(store))
            reads = [node for node in self._names.reads.get(text, []) if node not in inside]
            reads = [node for node in reads if self._names.home(node, text) is home]
            if text not in texts and any(self._is_of_all(node, branch) for node in reads):
                texts.append(text)
        return texts

    def _is_of_all(self, read: ast.AST, branch: ast.AST) -> bool:
        """Return whether all workers may read a name that a branch of some has assigned."""
        text, around = dotted(read), [*self._names.around(read)]
        if not self.branches.isdisjoint(around) or not self._is_later(read, branch):
            return False
        loaders = {value.made for value in self._names.values(read) if value.role == "loader"}
        values = self._names.assigned.get(text, [])
        tracker = matcher(*rules()["tracker"].patterns)
        has_entry = any(map(tracker.fullmatch, map(self._names.visit, values)))
        return len(loaders) != 1 and not has_entry  # one loader, with and without a progress bar

    def _is_later(self, read: ast.AST, branch: ast.AST) -> bool:
        """Return whether a read may see what a branch has assigned.

        It follows the branch, or precedes it in a loop, and nothing between them always assigns the
        name again.
        """
        if next(self._names.scopes(read)) is not next(self._names.scopes(branch)):
            return True
        text, around = dotted(read), [*self._names.around(read)]
        outer = {*self._names.around(branch)}
        loops = [node for node in around if isinstance(node, Loop) and node in outer]
        end = getattr(branch, "end_lineno", 0), getattr(branch, "end_col_offset", 0)
        start = end if place_of(read) > end else (place_of(loops[0]) if loops else None)
        if start is None:
            return False
        values = [value for value in self._names.assigned.get(text, []) if value not in around]
        targets = (target for node in around if node not in outer for target in targets_of(node))
        is_assigned = self._names.always_assigned(values, start, read)
        return not is_assigned and text not in map(dotted, targets)
