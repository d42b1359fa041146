"""What the names of a script stand for: models, loaders, ranks, and the calls that made them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from samestep.tools.adopt.rules import calls, roles
from samestep.tools.adopt.source import Source
from samestep.tools.adopt.syntax import (
    Function,
    Loop,
    bound_name,
    code,
    dotted,
    flags_of,
    is_stored,
    key_of,
    nodes_of,
    place_of,
    returned,
)

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
PASSES: Final = 6  # over all statements
DEEPEST: Final = 5  # parts of parts of an expression that are looked at
MOST_VALUES: Final = 8  # of a name, such as of a parameter
# their names mean workers only if the script has some: a rank may be that of a matrix
OF_WORKERS: Final = ("world", "devices", "rank", "distributed")
NO_RANK: Final = ("-1", "None")  # that of a process without a group
NUMBERS: Final = {"<world>", "<devices>"}
SIGNS: Final[dict[type[ast.operator], str]] = {ast.Add: "+", ast.Mult: "times", ast.Div: "/"}
SIGNS.update({ast.FloorDiv: "//", ast.Mod: "%"})
DEVICE: Final = re.compile("device|cuda|gpu|rank")
DEPTH: Final = 4  # calls that are followed from a function to the loops around it
SCORE: Final = re.compile(r"\.item\(\)|\bloss|\bacc(uracy)?\d?\b|\.size\(")
LOSS: Final = re.compile("loss|item|sum|mean")
SAMPLES: Final = re.compile(
    r"\.size\(0\)|\.size\(\)\[0\]|\.shape\[0\]|^len\(|batch_size|^bs$|samples"
)


@dataclass(frozen=True, eq=False)
class Value:
    """A role, and the expression that has it."""

    role: str
    made: ast.expr


def named(text: str, *, of_call: bool = False) -> list[str]:
    """Return the roles that a name says, in any case or if a call made its value."""
    last, column = text.rpartition(".")[2], 1 if of_call else 2
    return [role for role, names in roles().items() if names[column].fullmatch(last)]


class Names(ast.NodeVisitor):
    """The names of all files of a script, found by passes over their statements.

    `visit` returns what the patterns of rules.md call a node, such as the full name of a call.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.source_of: dict[ast.AST, Source] = {source.tree: source for source in sources}
        self.assigned: dict[str, list[ast.expr]] = {}  # all values of a target, in any scope
        self.made: dict[str, dict[str, ast.expr]] = {}  # by role and target
        self.callers: dict[Function, list[ast.Call]] = {}
        self.reads: dict[str, list[ast.AST]] = {}  # of a name or an attribute, in any scope
        self._functions: dict[str, list[Function]] = {}
        self._values: dict[tuple[ast.AST, str], list[Value]] = {}
        self._bindings: dict[tuple[ast.AST, str], ast.AST] = {}  # the first, by scope and name
        self._visited: dict[ast.AST, str] = {}
        self._means: dict[ast.AST, dict[str, str]] = {}  # of imported names, by module
        self._local: dict[ast.AST, set[str]] = {}  # names that are imported from the folder
        for source in sources:
            self._means[source.tree] = {each.name: each.means for each in source.imports}
            self._local[source.tree] = {each.name for each in source.imports if each.file}
            self._read(source.tree)
        used = [text for text in self.reads if text.startswith("torch.")]
        used += [means for names in self._means.values() for means in names.values()]
        self.has_workers = any(map(calls("of workers").fullmatch, used))
        self.nodes = [*self._reached(sources)]
        number = -1  # of values
        for _ in range(PASSES):  # until roles have reached all names
            for node in self.nodes:
                self._learn(node)
            self._visited.clear()
            number, before = sum(map(len, self._values.values())), number
            if number == before:
                break

    def _read(self, tree: ast.Module) -> None:
        """Note the parents of all nodes, the functions, and where names are bound and read."""
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr_context | ast.operator):  # shared by all nodes
                    self.parents[child] = node
            owner, name = self.parents.get(node), bound_name(node)
            if name and not isinstance(owner, ast.ClassDef):
                self._bindings.setdefault((next(self.scopes(node)), name), node)
            if not is_stored(node) and (text := dotted(node)):
                self.reads.setdefault(text, []).append(node)
            if isinstance(node, Function):
                if name == "__init__" and isinstance(owner, ast.ClassDef):
                    name = owner.name
                self._functions.setdefault(name, []).append(node)

    def _reached(self, sources: Sequence[Source]) -> Iterator[ast.AST]:
        """Yield all nodes but those of functions and classes of other files that nothing names."""
        read = {name for source in sources for name in source.reads}
        definitions = [node for source in sources[1:] for node in source.tree.body]
        unused = [
            node
            for node in definitions
            if isinstance(node, Function | ast.ClassDef)
            and node.name not in read
            and not node.decorator_list  # which may keep it by its name
        ]
        inside = set() if any(map(self._is_by_name, self.parents)) else {*nodes_of(unused)}
        return (node for node in self.parents if node not in inside)

    def _is_by_name(self, node: ast.AST) -> bool:
        """Return whether a node takes something of a module by a name that is a text."""
        match node:
            case ast.Attribute(attr="__dict__") | ast.Name(id="globals" | "exec" | "eval"):
                return True
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), *_]):
                return name in self._local[self.module(node)]
        return False

    def bindings(self, name: str) -> list[ast.AST]:
        """Return the first node of each scope that binds a name."""
        return [node for (_, bound), node in self._bindings.items() if bound == name]

    def scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the functions around a node, the innermost first, and its module."""
        return (outer for outer in self.around(node) if isinstance(outer, Scope))

    def home(self, node: ast.AST, text: str) -> ast.AST:
        """Return the scope of a name: the function that binds it, or the module."""
        *functions, module = self.scopes(node)
        return next((scope for scope in functions if (scope, text) in self._bindings), module)

    def module(self, node: ast.AST) -> ast.AST:
        """Return the module of a node."""
        return [node, *self.around(node)][-1]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def loops(self, node: ast.AST, depth: int = DEPTH) -> Iterator[Loop]:
        """Yield the loops around a node, then those around the first call of its function."""
        around = [*self.around(node)]
        yield from (outer for outer in around if isinstance(outer, Loop))
        functions = [outer for outer in around if isinstance(outer, Function)]
        callers = self.callers.get(functions[-1], []) if functions else []
        if callers and depth:
            yield from self.loops(callers[0], depth - 1)

    def always_assigned(
        self, values: list[ast.expr], start: tuple[int, int], node: ast.AST
    ) -> bool:
        """Return whether a statement that assigns one of some values is always run before a node.

        Those before the start do not count.
        """
        around = {*self.around(node)}
        statements = (
            next(outer for outer in self.around(value) if isinstance(outer, ast.stmt))
            for value in values
        )
        return any(
            start < place_of(statement) < place_of(node) and self.parents[statement] in around
            for statement in statements
        )

    def expressions(self, node: ast.expr | None) -> list[ast.expr]:
        """Return an expression, and all that is assigned to it if it is a name."""
        return [node, *self.assigned.get(dotted(node), [])] if node else []

    def is_for(self, node: ast.AST, purpose: str) -> bool:
        """Return whether rules.md lists a call for a purpose."""
        return bool(calls(purpose).fullmatch(self.visit(node)))

    def role(self, node: ast.AST) -> str:
        """Return the role of a name, an attribute or a key, "" without one."""
        if values := self._lookup(node):
            return values[0].role
        text = dotted(node)
        last = text.rpartition(".")[2] or key_of(node)
        is_called = getattr(self.parents.get(node), "func", None) is node
        means = self._means[self.module(node)] if last else {}
        is_of_torch = means.get(text.partition(".")[0], "").startswith("torch")
        if not last or is_called or is_of_torch or text in means:
            return ""
        return next(
            (role for role in named(last) if self.has_workers or role not in OF_WORKERS), ""
        )

    # what rules call a node

    def visit(self, node: ast.AST) -> str:
        if node not in self._visited:
            self._visited[node] = super().visit(node)
        return self._visited[node]

    def generic_visit(self, node: ast.AST) -> str:
        return "break" if isinstance(node, ast.Break) else ""

    def visit_Call(self, call: ast.Call) -> str:
        name = self.visit(call.func)
        if name in {"os.environ.get", "os.getenv"} and call.args:
            return f"os.environ.{code(call.args[0])[1:-1]}"
        for flag in flags_of(call)[:1]:  # as argparse names it
            return f"{name}({flag.replace('-', '_').replace('__', '--', 1)})"
        return f"{name}({self._argument(name, call) if call.args or call.keywords else ''})"

    def _argument(self, name: str, call: ast.Call) -> str:
        """Return what rules have to know of the arguments of a call, "" of most."""
        first, *others = [*call.args, ast.Constant(None)]
        last = name.rpartition(".")[2]
        is_for_effect = isinstance(self.parents[call], ast.Expr)
        root = dotted(first).partition(".")[0]
        says = {
            "module": last == "getattr"
            and root in self._means[self.module(call)]
            and not isinstance(call.args[-1], ast.Constant),
            "scores": last == "update" and not call.args and SCORE.search(code(call)),
            "score": last in {"update", "append"} and SCORE.search(code(call)),
            "device": last == "to" and DEVICE.search(code(first)),
            "weight": last in {"cross_entropy", "nll_loss"} and others[2:],
            "<loader>": last == "len" and self.role(first) == "loader",
            "set()": last in {"list", "tuple", "enumerate"} and self.visit(first) == "set()",
            "state": last == "load_state_dict" and code(first).endswith(".state_dict()"),
            "<ema>": is_for_effect and self.role(first) == "ema",
        }
        return next((text for text, is_so in says.items() if is_so), "")

    def visit_keyword(self, node: ast.keyword) -> str:
        value = next((f"<{value.role}>" for value in self.values(node.value)), "x")
        if isinstance(node.value, ast.Constant):
            value = str(node.value.value)
        return f"{self.visit(self.parents[node]).rpartition('(')[0]}({node.arg}={value})"

    def visit_AugAssign(self, node: ast.AugAssign) -> str:
        is_number = SAMPLES.search(code(node.value)) and not LOSS.search(code(node.value))
        operand = "samples" if is_number else self._operand(node.value)
        return f"{SIGNS.get(type(node.op))}= {operand}"

    def visit_BinOp(self, node: ast.BinOp) -> str:
        first, second = map(self._operand, (node.left, node.right))
        if "<rank>" in {first, second} or {first, second} <= NUMBERS:
            return ""  # the number of another worker, or of all
        sign = SIGNS.get(type(node.op))
        return f"{first} {sign}" if first in NUMBERS else f"{sign} {second}"

    def visit_Subscript(self, node: ast.Subscript) -> str:
        if role := self.role(node):
            return f"<{role}>"  # of a key
        name, key = self.visit(node.value), key_of(node)
        return f"{name}.{key}" if key else f"{name}[]{' =' * is_stored(node)}"

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
        return f"{name} =" if is_stored(node) and not is_off else name

    visit_Attribute = visit_Name  # noqa: N815  ast gives the names of methods

    def _operand(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant | ast.BinOp):
            return "1" if isinstance(node, ast.Constant) else "x"
        # not what functions return, which may be this operation
        values = [f"<{value.role}>" for value in self.values(node, DEEPEST)] or [self.visit(node)]
        return values[0] if values[0].startswith("<") else "x"

    # roles

    def callee(self, call: ast.AST) -> Function | None:
        """Return the function of the files that were read which a call calls."""
        if not isinstance(call, ast.Call):
            return None
        module, text = self.module(call), dotted(call.func)
        root = text.partition(".")[0]
        last = self._means[module].get(text, text).rpartition(".")[2]
        functions = self._functions.get(last, [])
        of_module = [function for function in functions if self.module(function) is module]
        if root == "self" or ("." not in text and of_module):
            return next(iter(of_module), None)
        return functions[0] if functions and root in self._local[module] else None

    def values(self, node: ast.AST, depth: int = 0) -> list[Value]:
        """Return the roles of an expression."""
        if not isinstance(node, ast.expr):
            return []
        if (values := self._lookup(node)) or depth > DEEPEST:
            return values
        name = self.visit(node)
        made = (role for role, (by, _, _) in roles().items() if by.fullmatch(name))
        role = next(made, name.strip("<>") if name in {*NUMBERS, "<rank>"} else "")
        if role:
            return [Value(role, node)]
        is_test = isinstance(node, ast.Compare | ast.UnaryOp)
        parts = self._parts(node)
        values = [value for part in parts for value in self.values(part, depth + 1)]
        values = [value for value in values if value.role == "rank" or not is_test]
        if isinstance(node, ast.Compare) and code(node.comparators[0]) in NO_RANK:
            return [Value("distributed", value.made) for value in values]
        return values

    def _parts(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions of which an expression has the role."""
        if function := self.callee(node):
            return returned(function)
        match node:
            case ast.Call(args=parts) if self.is_for(node, "role of their arguments"):
                return parts
            case ast.Call(func=ast.Attribute(value=value)) if self.is_for(
                node, "role of their object"
            ):
                return [value]
            case ast.IfExp(body=body, orelse=other):
                return [body, other]
            case ast.Compare(left=value) | ast.UnaryOp(operand=value):
                return [value]
        return node.values if isinstance(node, ast.BoolOp) else []

    def _lookup(self, node: ast.AST) -> list[Value]:
        text = dotted(node)
        scopes = self.scopes(node) if text else ()
        return next(filter(None, (self._values.get((scope, text)) for scope in scopes)), [])

    def _learn(self, node: ast.AST) -> None:
        """Note what a statement or a call says about names."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
                | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
            ) if not isinstance(self.parents[node], ast.ClassDef):
                self._assign(target, value)
            case ast.Call(func=ast.Attribute(attr="parameters", value=owner)) if dotted(
                owner
            ) not in {"", "self"} and not self._lookup(owner):
                made = [call for call in self.expressions(owner) if isinstance(call, ast.Call)]
                self._add(owner, dotted(owner), [Value("model", call) for call in [*made, owner]])
            case ast.Call() if function := self.callee(node):
                self.callers.setdefault(function, []).append(node)
                parameters = [
                    each.arg for each in (*function.args.posonlyargs, *function.args.args)
                ]
                passed = dict(
                    zip(parameters[parameters[:1] == ["self"] :], node.args, strict=False)
                )
                passed |= {each.arg: each.value for each in node.keywords if each.arg}
                for name, value in passed.items():
                    self._add(function.body[0], name, self.values(value))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            for part, element in zip(
                target.elts, self._elements(value, len(target.elts)), strict=False
            ):
                self._assign(part, element)
        elif text := dotted(target):
            assigned = self.assigned.setdefault(text, [])
            assigned += [value] if all(value is not other for other in assigned) else []
            values = self.values(value)
            if not values and isinstance(value, ast.Call):
                values = [Value(role, value) for role in named(text, of_call=True)][:1]
            in_loop = any(isinstance(outer, ast.For | ast.While) for outer in self.around(target))
            values = [value for value in values if value.role != "tensor" or not in_loop]
            self._add(target, text, values)

    def _elements(self, value: ast.expr, number: int) -> list[ast.expr]:
        """Return the expressions that a tuple of targets gets, or what makes all of them."""
        if isinstance(value, ast.Call) and self.is_for(value, "prepares its arguments"):
            return value.args
        function = self.callee(value)
        tuples = [value, *(returned(function) if function else [])]
        elements = (part.elts for part in tuples if isinstance(part, ast.Tuple))
        return next((parts for parts in elements if len(parts) == number), [value] * number)

    def _add(self, place: ast.AST, text: str, values: list[Value]) -> None:
        """Add roles of a name in the scope of a node."""
        scope = self.module(place) if "." in text else next(self.scopes(place))
        before = self._values.setdefault((scope, text), [])
        new = [value for value in values if all(value.made is not old.made for old in before)]
        before += new[: max(MOST_VALUES - len(before), 0)]
        for value in new:
            if any(value.made is made for made in self.assigned.get(text, [])):
                self.made.setdefault(value.role, {}).setdefault(text, value.made)
