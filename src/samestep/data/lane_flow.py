"""Which values the loss of a lane depends on, by the source of the body of its loop.

`Flow` runs through the body once. For each variable, it keeps the origins: the values of the start
of a lane on which it depends. A variable that has not been set yet is its own origin.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

# of a variable: its name, and the attributes and constant keys that lead to it
Path = tuple[str, ...]
Origins = frozenset[Path]
NONE: Final[Origins] = frozenset()
OF_LOOP: Final = ""  # begins origins that are no variables
DATA: Final[Origins] = frozenset({(OF_LOOP,)})  # the lane batch
Branch = dict[Path, Origins]  # what code has set, with its origins


class Effects(NamedTuple):
    """What a function reads and changes besides its arguments, and whether it takes the loss."""

    reads: frozenset[Path] = NONE
    changes: frozenset[Path] = NONE
    ends_lane: bool = False


def path_of(node: ast.AST) -> Path:
    """Return the path of an expression, such as ("self", ".state", "[0]"); () if it has none."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (owner := path_of(node.value)):
        return (*owner, f".{node.attr}")
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = path_of(node.value)
        return (*owner, f"[{node.slice.value!r}]") if owner else ()
    return ()


def is_within(path: Path, owner: Path) -> bool:
    """Return whether a path is `owner` or a part of it."""
    return path[: len(owner)] == owner


