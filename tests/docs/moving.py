"""The tables of docs/moving.md, which are the rules of `samestep adopt`.

`python -m tests.docs.moving` writes them into the page.
"""

from __future__ import annotations

import re

from samestep.tools.adopt.rules import Rule, rules
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs/moving.md"
MARK = re.compile(r"(<!-- rules: ([^\n]+) -->\n).*?(?=\n<!-- end of rules -->)", re.DOTALL)
# what a page has in place of names of a script
NAMES = {
    "all": "those on the left",
    "args": "...",
    "assigned": "best_loss",
    "batch": "GLOBAL",
    "body": "main(run)",
    "calls": "one of these batches, or several",
    "changed": "losses",
    "clashes": "",
    "dataset": "train_set",
    "end": "10",
    "epoch": "epoch",
    "epochs": "10",
    "loader": "loop = ",
    "loop": "loop",
    "loss": "loss",
    "made": "",
    "max_norm": "1.0",
    "inside": "the lines to the last backward",
    "model": "model",
    "names": "",
    "note": "",
    "objects": "model=model, optimizer=optimizer",
    "options": "",
    "precision": "bfloat16",
    "score": "accuracy",
    "script": "train.py",
    "shift": "",
    "stem": "one",
    "target": "images, labels",
    "value": "loss",
}
PREFIX = re.compile(
    r"^(torch\.(distributed|nn|utils|optim|multiprocessing|amp|cuda\.amp)\.([\w*]+\.)*"
    r"|(apex|accelerate|\*lightning\*|\*Path\(\)|os\.environ)\.([\w*]+\.)*|\*\.?)(?=\w)"
)
ROLES = {
    "accumulation": "accumulation_steps",
    "best": "best_loss",
    "devices": "gpus_per_node",
    "distributed": "if distributed:",
    "rank": "if rank == 0:",
    "world": "world_size",
}


class Names(dict):
    def __missing__(self, name):
        return "..."


def shown(pattern: str) -> str:
    """Return a pattern as a script has it: `<model>.module` is `model.module`."""
    text = re.sub("<(\\w+)>", lambda match: ROLES.get(match[1], match[1]), pattern)
    return PREFIX.sub("", text).replace("times", "*")


def row(rule: Rule) -> str:
    """Return the row of a rule: what a script has, and what takes its place."""
    shows = str if rule.where == "structure" else shown
    old = ", ".join(dict.fromkeys(f"`{shows(pattern)}`" for pattern in rule.patterns))
    names = Names(NAMES | ({"dataset": "test_set"} if rule.name.startswith("evaluat") else {}))
    write, say = (text.format_map(names) for text in (rule.write, rule.say))
    new = "<br>".join(f"`{line.strip()}`" for line in write.splitlines() if line != "...")
    parts = [new or ("not needed" if rule.kind == "goes" else ""), say]
    return f"| {old} | {': '.join(filter(None, parts))} ([more]({rule.link})) |"


def with_tables(page: str) -> str:
    """Return the page with the tables of the current rules."""

    def table(match: re.Match) -> str:
        rows = [row(rule) for rule in rules().values() if rule.section == match[2]]
        return "\n".join([f"{match[1]}\n| in the script | with samestep |", "|---|---|", *rows, ""])

    return MARK.sub(table, page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
