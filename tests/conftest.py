"""Settings of every test: one thread, fixed examples in CI, default signals, and no leaks."""

from __future__ import annotations

import os

# Set before torch is imported. A process that forks workers must not have run an operation on
# several threads, or started CUDA.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import gc
import logging
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress

import hypothesis
import pytest

from samestep.host import no_garbage_collection
from tests import python
from tests.huge_pages import use_huge_pages
from tests.leaks import adopt_orphans, nothing_left
from tests.order import group_of, seconds_of_groups, slow_ones_first

IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}

# tests.versions runs some tests without torch
with suppress(ModuleNotFoundError), no_garbage_collection():
    import torch

    torch.set_num_threads(1)
adopt_orphans()
# `make test-long` tries the properties on 100 examples
FEW = hypothesis.settings(deadline=None, max_examples=10)
hypothesis.settings.register_profile("ci", FEW, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("dev", FEW)
hypothesis.settings.register_profile("long", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Let no random number of a test depend on which tests ran before: their order is random."""
    with suppress(NameError):  # without torch
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _default_gpu_check() -> None:
    """Let torch look for GPUs as it does by itself: importing Lightning changes that."""
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


@pytest.fixture(autouse=True)
def _starts_as_of_new_processes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let tests start a finished run again in this process, as users do in another one.

    Not tests of that, nor of a program that has several runs.
    """
    refused = request.path.stem == "test_several_runs" or "demonstration" in request.node.name
    if not refused:
        monkeypatch.setattr("samestep.run.run.refuse_finished", lambda _: None)


@pytest.fixture(autouse=True)
def _default_signals() -> None:
    """Deliver every signal as in a fresh process.

    Background jobs of a shell ignore SIGINT and SIGQUIT, nohup ignores SIGHUP, and a service
    manager may block others. Children inherit both, and handlers of earlier tests: torch's for the
    end of a loader process, and that of a run that was abandoned.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    handled = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        if number in handled or signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import tests without searching for garbage, which takes a quarter of the time."""
    with no_garbage_collection():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, after pytest-randomly has drawn an order."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = slow_ones_first(groups, seconds_of_groups(), processes)


def pytest_collection_finish() -> None:
    """Make forks cheap, and fork the server of Python programs before any test changes something.

    Garbage collections in a fork would copy all imported modules.
    """
    with suppress(ModuleNotFoundError):
        _prepare_forks()
    gc.collect()
    gc.freeze()
    python.start_server()
    _let_loggers_propagate()
    use_huge_pages()  # last: what a process shares with another one is divided again


def _prepare_forks() -> None:
    """Do once what workers would repeat, each in memory of its own."""
    import samestep.launch.supervisor  # noqa: F401
    from samestep.config import merge
    from samestep.launch.local import preload

    preload()
    merge({}, {})  # evaluates the types of all options


def _let_loggers_propagate() -> None:
    """Let pytest find what torch logs at the root, in this process alone.

    It adds its handlers to each logger that does not propagate, six times per test: torch has 50.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def pytest_unconfigure() -> None:
    """Stop the process that programs are forked from."""
    python.stop_server()
