"""Every block of docs/llms.txt runs, and the mistakes have the errors that it quotes."""

from __future__ import annotations

import doctest
import io
import re
from contextlib import redirect_stdout

from samestep.errors import SamestepError
from tests.docs import given
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.commands import check, commands_of
from tests.docs.page import in_context
from tests.workers import run_workers

PAGE = ROOT / "docs" / "llms.txt"
BLOCKS = blocks_of(PAGE)
MISTAKES = 10
MATCHES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def error_of(block):
    """Run a block with new names, inside a run unless it starts one; return its error as text."""
    names = {name: getattr(given, name) for name in given.__all__} | {"__name__": "__main__"}
    code = compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec", dont_inherit=True)
    context = "" if "ss.init(" in block.text else "in a run"
    try:
        with redirect_stdout(io.StringIO()), in_context(context, names):
            exec(code, names)
    except SamestepError as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_blocks():
    errors = 0
    for block, after in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        if block.language == "python":
            expected = after.text if after is not None and after.language == "text" else None
            error = error_of(block)
            assert (error is None) == (expected is None), f"{block}: {error}"
            if expected is not None:
                matches = doctest.OutputChecker().check_output(expected, f"{error}\n", MATCHES)
                assert matches, f"{block}: {error}"
                errors += 1
    return errors


def test_blocks_run_and_mistakes_have_their_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_workers(run_blocks, 1) == [MISTAKES]


def test_commands_parse_and_lines_fit():
    for block in BLOCKS:
        if block.language == "sh":
            for words in commands_of(block.text):
                check(words)
    assert {block.language for block in BLOCKS} == {"python", "sh", "text"}
    assert [line for line in PAGE.read_text().splitlines() if len(line) > 108] == []


def test_linked_pages_are_in_the_site():
    links = re.findall(r"\]\(([\w-]+)\.html\)", PAGE.read_text())
    assert len(links) == PAGE.read_text().count("](")
    assert [name for name in links if not (ROOT / f"docs/{name}.md").exists()] == []
