"""Run a documentation page in the current folder: Python in this process, commands in others."""

from __future__ import annotations

import doctest
import io
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from tests.docs import given
from tests.docs.blocks import NOT_RUN, ROOT, Block, blocks_of
from tests.docs.commands import commands_of, here
from tests.ports import free_port
from tests.python import run_python
from tests.watch.serving import serving

FILE, GIVEN = "file ", ", given"
TORCH = ", torch "
TOGETHER = "run together"
SERVE = "serve"
ADDRESS, PORT = "192.168.0.10", "29400"  # of the first machine, on the pages
LANES = 4
TIMEOUT_SECONDS = 500.0
# torchrun says so on one machine when the other has exited first
_LOGGED_BY_TORCH = re.compile(r"^[EWI]\d{4} \d\d:.*\n", re.MULTILINE)
_AS_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def is_run(block: Block) -> bool:
    """Return whether a block is run, served, written to a file, or compared with output."""
    if TORCH in block.test:
        return TorchVersion(torch.__version__) >= block.test.partition(TORCH)[2]
    return (
        block.language == "python" and not block.test.startswith(NOT_RUN)
    ) or block.test.startswith(("run", SERVE, "printed"))


def run_page(page: Path) -> None:
    """Run the blocks of a page in order, and compare their output with the page."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)  # pages start in a shell, not under torchrun
    names: dict[str, Any] = {name: getattr(given, name) for name in given.__all__} | {
        "__name__": "__main__"
    }
    printed = ""
    for block in filter(is_run, blocks_of(page)):
        if block.test == "printed":
            if "samestep: " not in block.text:  # leave out the lines about the run itself
                lines = printed.splitlines(keepends=True)
                printed = "".join(line for line in lines if not line.startswith("samestep: "))
            assert doctest.OutputChecker().check_output(block.text, printed, _AS_DOCTEST), (
                f"{block}: expected this output, got:\n{printed}"
            )
        elif block.test == SERVE:
            _fetch_page(block)
        elif block.language == "sh":
            printed = _run_commands(block)
        elif block.test.startswith(FILE):
            name, given_names, _ = block.test.removeprefix(FILE).partition(GIVEN)
            imports = "from tests.docs.given import *\n\n" if given_names else ""
            Path(name).write_text(imports + block.text)
        else:
            printed = _run_python(block, names)


def _run_python(block: Block, names: dict[str, Any]) -> str:
    # Empty lines before the code make tracebacks show the page's line numbers.
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    printed = io.StringIO()
    with redirect_stdout(printed), in_context(block.test, names):
        exec(code, names)
    return printed.getvalue()


@contextmanager
def in_context(test: str, names: dict[str, Any]) -> Iterator[None]:
    if not test:
        yield
        return
    with given.ss.init(lanes=LANES) as run:
        model = run.replicate(given.Net())
        optimizer = given.torch.optim.SGD(model.parameters(), lr=0.1)
        names.update(run=run, model=model, optimizer=optimizer)
        if test != "in a step":
            yield
        else:
            for names["batch"] in run.batches(given.train_set, 32, steps=1):
                yield


def _fetch_page(block: Block) -> None:
    """Run `samestep watch` on a free port, and fetch its page and its list of runs."""
    ((*program, location),) = commands_of(block.text)
    assert program == ["samestep", "watch"], f"{block}: expected samestep watch and a folder"
    with serving(location) as served:
        assert "<title>" in served.get("/").text, block
        assert served.json("/api/runs")["runs"], f"{block}: the page has no runs"


def _run_commands(block: Block) -> str:
    """Run the commands of a block that work on one machine; return their output."""
    status = int(block.test.partition("status ")[2] or 0)
    if block.test == TOGETHER:
        text = block.text.replace(ADDRESS, "127.0.0.1").replace(PORT, str(free_port()))
        commands = [here(words, together=True) for words in commands_of(text)]
    else:
        commands = [here(words) for words in commands_of(block.text)]
    run = partial(_run_command, block, status)
    with ThreadPoolExecutor(len(commands) if block.test == TOGETHER else 1) as pool:
        return "".join(pool.map(run, filter(None, commands)))


def _run_command(block: Block, status: int, command: list[str]) -> str:
    python = command.index(sys.executable)  # after env and variables
    variables = dict(word.split("=", 1) for word in command[1:python])
    fixed = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = run_python(
        *command[python + 1 :],
        env=os.environ | fixed | variables,
        merges=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == status, (
        f"{block}: {command} exited with status {done.returncode}:\n{done.stdout}"
    )
    return _LOGGED_BY_TORCH.sub("", done.stdout)
