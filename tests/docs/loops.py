"""The loops of docs/loops as plain DDP and with samestep, and how they differ.

`python -m tests.docs.loops` writes the differences and the numbers of lines into docs/loops.md.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tests.docs.blocks import ROOT

FOLDER, PAGE = ROOT / "docs/loops", ROOT / "docs/loops.md"
NAMES = [
    "tutorial",
    "imagenet",
    "gpt",
    "dcgan",
    "vae",
    "contrastive",
    "detr",
    "segmentation",
    "distillation",
    "dqn",
]


def code_lines(path: Path) -> list[str]:
    """Return the lines of a script without indentation, comments and blank lines."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def counts(name: str) -> tuple[int, int, int]:
    """Return the lines of both scripts, and those of the second that are new or changed."""
    before, after = code_lines(FOLDER / f"{name}_ddp.py"), code_lines(FOLDER / f"{name}.py")
    parts = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return (
        len(before),
        len(after),
        sum(end - start for kind, *_, start, end in parts if kind != "equal"),
    )


def difference(name: str) -> str:
    """Return the difference of both scripts as a block of the page."""
    before, after = (
        (FOLDER / file).read_text().splitlines(keepends=True)
        for file in (f"{name}_ddp.py", f"{name}.py")
    )
    return "".join(difflib.unified_diff(before, after, f"{name}_ddp.py", f"{name}.py", n=1))


def with_differences(page: str) -> str:
    """Return the page with the current differences and numbers of lines."""
    for name in NAMES:
        block = f"```diff\n{difference(name)}```"
        page = re.sub(
            rf"```diff\n--- {name}_ddp\.py\n.*?```", lambda _, b=block: b, page, flags=re.DOTALL
        )
        row = " | ".join(map(str, counts(name)))
        page = re.sub(rf"(\(#{name}\) \|) \d+ \| \d+ \| \d+ \|", rf"\1 {row} |", page)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_differences(PAGE.read_text()))
