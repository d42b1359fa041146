"""The entries of a plan: what to do about a place of a script, as the rules of rules.md say it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from samestep.tools.adopt.roles import Names
from samestep.tools.adopt.rules import rules
from samestep.tools.adopt.syntax import Loop, bound_name

NAME_WIDTH: Final = 60  # characters of code in an entry
# names of the replacement, and others for scripts that have variables with these
OTHER_NAMES: Final = {"run": "ss_run", "batch": "global_batch", "ss": "sstep"}


@dataclass(frozen=True)
class Entry:
    """What to do about one place of a script."""

    kind: str
    file: str
    line: int
    name: str  # the script's own code
    say: str
    write: str
    link: str  # a page of docs/, with its section


class Entries:
    """The entries of a plan in `all`, of which `texts` are what rules have in braces."""

    def __init__(self, names: Names, texts: Mapping[str, str], loops: list[Loop]) -> None:
        self.all: list[Entry] = []
        self._names, self._texts = names, texts
        self._seen: dict[tuple[str, ast.AST], None] = {}  # in their order
        clashes = {name: names.bindings(name) for name in ("run", "ss")}
        # other functions may well have a `batch`
        inside = (node for loop in loops for node in ast.walk(loop))
        clashes["batch"] = [node for node in inside if bound_name(node) == "batch"]
        self._clashes = {name: nodes[0] for name, nodes in clashes.items() if nodes}

    def has(self, name: str, node: ast.AST) -> bool:
        """Return whether there is an entry of a rule for a node."""
        return (name, node) in self._seen

    def node_of(self, name: str) -> ast.AST | None:
        """Return the node of a rule's first entry, None if there is none."""
        return next((node for rule, node in self._seen if rule == name), None)

    def name_of(self, name: str) -> str:
        """Return what `run`, `batch` or `ss` is called beside the names of the script."""
        return OTHER_NAMES[name] if name in self._clashes else name

    def add(self, name: str, node: ast.AST, text: str, /, **texts: str) -> None:
        """Add an entry for a node, once for each rule. `more` says how many places are like it."""
        if self.has(name, node):
            return
        self._seen[name, node] = None
        rule = rules()[name]
        values = defaultdict(lambda: "...", self._texts, name=text)
        values.update(texts, clashes="".join(self._notes()))
        say, write = (self._renamed(part).format_map(values) for part in (rule.say, rule.write))
        short = text if len(text) <= NAME_WIDTH else f"{text[: NAME_WIDTH - 2]} …"
        place = self._file(node), getattr(node, "lineno", 1)
        label = f"{short}{texts.get('more', '')}"
        self.all.append(Entry(rule.kind, *place, label, say, write, rule.link))

    def _file(self, node: ast.AST) -> str:
        return str(self._names.source_of[self._names.module(node)].path)

    def _notes(self) -> Iterator[str]:
        for name, node in self._clashes.items():
            line = f"line {getattr(node, 'lineno', 1)} of {self._file(node)}"
            yield f". `{name}` is a name of {line}: here, it is `{self.name_of(name)}`"

    def _renamed(self, text: str) -> str:
        """Return what a rule says, with other names for those that the script has."""
        for name in self._clashes:
            pattern = rf"(?<![{{\w.])(?<!samestep ){name}(?=[.:),`\n]|$| in )"
            text = re.sub(pattern, self.name_of(name), text)
        return text
