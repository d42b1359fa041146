"""Every code block of README.md and docs/ works: Python runs, commands parse, data can be read."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

# imported by the first optimizer: once here, before each page runs in its own process
import torch._dynamo  # noqa: F401
import yaml

from samestep.cli import COMMANDS
from tests.docs.blocks import NOT_RUN, PAGES, ROOT, blocks_of, long_lines
from tests.docs.commands import check, commands_of
from tests.docs.page import is_run, run_page
from tests.workers import run_workers

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
# the number of blocks for each reason; tests/integrations runs these
NOT_RUN_BLOCKS = {
    "needs a GPU": 1,
    "needs a notebook": 1,
    "needs datasets": 1,
    "needs hydra-core": 1,
    "needs lightning": 1,
    "needs mosaicml-streaming": 1,
    "needs peft": 1,
    "needs pyarrow": 1,
    "needs ray": 1,
    "needs submitit": 1,
    "needs transformers": 1,
    "needs webdataset": 1,
}
LONG_PAGES = (
    "README",
    "docs/index",
    "docs/tutorial",
    "docs/resume",
    "docs/contrastive",
    "docs/replay",
    "docs/moving",
    "docs/verify",
)
MOST_LINES = 300
MOST_FIRST_LINES = 5
# pages with more lines, and why
LONGER = {
    "docs/loops.md": "ten programs, each before and after, with their generated differences",
    "docs/moving.md": "the rules of `samestep adopt`, which are generated",
    "docs/troubleshooting.md": "messages by exception, to search and not to read",
}
LONG = [ROOT / f"{name}.md" for name in LONG_PAGES]
RUN = [
    pytest.param(page, marks=pytest.mark.long) if page in LONG else page
    for page in PAGES
    if any(is_run(block) for block in blocks_of(page))
]
CODE = re.compile(
    rf"^\s*(\$ |samestep ({'|'.join(COMMANDS)}) |python |import |from \w+ import)", re.MULTILINE
)


# each command of a page starts Python and imports torch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_workers(run_page, 1, page, timeout=840)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_parsers_accept_the_arguments_of_commands(block):
    for words in commands_of(block.text):
        check(words)


def test_commands_that_show_the_guarantees_exist():
    commands = re.findall(
        r"`((?:samestep \w+ -|pytest |python -m |make )[^`]+)`", (ROOT / "README.md").read_text()
    )
    assert len(commands) > 10
    for command in commands:
        check(*commands_of(command))


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language in {"json", "yaml"}], ids=str
)
def test_data_can_be_read(block):
    assert (
        list(yaml.safe_load_all(block.text))
        if block.language == "yaml"
        else [json.loads(line) for line in block.text.splitlines()]
    )


def test_pages_are_short():
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert {
        str(page.relative_to(ROOT))
        for page in pages
        if len(page.read_text().splitlines()) > MOST_LINES
    } == set(LONGER)


def test_pages_begin_with_the_idea_in_at_most_five_lines():
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            first = page.read_text().split("\n\n")[1]
            assert not first.startswith(("#", "-", "|", "```", "!", "<")), page
            assert len(first.splitlines()) <= MOST_FIRST_LINES, page


def test_lines_of_blocks_fit_100_columns():
    assert [line for block in BLOCKS for line in long_lines(block)] == []


def test_blocks_without_a_language_are_not_code():
    assert [
        str(block) for block in BLOCKS if block.language in {"", "text"} and CODE.search(block.text)
    ] == []


def test_python_that_is_not_run_compiles_and_has_a_known_reason():
    not_run = [block for block in BLOCKS if block.test.startswith(NOT_RUN)]
    assert Counter(block.test.removeprefix(NOT_RUN) for block in not_run) == NOT_RUN_BLOCKS
    for block in not_run:
        compile(block.text, str(block), "exec", dont_inherit=True)
