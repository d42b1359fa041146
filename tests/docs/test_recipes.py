"""Commands, flags and settings in the tables old -> new of docs/recipes are those of the recipe."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from importlib import import_module

import pytest

from recipes.settings import parser, read
from samestep.config import Config, flag_name
from tests.docs.blocks import ROOT
from tests.docs.commands import check

PLACEHOLDERS = {"N+M": "4", "N": "2", "M": "2", "DIR": "here", "URL": "file:///there"}
OPTIONS = {"-n", "--gpus", "--mode", *(flag_name(option.name) for option in fields(Config))}
FILES = {"atari": "up_n_down", "detect": "digits", "gpt": "tiny", "vit": "digits"}


def code_of(recipe):
    """Return the code in the column "here" of a page's tables, with values for placeholders."""
    page = (ROOT / f"docs/recipes/{recipe}.md").read_text()
    snippets = []
    for table in re.findall(r"^\|[^\n]+ here \|\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in table.splitlines():
            snippets += re.findall(r"`([^`]+)`", row.rpartition(" | ")[2])
    assert len(snippets) > 30
    file = f"recipes/{recipe}/{FILES.get(recipe)}.yaml"
    for name, value in {**PLACEHOLDERS, "FILE.yaml": file}.items():
        snippets = [re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", value, code) for code in snippets]
    return snippets


@pytest.mark.parametrize("recipe", ["atari", "detect", "gpt", "stain", "vit"])
def test_commands_and_flags_in_tables_are_accepted(recipe):
    script, commands = f"recipes/{recipe}/train.py", 0
    for words in map(shlex.split, code_of(recipe)):
        if words[:2] == ["samestep", "run"]:
            has_script = any(word.endswith(".py") for word in words)
            check(words if has_script else [*words, "train.py"])
            commands += 1
        elif words[0] == "train.py":
            check(["samestep", "run", script, *words[1:]])
        elif words[0] in OPTIONS:
            check(["samestep", "run", "--dir", "here", *words[: len(words) // 2 * 2], "train.py"])
        elif words[0].startswith("-"):
            check(["samestep", "run", script, *words])
    assert commands > 1


@pytest.mark.parametrize("recipe", ["atari", "detect", "gpt", "stain", "vit"])
def test_settings_in_tables_are_those_of_the_recipe(recipe):
    settings = import_module(f"recipes.{recipe}.config").Settings
    keys = re.findall(r"^  ([\w.]+)=", parser(settings, "").format_help(), re.MULTILINE)
    sections, section, checked = {key.partition(".")[0] for key in keys if "." in key}, "", 0
    for code in code_of(recipe):
        if re.fullmatch(r"\.?\w+(\.\w+)*", code):  # a key: model.width, .depth
            key = section + code if code.startswith(".") else code
            section = key.partition(".")[0]
            if section in sections:
                assert key in keys, f"{code!r} is on the page of {recipe}"
                checked += 1
        for word in shlex.split(re.sub(r"^([\w.]+): (.+)", r"'\1=\2'", code)):
            key, equals, _ = word.partition("=")
            if equals and re.fullmatch(r"[\w.]+", key) and "(" not in code:
                read(settings, [word] if key not in {"base", "key"} else [])
                checked += 1
    assert checked > 10
