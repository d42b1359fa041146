"""What the names of a script stand for: models, loaders, ranks, and the calls that made them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from samestep.tools.adopt.rules import matcher, roles
from samestep.tools.adopt.source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
LEARNED: Final = ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.withitem | ast.Call
PASSES: Final = 5  # over all statements, until roles have reached all names
MOST_VALUES: Final = 8  # of a name, such as of a parameter
# their names mean workers only if the script has some: a rank may be that of a matrix
OF_WORKERS: Final = ("world", "rank")
GROUPS: Final = ("torch.distributed", "accelerate", "lightning", "deepspeed", "torch.multiproc")
# calls with the role of an argument, or of their object
SAME: Final = matcher(
    *("*.convert_sync_batchnorm()", "torch.compile()", "<accelerator>.*()", "<fabric>.setup*()"),
    *("iter()", "enumerate()", "*tqdm()", "*cycle()", "*islice()", "int()", "zip()", "float()"),
    *("*refetcher()", "*.log_every()", "*Loader()", "map()", "*repeat()", "*from_iterable()"),
)
OF_OBJECT: Final = matcher("*.to()", "*.to(device)", "*.cuda()", "*.train()", "*.eval()")
PREPARE: Final = matcher("<accelerator>.prepare*()", "<fabric>.setup*()")
SIGNS: Final[dict[type[ast.operator], str]] = {ast.Add: "+", ast.Mult: "times", ast.Div: "/"}
SIGNS.update({ast.FloorDiv: "//", ast.Mod: "%"})
DEVICE: Final = re.compile("device|cuda|gpu|rank")
GIVEN: Final = ("module", "score", "device", "<loader>", "set()")  # in names of calls
SCORE: Final = re.compile(r"\.item\(\)|\bloss|\bacc(uracy)?\d?\b|\.size\(")


@dataclass(frozen=True, eq=False)
class Value:
    """A role, and the expression that has it."""

    role: str
    made: ast.expr


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


@cache
def returned(function: Function) -> list[ast.expr]:
    """Return what a function returns."""
    returns = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return [value for value in returns if value is not None]


class Names(ast.NodeVisitor):
    """The names of all files of a script, found by repeated passes over their statements.

    `visit` returns what the patterns of rules.md call a node, such as the full name of a call.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.source_of: dict[ast.AST, Source] = {source.tree: source for source in sources}
        self.assigned: dict[str, list[ast.expr]] = {}  # all values of a target, in any scope
        self.made: dict[str, dict[str, ast.expr]] = {}  # by role and target
        self.callers: dict[Function, list[ast.Call]] = {}
        self._functions: dict[str, list[Function]] = {}
        self._values: dict[tuple[ast.AST, str], list[Value]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}  # the function or module around a node
        self._visited: dict[ast.AST, str] = {}
        self._means = {s.tree: {each.name: each.means for each in s.imports} for s in sources}
        self._local = {s.tree: {each.name for each in s.imports if each.file} for s in sources}
        means = [each for names in self._means.values() for each in names.values()]
        self.has_workers = any(each.startswith(GROUPS) for each in means)
        for source in sources:
            self._read(source.tree)
        self.nodes = [*self.parents]
        statements = [node for node in self.nodes if isinstance(node, LEARNED)]
        for _ in range(PASSES):
            news = [self._learn(node) for node in statements]
            self._visited.clear()
            if not any(news):
                break

    def _read(self, tree: ast.Module) -> None:
        self._scopes[tree] = tree
        todo: list[ast.AST] = [tree]
        for node in todo:  # which grows
            scope = node if isinstance(node, Function | ast.Lambda) else self._scopes[node]
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr_context | ast.operator):  # shared by all nodes
                    self.parents[child], self._scopes[child] = node, scope
                    todo.append(child)
            if isinstance(node, Function):
                owner = self.parents[node]
                is_init = isinstance(owner, ast.ClassDef) and node.name == "__init__"
                name = owner.name if is_init and isinstance(owner, ast.ClassDef) else node.name
                self._functions.setdefault(name, []).append(node)

    def module(self, node: ast.AST) -> ast.Module:
        """Return the module of a node."""
        while not isinstance(node, ast.Module):
            node = self._scopes[node]
        return node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def role(self, node: ast.AST) -> str:
        """Return the role of a name or an attribute, "" without one."""
        if values := self._lookup(node):
            return values[0].role
        text = dotted(node)
        is_called = getattr(self.parents.get(node), "func", None) is node
        if not text or is_called or text in self._means[self.module(node)]:
            return ""
        last = text.rpartition(".")[2]
        found = (role for role, (_, _, named) in roles().items() if named.fullmatch(last))
        return next((role for role in found if self.has_workers or role not in OF_WORKERS), "")

    def visit(self, node: ast.AST) -> str:
        if node not in self._visited:
            self._visited[node] = super().visit(node)
        return self._visited[node]

    def generic_visit(self, node: ast.AST) -> str:
        return "break" if isinstance(node, ast.Break) else ""

    def visit_Call(self, call: ast.Call) -> str:
        name = self.visit(call.func)
        first = call.args[0] if call.args else ast.Constant(None)
        last, given = name.rpartition(".")[2], ""
        if last == "getattr" and not isinstance(call.args[-1], ast.Constant):
            given = "module" * (dotted(first).partition(".")[0] in self._means[self.module(call)])
        elif last in {"update", "append"}:
            given = "score" * bool(SCORE.search(code(call)))
        elif last == "to":
            given = "device" * bool(DEVICE.search(code(first)))
        elif last == "len":
            given = f"<{role}>" if (role := self.role(first)) else ""
        elif name in {"list", "tuple", "enumerate"} and isinstance(first, ast.Call):
            given = self.visit(first)
        elif name in {"os.environ.get", "os.getenv"}:
            return f"os.environ.{code(first)[1:-1]}"
        return f"{name}({given if given in GIVEN else ''})"

    def visit_keyword(self, node: ast.keyword) -> str:
        value = str(node.value.value) if isinstance(node.value, ast.Constant) else "x"
        return f"{self.visit(self.parents[node]).removesuffix(')')}{node.arg}={value})"

    def visit_AugAssign(self, node: ast.AugAssign) -> str:
        return f"{SIGNS.get(type(node.op))}= {self._operand(node.value)}"

    def visit_BinOp(self, node: ast.BinOp) -> str:
        first, second = map(self._operand, (node.left, node.right))
        if "<rank>" in {first, second} or first == second == "<world>":
            return ""  # the number of another worker, or of all
        sign = SIGNS.get(type(node.op))
        return f"{first} {sign}" if first == "<world>" else f"{sign} {second}"

    def visit_Subscript(self, node: ast.Subscript) -> str:
        name, key = self.visit(node.value), getattr(node.slice, "value", None)
        if isinstance(key, str):
            return f"{name}.{key}"
        return f"{name}[]{' =' * isinstance(node.ctx, ast.Store)}"

    def visit_Name(self, node: ast.Name | ast.Attribute) -> str:
        parent, role = self.parents[node], self.role(node)
        if role:
            name = f"<{role}>"
        elif isinstance(node, ast.Name):
            name = self._means[self.module(node)].get(node.id, node.id)
        else:
            name = f"{self.visit(node.value)}.{node.attr}"
        if isinstance(parent, ast.ClassDef) and node in parent.bases:
            return f"class({name})"
        is_off = isinstance(parent, ast.Assign) and code(parent.value) == "False"
        return f"{name} =" if isinstance(node.ctx, ast.Store) and not is_off else name

    visit_Attribute = visit_Name  # noqa: N815  ast gives the names of methods

    def _operand(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant | ast.BinOp):
            return "1" if isinstance(node, ast.Constant) else "x"
        # not what functions return, which may be this operation
        values = [f"<{value.role}>" for value in self.values(node, PASSES)] or [self.visit(node)]
        return values[0] if values[0].startswith("<") else "x"

    def callee(self, call: ast.AST) -> Function | None:
        """Return the function of the files that were read which a call calls."""
        if not isinstance(call, ast.Call):
            return None
        module, text = self.module(call), dotted(call.func)
        root = text.partition(".")[0]
        last = self._means[module].get(text, text).rpartition(".")[2]
        found = self._functions.get(last, [])
        own = [function for function in found if self.module(function) is module]
        if root == "self" or ("." not in text and own):
            return next(iter(own), None)
        return found[0] if found and root in self._local[module] else None

    def values(self, node: ast.AST, depth: int = 0) -> list[Value]:
        """Return the roles of an expression."""
        if not isinstance(node, ast.expr):
            return []
        if (known := self._lookup(node)) or depth > PASSES:
            return known
        name = self.visit(node)
        made = (role for role, (by, _, _) in roles().items() if by.fullmatch(name))
        role = next(made, name.strip("<>") if name in {"<world>", "<rank>"} else "")
        if role:
            return [Value(role, node)]
        is_test = isinstance(node, ast.Compare | ast.UnaryOp)
        values = (each for one in self._parts(node, name) for each in self.values(one, depth + 1))
        return [each for each in values if each.role == "rank" or not is_test]

    def _parts(self, node: ast.expr, name: str) -> list[ast.expr]:
        """Return the expressions of which an expression has the role."""
        if function := self.callee(node):
            return returned(function)
        match node:
            case ast.Call(args=parts) if SAME.fullmatch(name):
                pass
            case ast.Call(func=ast.Attribute(value=value)) if OF_OBJECT.fullmatch(name):
                parts = [value]
            case ast.IfExp(body=body, orelse=other):
                parts = [body, other]
            case ast.Compare(left=value) | ast.UnaryOp(operand=value):
                parts = [value]
            case _:
                parts = node.values if isinstance(node, ast.BoolOp) else []
        return parts

    def _lookup(self, node: ast.AST) -> list[Value]:
        text = dotted(node)
        scope = self._scopes[node] if text else None
        while scope:
            if values := self._values.get((scope, text)):
                return values
            scope = None if isinstance(scope, ast.Module) else self._scopes[scope]
        return []

    def _learn(self, node: ast.AST) -> bool:
        """Note what a statement or a call says about names; return whether that is new."""
        match node:
            case ast.Assign(targets=targets, value=value):
                return max([self._assign(target, value) for target in targets])
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                return self._assign(node.target, value)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                return self._assign(target, value)
            case ast.Call(func=ast.Attribute(attr="parameters", value=owner)):
                text = dotted(owner)
                made = [each for each in self.assigned.get(text, []) if isinstance(each, ast.Call)]
                if text not in {"", "self"} and not self._lookup(owner):
                    return self._add(owner, text, [Value("model", each) for each in [*made, owner]])
        function = self.callee(node)
        if function is None or not isinstance(node, ast.Call):
            return False
        self.callers.setdefault(function, []).append(node)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        pairs = [*zip(names[names[:1] == ["self"] :], node.args, strict=False)]
        pairs += [(each.arg, each.value) for each in node.keywords if each.arg]
        body = function.body[0]
        return max(
            [self._add(body, name, self.values(each)) for name, each in pairs], default=False
        )

    def _assign(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Tuple):
            parts = self._elements(value, len(target.elts))
            return max(map(self._assign, target.elts, parts), default=False)
        if not (text := dotted(target)):
            return False
        known = self.assigned.setdefault(text, [])
        known += [value] if all(value is not each for each in known) else []
        values = self.values(value)
        if not values and isinstance(value, ast.Call):
            last = text.rpartition(".")[2]
            named = (role for role, (_, names, _) in roles().items() if names.fullmatch(last))
            values = [Value(role, value) for role in named][:1]
        in_loop = any(isinstance(each, ast.For | ast.While) for each in self.around(target))
        values = [each for each in values if each.role != "tensor" or not in_loop]
        return self._add(target, text, values)

    def _elements(self, value: ast.expr, number: int) -> list[ast.expr]:
        """Return the expressions that a tuple of targets gets, or what makes all of them."""
        if isinstance(value, ast.Call) and PREPARE.fullmatch(self.visit(value)):
            return value.args
        function = self.callee(value)
        tuples = [value, *(returned(function) if function else [])]
        elements = (each.elts for each in tuples if isinstance(each, ast.Tuple))
        return next((each for each in elements if len(each) == number), [value] * number)

    def _add(self, place: ast.AST, text: str, values: list[Value]) -> bool:
        """Add roles of a name in the scope of a node; return whether some are new."""
        scope = self.module(place) if "." in text else self._scopes[place]
        known = self._values.setdefault((scope, text), [])
        new = [each for each in values if all(each.made is not old.made for old in known)]
        known += new[: max(MOST_VALUES - len(known), 0)]
        for each in new:
            if any(each.made is made for made in self.assigned.get(text, [])):
                self.made.setdefault(each.role, {}).setdefault(text, each.made)
        return bool(new) and len(known) < MOST_VALUES
