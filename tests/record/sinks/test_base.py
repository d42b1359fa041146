from __future__ import annotations

import sys

import pytest

from samestep.config import SINKS
from samestep.errors import ConfigError
from samestep.record.sinks.base import NAMED, check_sinks, open_sink
from tests.record.far_sinks import name_of


class OwnSink:
    def __init__(self, directory):
        self.directory = directory


def test_a_class_of_ones_own_is_called_with_the_directory(tmp_path):
    check_sinks([name_of(OwnSink)])
    assert open_sink(name_of(OwnSink), tmp_path).directory == tmp_path


def test_every_name_that_options_know_has_a_class():
    assert tuple(NAMED) == SINKS


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_told_with_how_to_install_it(name, monkeypatch):
    check_sinks([name])
    monkeypatch.setitem(sys.modules, NAMED[name][1], None)
    with pytest.raises(
        ConfigError,
        match=rf'sinks=.{name}. was given; expected {name} to be there: pip install "samestep\[{name}\]"',
    ):
        check_sinks([name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere:Sink",
            "sinks='nowhere:Sink' was given; expected the module:Class to be there for import: ModuleNotFoundError",
        ),
        (
            "math:pi",
            "sinks='math:pi' was given; expected a class that is called with a run's directory, and it is float",
        ),
        (
            "s4://bucket/run",
            "expected a URL that fsspec knows, such as s3://bucket/runs/one, got s4://bucket/run",
        ),
    ],
)
def test_what_could_never_work_is_told(name, message):
    with pytest.raises(ConfigError, match=message):
        check_sinks([name])