class Flow(ast.NodeVisitor):
    """Finds on what losses depend.

    `effects_of` returns those of the function at a path. A branch whose condition does not depend
    on the lane batch is taken by all lanes or by none.
    """

    def __init__(self, effects_of: Callable[[Path], Effects]) -> None:
        self._effects_of = effects_of
        self.origins: Branch = {}
        self._added: Branch = {}  # by changes in place
        self._under = NONE  # the origins of the conditions of what runs now
        self._branches: dict[str, Branch] = {}  # by condition
        self.stored, self.changed = set[Path](), set[Path]()  # anew, or in place
        self.continued = set[Path]()  # with values that depend on their own
        self.loss = NONE

    def read(self, path: Path) -> Origins:
        """Return the origins of a variable with all of its parts."""
        lengths = range(len(path), 0, -1)
        nearest = next((self.origins[path[:n]] for n in lengths if path[:n] in self.origins), None)
        parts = [origins for part, origins in self.origins.items() if is_within(part, path)]
        added = [
            origins
            for other, origins in self._added.items()
            if is_within(other, path) or is_within(path, other)
        ]
        return (frozenset({path}) if nearest is None else nearest).union(*parts, *added)

    def run(self, statements: Iterable[ast.stmt]) -> None:
        """Run statements in their order."""
        for statement in statements:
            self.visit(statement)

    def visit(self, node: ast.AST) -> Origins:
        """Run a statement, or return the origins of an expression."""
        return super().visit(node) or NONE

    def generic_visit(self, node: ast.AST) -> Origins:
        """Visit the parts of a node, in their order; return their origins."""
        return NONE.union(*map(self.visit, ast.iter_child_nodes(node)))

    def visit_Name(self, node: ast.Name | ast.Attribute | ast.Subscript) -> Origins:
        """Read or delete a variable."""
        if not (path := path_of(node)):
            return self.generic_visit(node)
        if isinstance(node.ctx, ast.Del):
            self._store(path, NONE)
            return NONE
        return self.read(path)

    visit_Attribute = visit_Subscript = visit_Name

    def visit_Call(self, node: ast.Call) -> Origins:
        """Return the origins of what a function gets and reads."""
        path = path_of(node.func)
        origins = self.visit(node.func).union(*map(self.visit, (*node.args, *node.keywords)))
        effects = self._effects_of(path) if path else Effects()
        origins = origins.union(*map(self.read, effects.reads))
        if path[-1:] in {("backward",), (".backward",)} or effects.ends_lane:
            self.loss |= origins | self._under
        if path == ("next",) and origins & {*map(path_of, node.args[:1])}:  # from before the loop
            origins |= {(OF_LOOP, ast.unparse(node))}
        for changed in effects.changes:
            self._add(changed, origins)
        return origins

    def visit_Yield(self, node: ast.Yield) -> Origins:
        """Hand a value to the body of another loop, where it may become a loss."""
        self.loss |= self.generic_visit(node) | self._under
        return NONE

    def visit_Assign(self, node: ast.Assign) -> None:
        """Set variables."""
        origins = self.visit(node.value)
        for target in node.targets:
            self.bind(target, origins, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign | ast.NamedExpr) -> Origins:
        """Set a variable, in a statement or an expression."""
        origins = self.visit(node.value) if node.value else NONE
        if node.value:
            self.bind(node.target, origins, node.value)
        return origins

    visit_NamedExpr = visit_AnnAssign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Change a variable, which may be in place."""
        origins = self.visit(node.value)
        path = path_of(node.target)
        self.bind(node.target, origins | (self.read(path) if path else NONE))

    def bind(self, target: ast.expr, origins: Origins, value: ast.expr | None = None) -> None:
        """Set the variables of a target, from the parts of a value if it has them."""
        if isinstance(target, ast.Tuple | ast.List):
            for number, element in enumerate(target.elts):
                part = None if value is None else _part(value, number, len(target.elts))
                self.bind(element, origins if part is None else self.visit(part), part)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, origins)
        elif path := path_of(target):
            self._store(path, origins | self._under)
        elif isinstance(target, ast.Subscript | ast.Attribute):  # such as memory[number] = ...
            owner = path_of(target.value)
            index = self.visit(target.slice) if isinstance(target, ast.Subscript) else NONE
            if owner:
                self._add(owner, origins | index)

    def _store(self, path: Path, origins: Origins) -> None:
        for branch in (self.origins, self._added, *self._branches.values()):
            for part in [each for each in branch if is_within(each, path)]:
                del branch[part]
        if path in origins:
            self.continued.add(path)
        self.origins[path] = origins
        self.stored.add(path)

    def _add(self, path: Path, origins: Origins) -> None:
        self.changed.add(path)
        self._added[path] = self._added.get(path, NONE) | origins | self._under

    def visit_If(self, node: ast.If | ast.IfExp) -> Origins:
        """Run both branches, or return the origins of both values."""
        condition, results = self.visit(node.test), NONE
        name, under, before = ast.dump(node.test), self._under, dict(self.origins)
        self._under |= condition
        ends: list[Branch] = []
        for key, part in ((name, node.body), (f"not {name}", node.orelse)):
            # what was set under the same condition before has been set now, too
            self.origins = before | self._branches.get(key, {})
            if isinstance(part, list):
                self.run(part)
            else:
                results |= self.visit(part)
            ends.append(self.origins)
            self._branches[key] = dict(self.origins.items() - before.items())
        self._under = under
        self.origins = _merged(ends, can_differ=condition >= DATA)
        return condition | results

    visit_IfExp = visit_If

    def visit_For(self, node: ast.For) -> None:
        """Run the body of an inner loop twice, for what it hands to its own next pass."""
        origins, under = self.visit(node.iter), self._under
        self._under |= origins
        for _ in range(2):
            self.bind(node.target, origins)
            self.run(node.body)
        self._under = under
        self.run(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """Run the body twice, as that of a `for`."""
        under = self._under
        for _ in range(2):
            self._under |= self.visit(node.test)
            self.run(node.body)
        self._under = under
        self.run(node.orelse)

    def visit_withitem(self, node: ast.withitem) -> None:
        """Enter a context."""
        origins = self.visit(node.context_expr)
        if node.optional_vars:
            self.bind(node.optional_vars, origins)

    def visit_Try(self, node: ast.Try) -> None:
        """Run the block, and each handler instead of what follows."""
        self.run(node.body)
        ends = []
        for statements in (node.orelse, *(handler.body for handler in node.handlers)):
            start = dict(self.origins)
            self.run(statements)
            ends.append(self.origins)
            self.origins = start
        self.origins = _merged(ends, can_differ=False)
        self.run(node.finalbody)

    def visit_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Origins:
        """Return the origins of the elements, whose variables are not those of the body."""
        before, stored = dict(self.origins), set(self.stored)
        origins = NONE
        for loop in node.generators:
            iterated = self.visit(loop.iter)
            self.bind(loop.target, iterated)
            origins |= iterated.union(*map(self.visit, loop.ifs))
        elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        origins = origins.union(*map(self.visit, elements))
        self.origins, self.stored = before, stored
        return origins

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> Origins:
        """Return the origins of all that a function of the body reads, and set it."""
        nodes = list(ast.walk(node))
        names = {argument.arg for argument in nodes if isinstance(argument, ast.arg)}
        names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        paths = [path for path in map(path_of, nodes) if path and path[0] not in names]
        origins = NONE.union(*map(self.read, paths))
        if isinstance(node, ast.FunctionDef):
            self._store((node.name,), origins)
        return origins

    visit_Lambda = visit_FunctionDef


def _part(value: ast.expr, number: int, length: int) -> ast.expr | None:
    """Return a part of a value that is unpacked, None if it is unknown."""
    if isinstance(value, ast.Tuple | ast.List):
        return value.elts[number] if len(value.elts) == length else None
    if path_of(value):
        return ast.Subscript(value, ast.Constant(number), ast.Load())
    return None


def _merged(branches: Sequence[Branch], *, can_differ: bool) -> Branch:
    """Return what is set after branches; what one of them leaves may be that of an earlier lane."""
    merged: Branch = {}
    for path in {path for branch in branches for path in branch}:
        start = frozenset({path}) if can_differ else NONE
        merged[path] = NONE.union(*[branch.get(path, start) for branch in branches])
    return merged
