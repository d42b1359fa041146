"""Find the places of a script that rules know by a name: of calls, attributes and operators."""

from __future__ import annotations

import ast
import re
from typing import Final

from samestep.tools.adopt.batches import factor
from samestep.tools.adopt.entries import Entries, head
from samestep.tools.adopt.roles import (
    Function,
    Loop,
    Names,
    code,
    dotted,
    flags_of,
    is_stored,
    nodes_of,
)
from samestep.tools.adopt.rules import Rule, matcher, rules

Branch = ast.If | ast.IfExp | ast.While
WITH_NUMBERS: Final = ("share", "by world", "sampler", "group")  # rules, of workers or ranks
ORDERED: Final = ast.Gt | ast.GtE | ast.Lt | ast.LtE
ENDS: Final = ast.Return | ast.Break | ast.Continue
NUMPY_SEED: Final = 'lambda seed: setattr({}.bit_generator, "state", np.random.PCG64(seed).state)'
KEYWORDS: Final = ("max_norm", "max_epochs")  # that rules name


def targets_of(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of the targets that a loop or a comprehension assigns."""
    loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
    return [part for loop in loops for part in ast.walk(loop.target)]


def place_of(node: ast.AST) -> tuple[int, int]:
    """Return the line and the column of a node."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def shown(node: ast.AST) -> str:
    """Return how an entry names a place: by its code, but an argument of the script by its flag."""
    return next(iter(flags_of(node)), head(node))


class Places:
    """The places of a script. `lanes` are the nodes that a loop over batches runs."""

    def __init__(self, names: Names, entries: Entries, lanes: set[ast.AST]) -> None:
        self._names, self._entries, self._lanes = names, entries, lanes
        branches = (node for node in names.nodes if isinstance(node, Branch))
        self._of_ranks = {node for node in branches if any(map(self._is_rank, ast.walk(node.test)))}
        self._unneeded = {*nodes_of(self._unneeded_functions())}

    def _is_rank(self, node: ast.AST) -> bool:
        return self._role_in_test(node) == "<rank>"

    def _role_in_test(self, node: ast.AST) -> str:
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

    def add_all(self) -> None:
        """Add an entry of the first rule that has the name of a node, and fits its place."""
        by_name = [rule for rule in rules().values() if rule.where != "structure"]
        by_name.sort(key=lambda rule: not rule.where)  # those for some places first
        patterns = [(rule, matcher(*rule.patterns)) for rule in by_name]
        any_name = matcher(*(pattern for rule in by_name for pattern in rule.patterns))
        once: dict[str, list[ast.AST]] = {}
        for node in self._names.nodes:
            name = self._names.visit(node)
            if node in self._unneeded:
                continue
            if (role := self._role_in_test(node)) and (test := self._place("test", node)):
                is_covered = role == "<distributed>" and test in self._of_ranks
                name = "" if is_covered else role
            if any_name.fullmatch(name):
                rule, place = self._first_fitting(name, node, patterns)
                if rule and place and rule.where == "once":
                    once.setdefault(rule.name, []).append(node)
                elif rule and place:
                    self._entries.add(rule.name, place, head(place), **self._texts(node, place))
        for rule_name, nodes in once.items():
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            texts = {"all": ", ".join(dict.fromkeys(map(shown, nodes))), "more": more}
            self._entries.add(rule_name, nodes[0], shown(nodes[0]), **texts)

    def _first_fitting(
        self, name: str, node: ast.AST, patterns: list[tuple[Rule, re.Pattern[str]]]
    ) -> tuple[Rule | None, ast.AST | None]:
        """Return the first rule for a name whose place fits, and that place.

        There is none if the place is inside an expression that has an entry of this rule.
        """
        for rule, pattern in patterns:
            if pattern.fullmatch(name) and (place := self._place(rule.where, node)):
                outer = (part for part in self._names.around(place) if isinstance(part, ast.expr))
                names = WITH_NUMBERS if rule.name in {"world", "rank"} else (rule.name,)
                is_known = any(self._entries.has(name, part) for part in outer for name in names)
                return (None, None) if is_known else (rule, place)
        return None, None

    # where a rule is for

    def _place(self, where: str, node: ast.AST) -> ast.AST | None:
        """Return the node that an entry is about, None if the rule is not for this place."""
        around = [*self._names.around(node)]
        if where in {"test", "compared", "output"}:
            return self._branch(where, node, around)
        loops = [outer for outer in around if isinstance(outer, Loop)]
        functions = [outer.name for outer in around if isinstance(outer, Function)]
        is_evaluated = any(self._entries.has("evaluation", loop) for loop in loops)
        over = [loop.iter for loop in loops if isinstance(loop, ast.For)]
        fits = {
            "": True,
            "once": True,
            "lane": node in self._lanes,
            "batch": node in self._lanes or is_evaluated,
            "carried": where == "carried" and self._is_carried(node, around),
            "reset": where == "reset" and self._is_carried(node, around) and self._is_reset(node),
            "loop": bool(loops),
            "top": not functions and not loops,
            "tracked": where == "tracked" and not loops and self._is_tracked(node),
            "model": "forward" in functions or any(map(self._is_module, around)),
            "train": not is_evaluated,
            "iterated": any(node in ast.walk(part) for part in over),
            "trained": where == "trained" and self._is_trained(node),
            "unsorted": where == "unsorted" and not self._is_sorted(around),
        }
        return node if fits[where] else None

    def _branch(self, where: str, node: ast.AST, around: list[ast.AST]) -> ast.AST | None:
        """Return the branch whose test has a node, or the comparison without one."""
        pairs = zip(around, [node, *around], strict=False)
        tests = [out for out, inner in pairs if isinstance(out, Branch) and out.test is inner]
        if where == "output" and tests and self._matters(tests[0]):
            return None
        if where == "compared":
            compares = [outer for outer in around if isinstance(outer, ast.Compare)]
            compared = [outer for outer in compares if isinstance(outer.ops[0], ORDERED)]
            tests = [*tests, *compared] if compared else []
        return next(iter(tests), None)

    def _is_carried(self, node: ast.AST, around: list[ast.AST]) -> bool:
        """Return whether what a node in a lane changes keeps the values of other lanes."""
        begun = (
            self._statement(value)
            for value in self._names.assigned.get(self._changed(node), [])
            if value in self._lanes
        )
        is_fresh = any(
            place_of(statement) < place_of(node) and self._names.parents[statement] in around
            for statement in begun
        )
        return node in self._lanes and not is_fresh

    def _is_reset(self, node: ast.AST) -> bool:
        """Return whether a loop begins what a node changes again, such as one over epochs."""
        text = self._changed(node)
        home = self._names.home(node, text)
        values = self._names.assigned.get(text, [])
        return any(
            any(self._names.loops(value))
            for value in values
            if self._names.home(value, text) is home
        )

    def _changed(self, node: ast.AST) -> str:
        """Return what a node adds to: the target of `+=`, or the object of a method."""
        match node:
            case ast.AugAssign(target=changed) | ast.Call(func=ast.Attribute(value=changed)):
                return dotted(changed)
        return ""

    def _is_tracked(self, node: ast.AST) -> bool:
        """Return whether a node follows the place of `run.track`, in the same function."""
        track = self._entries.node_of("track")
        is_near = track is not None and self._names.scope(node) is self._names.scope(track)
        return is_near and place_of(node) > place_of(track)

    def _is_trained(self, call: ast.AST) -> bool:
        values = self._names.values(getattr(call, "args", [None])[0])
        evaluated = ("evaluation", "unknown evaluated loader")
        return not any(self._entries.has(name, v.made) for v in values for name in evaluated)

    def _is_module(self, node: ast.AST) -> bool:
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        return any(self._names.visit(base).endswith("Module)") for base in bases)

    def _is_sorted(self, around: list[ast.AST]) -> bool:
        targets = [dotted(node.targets[0]) for node in around if isinstance(node, ast.Assign)]
        sorts = self._names.reads.keys() & {f"{target}.sort" for target in targets}
        return bool(sorts) or any(self._names.is_for(node, "sorts") for node in around)

    # what only one worker does

    def _matters(self, branch: Branch) -> bool:
        """Return whether a branch does what all workers have to do, or need the result of."""
        nodes = {*ast.walk(branch)} - {*ast.walk(branch.test)}
        values = [node.value for node in nodes if isinstance(node, ast.Assign)]
        return (
            any(isinstance(node, ENDS) for node in nodes)
            or any(map(self._names.callee, values))
            or any(self._names.is_for(node, "made by all workers") for node in nodes)
            or bool(self._read_elsewhere(branch))
        )

    def _read_elsewhere(self, branch: ast.AST) -> list[str]:
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
        if not self._of_ranks.isdisjoint(around) or not self._is_later(read, branch):
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
        if self._names.scope(read) is not self._names.scope(branch):
            return True
        text, around = dotted(read), [*self._names.around(read)]
        outer = {*self._names.around(branch)}
        loops = [node for node in around if isinstance(node, Loop) and node in outer]
        end = getattr(branch, "end_lineno", 0), getattr(branch, "end_col_offset", 0)
        start = end if place_of(read) > end else (place_of(loops[0]) if loops else None)
        if start is None:
            return False
        values = [value for value in self._names.assigned.get(text, []) if value not in around]
        again = any(
            start < place_of(statement) < place_of(read)
            and self._names.parents[statement] in around
            for statement in map(self._statement, values)
        )
        targets = (target for node in around if node not in outer for target in targets_of(node))
        return not again and text not in map(dotted, targets)

    def _statement(self, node: ast.AST) -> ast.stmt:
        return next(outer for outer in self._names.around(node) if isinstance(outer, ast.stmt))

    # what is said of a place

    def _texts(self, node: ast.AST, place: ast.AST) -> dict[str, str]:
        """Return what a rule may say of a node: its arguments, and what is around it."""
        changed = self._changed(node)
        texts = {"assigned": code(node), "changed": changed}
        match node:
            case ast.Call():
                texts |= self._texts_of_call(node)
            case ast.Attribute(value=value):
                texts["object"] = code(value)
            case ast.AugAssign(value=value):
                texts["rest"] = changed
                texts["value"] = "loss" if "loss" in code(value) else changed.rpartition(".")[2]
            case ast.BinOp():
                texts["rest"] = self._without_workers(node)
        if isinstance(place, Branch):
            texts["test"] = code(place.test)
        if place in self._of_ranks:
            elsewhere = ", ".join(f"`{text}`" for text in self._read_elsewhere(place))
            texts["names"] = f" ({elsewhere})" if elsewhere else ""
        parent = self._names.parents.get(node)  # None of `Load`, which nodes share
        if isinstance(parent, ast.Compare):
            (left, right), is_right = (parent.left, parent.comparators[0]), node is not parent.left
            is_score = isinstance(parent.ops[0], ast.Gt | ast.GtE) == is_right
            texts["score"] = f"{'' if is_score else '-'}{factor(code(left if is_right else right))}"
        for value in self._names.values(node)[:1]:
            texts["seed"] = self._seed(code(node), self._names.visit(value.made))
        return texts

    def _seed(self, name: str, made: str) -> str:
        """Return the function that seeds a generator of torch, NumPy or Python."""
        if made.startswith("numpy"):
            return NUMPY_SEED.format(name)
        return f"{name}.manual_seed" if "torch" in made else f"{name}.seed"

    def _without_workers(self, node: ast.BinOp) -> str:
        """Return a number that is multiplied or divided by the workers without these."""
        is_left = self._names.visit(node).startswith(("<world>", "<devices>"))
        rest, workers = (node.right, node.left) if is_left else (node.left, node.right)
        rounded = re.fullmatch(rf"(.+) \+ {re.escape(code(workers))} - 1", code(rest))
        return rounded[1] if rounded else code(rest)

    def _texts_of_call(self, call: ast.Call) -> dict[str, str]:
        texts = dict(zip(("first", "max_norm"), map(code, call.args), strict=False))
        keywords = (keyword for keyword in call.keywords if keyword.arg in KEYWORDS)
        texts |= {str(keyword.arg): code(keyword.value) for keyword in keywords}
        texts["args"] = ", ".join(map(code, [*call.args, *call.keywords]))
        texts["loop"] = texts.get("first", "loop")
        texts["value"] = "loss" if "loss" in texts["loop"] else self._changed(call)
        match call.args:
            case [ast.Call(func=ast.Attribute(attr="parameters", value=model)), *_]:
                texts["model"] = code(model)
            case [ast.Call(func=ast.Attribute(attr="to" | "cuda", value=model)), *_]:
                texts["first"] = code(model)
        is_half = re.search(r"\bfloat16", texts["args"]) or "scaler" in self._names.made
        texts["precision"] = "float16" if is_half else "bfloat16"
        return texts
