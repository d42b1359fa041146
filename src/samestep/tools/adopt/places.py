"""Find the places of a script that rules know by a name: of calls, attributes and operators."""

from __future__ import annotations

import ast
import re
from itertools import islice
from typing import Final

from samestep.tools.adopt.batches import factor
from samestep.tools.adopt.entries import Entries
from samestep.tools.adopt.ranks import Ranks
from samestep.tools.adopt.roles import Names
from samestep.tools.adopt.rules import Rule, matcher, rules
from samestep.tools.adopt.syntax import Branch, Function, Loop, code, dotted, head, place_of, shown

WITH_NUMBERS: Final = ("share", "by world", "sampler", "group")  # rules, of workers or ranks
ORDERED: Final = ast.Gt | ast.GtE | ast.Lt | ast.LtE
NUMPY_SEED: Final = 'lambda seed: setattr({}.bit_generator, "state", np.random.PCG64(seed).state)'
KEYWORDS: Final = ("max_norm", "max_epochs")  # that rules name


class Places:
    """The places of a script. `lanes` are the nodes that a loop over batches runs."""

    def __init__(self, names: Names, entries: Entries, lanes: set[ast.AST]) -> None:
        self._names, self._entries, self._lanes = names, entries, lanes
        self._ranks = Ranks(names)

    def add_all(self) -> None:
        """Add an entry of the first rule that has the name of a node, and fits its place."""
        by_name = [rule for rule in rules().values() if rule.where != "structure"]
        by_name.sort(key=lambda rule: not rule.where)  # those for some places first
        patterns = [(rule, matcher(*rule.patterns)) for rule in by_name]
        any_name = matcher(*(pattern for rule in by_name for pattern in rule.patterns))
        once: dict[Rule, list[ast.AST]] = {}
        for node in self._names.nodes:
            name = "" if node in self._ranks.unneeded else self._name(node)
            if not any_name.fullmatch(name):
                continue
            fitting = (
                (rule, place)
                for rule, pattern in patterns
                if pattern.fullmatch(name) and (place := self._place(rule.where, node))
            )
            for rule, place in islice(fitting, 1):
                if rule.where == "once":
                    once.setdefault(rule, []).append(node)
                elif not self._is_inside(rule, place):
                    self._entries.add(rule.name, place, head(place), **self._texts(node, place))
        for rule, nodes in once.items():
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            texts = {"all": ", ".join(dict.fromkeys(map(shown, nodes))), "more": more}
            self._entries.add(rule.name, nodes[0], shown(nodes[0]), **texts)

    def _name(self, node: ast.AST) -> str:
        """Return what the patterns of rules call a node: in the test of a branch, by its role."""
        role = self._ranks.role_in_test(node)
        return role if role and self._place("test", node) else self._names.visit(node)

    def _is_inside(self, rule: Rule, place: ast.AST) -> bool:
        """Return whether a place is part of an expression that has an entry of the rule."""
        names = WITH_NUMBERS if rule.name in {"world", "rank"} else (rule.name,)
        outer = [part for part in self._names.around(place) if isinstance(part, ast.expr)]
        return any(self._entries.has(name, part) for part in outer for name in names)

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
            "carried": where == "carried" and self._is_carried(node),
            "reset": where == "reset" and self._is_carried(node) and self._is_reset(node),
            "loop": bool(loops),
            "top": not functions and not loops,
            "tracked": where == "tracked" and not loops and self._is_tracked(node),
            "model": "forward" in functions or any(map(self._is_module, around)),
            "evaluated": is_evaluated,
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
        if where == "output" and tests and self._ranks.matters(tests[0]):
            return None
        compares = [outer for outer in around if isinstance(outer, ast.Compare)]
        compared = [outer for outer in compares if isinstance(outer.ops[0], ORDERED)]
        if where == "compared":
            return next(iter([*tests, *compared]), None) if compared else None
        return next(iter(tests), None)

    def _is_carried(self, node: ast.AST) -> bool:
        """Return whether what a node in a lane changes keeps the values of other lanes."""
        values = self._names.assigned.get(self._changed(node), [])
        in_lane = [value for value in values if value in self._lanes]
        return node in self._lanes and not self._names.always_assigned(in_lane, (0, 0), node)

    def _is_reset(self, node: ast.AST) -> bool:
        """Return whether a loop begins what a node changes again, such as one over epochs."""
        text, names = self._changed(node), self._names
        values = (v for v in names.assigned.get(text, []) if any(names.loops(v)))
        return any(names.home(value, text) is names.home(node, text) for value in values)

    def _changed(self, node: ast.AST) -> str:
        """Return what a node adds to: the target of `+=`, or the object of a method."""
        match node:
            case ast.AugAssign(target=changed) | ast.Call(func=ast.Attribute(value=changed)):
                return dotted(changed)
        return ""

    def _is_tracked(self, node: ast.AST) -> bool:
        """Return whether a node follows the place of `run.track`, in the same function."""
        track = self._entries.node_of("track")
        return (
            track is not None
            and next(self._names.scopes(node)) is next(self._names.scopes(track))
            and place_of(node) > place_of(track)
        )

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
        if place in self._ranks.branches:
            elsewhere = ", ".join(f"`{text}`" for text in self._ranks.read_elsewhere(place))
            texts["names"] = f" ({elsewhere})" if elsewhere else ""
        parent = self._names.parents.get(node)  # None of `Load`, which nodes share
        if isinstance(parent, ast.Compare):
            (left, right), is_right = (parent.left, parent.comparators[0]), node is not parent.left
            is_score = isinstance(parent.ops[0], ast.Gt | ast.GtE) == is_right
            texts["score"] = f"{'' if is_score else '-'}{factor(code(left if is_right else right))}"
        for generator in self._names.values(node)[:1]:
            texts["seed"] = self._seed(code(node), self._names.visit(generator.made))
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
