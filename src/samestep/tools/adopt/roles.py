"""What the names of a script stand for: models, loaders, ranks, and the calls that made them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from samestep.tools.adopt.rules import matcher
from samestep.tools.adopt.source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
PASSES: Final = 5  # over all statements, until roles have reached all names
# by the names of calls and attributes, as in rules.md
MADE_BY: Final = {
    "accelerator": matcher("accelerate.Accelerator()"),
    "fabric": matcher("*lightning*.Fabric()"),
    "sampler": matcher("*Sampler()"),
    "loader": matcher("*DataLoader()"),
    "model": matcher(
        "*DistributedDataParallel()", "*.DataParallel()", "*.FullyShardedDataParallel()"
    ),
    "scheduler": matcher(
        "torch.optim.lr_scheduler.*()", "*get_scheduler()", "transformers.get_*()"
    ),
    "optimizer": matcher("torch.optim.*()", "*ZeroRedundancyOptimizer()", "*.create_optimizer*()"),
    "scaler": matcher("*GradScaler()"),
    "ema": matcher("*AveragedModel()", "*ModelEma*()", "*EMA()", "*Ema()"),
    "tensor": matcher("torch.zeros*()", "torch.ones*()", "torch.empty*()", "torch.rand*()"),
    "generator": matcher("torch.Generator()", "numpy.random.default_rng()", "random.Random()"),
    "world": matcher(
        *("*get_world_size()", "os.environ.WORLD_SIZE", "<accelerator>.num_processes"),
        *("<fabric>.world_size", "*.device_count()"),
    ),
    "rank": matcher(
        *("*get_rank()", "os.environ.RANK", "os.environ.LOCAL_RANK", "os.environ.SLURM_PROCID"),
        *("<accelerator>.is_*main_process", "<accelerator>.process_index", "*is_main_process()"),
        *("<fabric>.is_global_zero", "<fabric>.global_rank", "*is_master()", "*is_primary()"),
    ),
}
BY_NAME: Final = {  # if nothing else is known of a variable: by the last part of its name
    "world": re.compile(r"(ddp_)?world_size|num_processes|ngpus_per_node|num_gpus|n_gpus"),
    "rank": re.compile(r"((ddp|global|local|ddp_local)_)?rank|master_process|is_master|is_main"),
    "accumulation": re.compile(r".*accum.*"),
    "best": re.compile(r"best(_\w+)?"),
}
MADE_BY_NAME: Final = {  # if nothing is known of the call that made it
    "loader": re.compile(r".*(loader|_dl)s?"),
    "optimizer": re.compile(r"(.*_)?(opt|optim|optimizer)(_\w+)?"),
    "scheduler": re.compile(r"(.*_)?sched(uler)?(_\w+)?"),
    "ema": re.compile(r"(.*_)?ema(_(model|net))?"),
    "scaler": re.compile(r"(.*_)?scaler"),
}
NEEDS_GROUP: Final = ("world", "rank")  # a rank may be that of a matrix, without workers
GROUPS: Final = ("torch.distributed", "accelerate", "lightning", "deepspeed", "torch.multiproc")
# calls with the role of their first argument, or of the object
OF_ARGUMENT: Final = matcher(
    *("*.convert_sync_batchnorm()", "torch.compile()", "<accelerator>.*()", "<fabric>.setup*()"),
    *("iter()", "enumerate()", "*tqdm()", "*cycle()", "*islice()", "int()", "zip()", "float()"),
    *("*refetcher()", "*.log_every()", "*Loader()"),
)
OF_OBJECT: Final = matcher("*.to()", "*.cuda()", "*.train()", "*.eval()", "*.requires_grad_()")
LEARNED: Final = ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.withitem | ast.Call
MOST_VALUES: Final = 8  # of a name, such as of a parameter
PREPARE: Final = matcher("<accelerator>.prepare*()", "<fabric>.setup*()")
ENVIRONMENT: Final = ("os.environ.get", "os.getenv")
OPERATORS: Final[dict[type[ast.operator], str]] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "times", ast.Div: "/"},
    **{ast.FloorDiv: "//", ast.Mod: "%"},
}
DEVICE: Final = re.compile("device|cuda|gpu|rank")
SCORES: Final = re.compile(r"\.item\(\)|\bloss|\bacc(uracy)?\d?\b|\.size\(")


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


def code(node: ast.AST) -> str:
    """Return the source of a node on one line."""
    return re.sub(r"\s+", " ", ast.unparse(node))


class Names:
    """The names of all files of a script, found by repeated passes over their statements."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.source_of: dict[ast.AST, Source] = {source.tree: source for source in sources}
        self.assigned: dict[str, list[ast.expr]] = {}  # all values of a target, in any scope
        self.made: dict[str, dict[str, ast.expr]] = {}  # by role and target
        self.callers: dict[Function, list[ast.Call]] = {}
        self._functions: dict[str, list[Function]] = {}
        self._values: dict[tuple[ast.AST, str], list[Value]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}  # the function or module around a node
        self._named: dict[ast.AST, str] = {}
        self._is_learned = False  # all roles: names of nodes do not change any more
        self._means = {s.tree: {each.name: each.means for each in s.imports} for s in sources}
        self._local = {s.tree: {each.name for each in s.imports if each.file} for s in sources}
        self.has_workers = any(
            m.startswith(GROUPS) for ms in self._means.values() for m in ms.values()
        )
        for source in sources:
            self._read(source.tree)
        self.nodes = [*self.parents]
        statements = [node for node in self.nodes if isinstance(node, LEARNED)]
        for _ in range(PASSES):
            if not any([self._learn(node) for node in statements]):
                break
        self._is_learned = True

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

    def module(self, node: ast.AST) -> ast.AST:
        """Return the module of a node."""
        while not isinstance(node, ast.Module):
            node = self._scopes[node]
        return node

    def is_top(self, node: ast.AST) -> bool:
        """Return whether a node is in no function."""
        return isinstance(self._scopes[node], ast.Module)

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
        if text in self._means[self.module(node)]:
            return ""
        last = text.rpartition(".")[2]
        roles = (role for role, pattern in BY_NAME.items() if pattern.fullmatch(last))
        return next((role for role in roles if self.has_workers or role not in NEEDS_GROUP), "")

    def name(self, node: ast.AST) -> str:
        """Return what the patterns of rules.md call a node, such as the full name of a call."""
        name = self._named.get(node)
        if name is None:
            name = self._name(node)
            self._named.update({node: name} if self._is_learned else {})
        return name

    def _name(self, node: ast.AST) -> str:
        match node:
            case ast.Call():
                return self._name_of_call(node)
            case ast.keyword(arg=str() as name, value=value):
                constant = value.value if isinstance(value, ast.Constant) else "x"
                return f"{self.name(self.parents[node]).removesuffix(')')}{name}={constant})"
            case ast.AugAssign(op=op, value=value):
                return f"{OPERATORS.get(type(op))}= {self._operand(value)}"
            case ast.BinOp(op=op, left=left, right=right):
                sign, first, second = OPERATORS.get(type(op)), *map(self._operand, (left, right))
                if "<rank>" in {first, second} or first == second == "<world>":
                    return ""  # the number of another worker, or of all
                return f"{first} {sign}" if first == "<world>" else f"{sign} {second}"
            case ast.Break():
                return "break"
            case ast.Subscript(slice=ast.Constant(value=str() as key), value=value):
                return f"{self.name(value)}.{key}"
            case ast.Subscript(ctx=ctx, value=value):
                return f"{self.name(value)}[]{' =' * isinstance(ctx, ast.Store)}"
            case ast.Name() | ast.Attribute():
                return self._name_of(node)
        return ""

    def _name_of_call(self, call: ast.Call) -> str:
        name = self.name(call.func)
        first = call.args[0] if call.args else ast.Constant(None)
        match name.rpartition(".")[2], first:
            case "getattr", ast.Name(id=root) | ast.Attribute(value=ast.Name(id=root)):
                is_known = isinstance(call.args[-1], ast.Constant)
                is_module = root in self._means[self.module(call)] and not is_known
                return f"{name}({'module' * is_module})"
            case "update" | "append", _ if SCORES.search(code(call)):
                return f"{name}(score)"
            case "to", _ if DEVICE.search(code(first)):
                return f"{name}(device)"
            case "len", ast.Name() | ast.Attribute() if self.role(first) == "loader":
                return "len(<loader>)"
            case "list" | "tuple" | "enumerate", ast.Call(func=ast.Name(id="set")):
                return f"{name}(set())"
            case "get" | "getenv", ast.Constant(value=str() as key) if name in ENVIRONMENT:
                return f"os.environ.{key}"
        return f"{name}()"

    def _operand(self, node: ast.expr) -> str:
        """Return the role of an operand, 1 for a number, x for another one without a role."""
        if isinstance(node, ast.Constant | ast.BinOp):
            return "1" if isinstance(node, ast.Constant) else "x"
        # not what functions return, which may be this operation
        roles = [f"<{value.role}>" for value in self.values(node, PASSES)] or [self.name(node)]
        return roles[0] if roles[0].startswith("<") else "x"

    def _name_of(self, node: ast.Name | ast.Attribute) -> str:
        name = f"<{role}>" if (role := self.role(node)) else ""
        if not name and isinstance(node, ast.Name):
            name = self._means[self.module(node)].get(node.id, node.id)
        elif not name and isinstance(node, ast.Attribute):
            name = f"{self.name(node.value)}.{node.attr}"
        parent = self.parents[node]
        if isinstance(parent, ast.ClassDef) and node in parent.bases:
            return f"class({name})"
        is_off = isinstance(parent, ast.Assign) and code(parent.value) == "False"
        return f"{name} =" if isinstance(node.ctx, ast.Store) and not is_off else name

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
        if not isinstance(node, ast.expr) or (known := self._lookup(node)) or depth > PASSES:
            return known if isinstance(node, ast.expr) else []
        name = self.name(node)
        if role := next((role for role, by in MADE_BY.items() if by.fullmatch(name)), ""):
            return [Value(role, node)]
        if re.fullmatch("<(world|rank)>", name):
            return [Value(name.strip("<>"), node)]
        inner: list[ast.expr] = []
        if function := self.callee(node):
            inner = returned(function)
        elif isinstance(node, ast.Call) and OF_ARGUMENT.fullmatch(name):
            inner = node.args[:1]
        elif isinstance(node, ast.Call) and OF_OBJECT.fullmatch(name):
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        elif isinstance(node, ast.IfExp):
            inner = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            inner = node.values
        elif isinstance(node, ast.Compare | ast.UnaryOp):
            one = node.left if isinstance(node, ast.Compare) else node.operand
            return [each for each in self.values(one, depth + 1) if each.role == "rank"]
        return [each for one in inner for each in self.values(one, depth + 1)]

    def _lookup(self, node: ast.AST) -> list[Value]:
        text, scope = dotted(node), self._scopes[node]
        while text:
            if values := self._values.get((scope, text)):
                return values
            if isinstance(scope, ast.Module):
                break
            scope = self._scopes[scope]
        return []

    def _learn(self, node: ast.AST) -> bool:
        """Note what a statement or a call says about names; return whether that is new."""
        match node:
            case ast.Assign(targets=targets, value=value):
                return any([self._assign(target, value) for target in targets])
            case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
                return self._assign(node.target, value)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                return self._assign(target, value)
            case ast.Call(func=ast.Attribute(attr="parameters", value=owner)):
                text = dotted(owner)
                made = [each for each in self.assigned.get(text, []) if isinstance(each, ast.Call)]
                if text not in {"", "self"} and not self._lookup(owner):
                    self.made.setdefault("model", {}).update({text: each for each in made[:1]})
                    return self._add(owner, text, [Value("model", owner)])
        function = self.callee(node)
        if function is None or not isinstance(node, ast.Call):
            return False
        callers = self.callers.setdefault(function, [])
        if all(node is not each for each in callers):
            callers.append(node)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        pairs = [*zip(names[names[:1] == ["self"] :], node.args, strict=False)]
        pairs += [(each.arg, each.value) for each in node.keywords if each.arg]
        return any([self._add(function.body[0], name, self.values(each)) for name, each in pairs])

    def _assign(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Tuple):
            pairs = zip(target.elts, self._parts(value, len(target.elts)), strict=False)
            learned = [self._assign(one, part) for one, part in pairs]
            return any(learned or [self._add_made(one, value) for one in target.elts])
        text = dotted(target)
        if not text:
            return False
        known = self.assigned.setdefault(text, [])
        if all(value is not each for each in known):
            known.append(value)
        values = self.values(value)
        if not values:
            return self._add_made(target, value)
        for each in values[:1]:
            if each.made is value:
                self.made.setdefault(each.role, {}).setdefault(text, value)
        in_loop = any(isinstance(each, ast.For | ast.While) for each in self.around(target))
        values = [each for each in values if each.role != "tensor" or not in_loop]
        return self._add(target, text, values)

    def _add_made(self, target: ast.expr, value: ast.expr) -> bool:
        """Take what a call returns for what the name of its target says."""
        text = dotted(target)
        last = text.rpartition(".")[2]
        named = [role for role, pattern in MADE_BY_NAME.items() if pattern.fullmatch(last)]
        for role in named[:1] if isinstance(value, ast.Call) else ():
            self.made.setdefault(role, {}).setdefault(text, value)
            return self._add(target, text, [Value(role, value)])
        return False

    def _parts(self, value: ast.expr, number: int) -> list[ast.expr]:
        """Return the expressions that a tuple of targets gets, if that is known."""
        if isinstance(value, ast.Call) and PREPARE.fullmatch(self.name(value)):
            return value.args
        function = self.callee(value)
        tuples = [value, *(returned(function) if function else [])]
        elements = (each.elts for each in tuples if isinstance(each, ast.Tuple))
        return next((each for each in elements if len(each) == number), [])

    def _add(self, place: ast.AST, text: str, values: list[Value]) -> bool:
        """Add roles of a name in the scope of a node; return whether some are new."""
        scope = self.module(place) if "." in text else self._scopes[place]
        known = self._values.setdefault((scope, text), [])
        new = [each for each in values if all(each.made is not old.made for old in known)]
        known += new[: max(MOST_VALUES - len(known), 0)]
        return bool(new) and len(known) < MOST_VALUES


@cache
def returned(function: Function) -> list[ast.expr]:
    """Return what a function returns."""
    returns = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return [value for value in returns if value is not None]
