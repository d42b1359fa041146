"""`samestep skill` prints the skill of the clone; its pages are short, and its commands exist."""

from __future__ import annotations

from pathlib import Path

import yaml

from samestep import cli
from tests.docs.blocks import ROOT

MOST_LINES = 150


def test_the_skill_is_printed_and_its_folder(capsys):
    assert cli.main(["skill", "--path"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder == ROOT / "skills/samestep"
    assert cli.main(["skill"]) == 0
    assert capsys.readouterr().out.strip() == (folder / "SKILL.md").read_text().strip()


def test_assistants_can_load_it():
    page = (ROOT / "skills/samestep/SKILL.md").read_text()
    _, front, body = page.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert matter.keys() == {"name", "description"}
    assert matter["name"] == "samestep"
    assert len(matter["description"]) <= 1024  # the limit of readers of skills
    assert len(page.splitlines()) <= MOST_LINES
    assert body.index("samestep adopt --json") < body.index("samestep run")
    others = {path.name for path in (ROOT / "skills/samestep").glob("*.md")} - {"SKILL.md"}
    assert [name for name in others if f"]({name})" not in page] == []
