from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.config import PREFIX, Config, is_url, merge
from samestep.errors import ConfigError

NAMES = [field.name for field in fields(Config)]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.builds(Path, st.sampled_from(["runs/one", "step-5", "12", "10min"])),
    st.from_regex(r"[0-9]{1,30} ?(min)?", fullmatch=True),
    st.sampled_from(
        [
            "auto",
            "never",
            "cpu",
            "cuda",
            "float32",
            "bfloat16",
            "stop",
            "continue",
            "none",
            "True",
            "false",
            "0",
            "1",
            "-1",
        ]
    ),
)


def is_usable(config):
    """Check that a run can work with every value."""
    for name in ("lanes", "threads", "keep_last", "stop_after", "check_every"):
        value = getattr(config, name)
        assert value is None or (type(value) is int and value >= 1)
    assert 0 <= config.seed < 2**63
    assert config.keep_best >= 0
    assert config.devices in range(1, 1001) or {
        name.partition(":")[0] for name in config.devices
    } in ({"cpu"}, {"cuda"})
    assert config.dir is None or isinstance(config.dir, Path)
    assert isinstance(config.resume, str)
    assert type(config.deterministic) is bool
    assert isinstance(config.timeout, (int, float))
    assert 0 < config.timeout <= 10**9
    assert config.remote is None or (is_url(config.remote) and config.dir is not None)
    assert config.transfer is None or (":" in config.transfer and config.dir is not None)
    assert not config.sinks or config.dir is not None
    assert config.precision in {"float32", "bfloat16"}
    assert config.device in {"auto", "cpu", "cuda"}
    assert config.nonfinite_loss in {"stop", "continue"}
    assert config.snapshot_steps is None or config.snapshot_steps >= 1
    assert config.snapshot_seconds is None or 60 <= config.snapshot_seconds < math.inf


def used_or_refused(name, arguments, environment):
    try:
        config = merge(arguments, environment)
    except ConfigError as error:
        return name in str(error).lower() and "was given; expected" in str(error)
    is_usable(config)
    return True


@given(st.sampled_from(NAMES), VALUES)
@example("timeout", 10**400)
@example("timeout", math.inf)
@example("snapshot_every", "9" * 5000)
@example("snapshot_every", "9" * 400 + "min")
@example("snapshot_every", 0)
@example("seed", 2**63)
def test_any_argument_is_used_or_refused_by_name(name, value):
    assert used_or_refused(name, {name: value}, {})


@given(st.sampled_from(NAMES), VALUES.map(str))
@example("timeout", "1e999")
@example("timeout", "nan")
@example("seed", "9" * 5000)
def test_any_variable_is_used_or_refused_by_name(name, text):
    assert used_or_refused(name, {}, {PREFIX + name.upper(): text})


def test_environment_wins_over_arguments_and_arguments_over_defaults():
    assert merge({}, {}) == Config()
    arguments = {"lanes": 4, "seed": 7, "timeout": 5, "dir": "runs/one"}
    environment = {
        "SAMESTEP_LANES": "8",
        "SAMESTEP_DETERMINISTIC": "false",
        "SAMESTEP_INTERNAL_STARTED_BY": "samestep",
        "LANES": "9",
    }
    assert merge(arguments, environment) == Config(
        lanes=8, seed=7, timeout=5.0, dir=Path("runs/one"), deterministic=False
    )
    assert merge({"stop_after": 3}, {"SAMESTEP_STOP_AFTER": "none"}) == Config(stop_after=None)


def test_variables_of_this_process_are_read(monkeypatch):
    monkeypatch.setenv("SAMESTEP_SEED", "12")
    assert merge({"seed": 1}).seed == 12


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"snapshot_every": 500}, Config(snapshot_every="500")),
        ({"snapshot_every": " 2 min "}, Config(snapshot_every=" 2 min ")),
        ({"hot_every": 100}, Config(hot_every="100")),
        ({"resume": Path("runs/one/step-00000005")}, Config(resume="runs/one/step-00000005")),
        ({"dir": "runs"}, Config(dir=Path("runs"))),
        ({"timeout": 3}, Config(timeout=3.0)),
    ],
)
def test_values_are_taken_as_people_write_them(given, seen):
    assert merge(given, {}) == seen


def test_snapshot_every_is_in_steps_or_minutes():
    for value, steps, seconds in (
        ("500", 500, None),
        ("10min", None, 600.0),
        (" 2 min ", None, 120.0),
        (None, None, None),
    ):
        config = Config(snapshot_every=value)
        assert (config.snapshot_steps, config.snapshot_seconds) == (steps, seconds)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({"lane": 4}, {}, "lane is no option of samestep; did you mean lanes?"),
        (
            {},
            {"SAMESTEP_SNAPSHOT_EVRY": "5"},
            "SAMESTEP_SNAPSHOT_EVRY is no option of samestep; did you mean snapshot_every?",
        ),
        ({"xyz": 4}, {}, "xyz is no option of samestep; options are lanes, seed, dir"),
        (
            {"precision": "bfloat"},
            {},
            "precision='bfloat' was given; expected one of float32, bfloat16; did you mean bfloat16?",
        ),
        ({"device": "gpu"}, {}, "device='gpu' was given; expected one of auto, cpu, cuda"),
        ({"lanes": True}, {}, "lanes=True was given; expected a whole number or none"),
        ({"lanes": 0}, {}, "lanes=0 was given; expected at least 1"),
        ({"deterministic": 1}, {}, "deterministic=1 was given; expected true or false"),
        ({"dir": 3}, {}, "dir=3 was given; expected a path or none"),
        (
            {},
            {"SAMESTEP_LANES": "eight"},
            "SAMESTEP_LANES='eight' was given; expected a whole number or none",
        ),
        ({}, {"SAMESTEP_TIMEOUT": "long"}, "SAMESTEP_TIMEOUT='long' was given; expected a number"),
        ({"devices": 0}, {}, "devices=0 was given; expected at least 1"),
        ({"devices": 1001}, {}, "devices=1001 was given; expected at most 1000"),
        (
            {"devices": ["cpu", "cuda:0"]},
            {},
            "devices=cpu,cuda:0 was given; expected a number, or names of one kind such as",
        ),
        (
            {"devices": ["cpu", "gpu"]},
            {},
            "devices=cpu,gpu was given; expected a number, or names of one kind such as",
        ),
        (
            {"devices": []},
            {},
            "devices= was given; expected a number, or names of one kind such as",
        ),
        (
            {"devices": ["cpu"], "device": "cuda"},
            {},
            "devices=cpu was given with device='cuda'; give one of the two",
        ),
        (
            {},
            {"SAMESTEP_DEVICES": "cuda:0,"},
            "devices=cuda:0, was given; expected a number, or names of one kind such as",
        ),
        (
            {"remote": "bucket/run", "dir": "runs"},
            {},
            "remote='bucket/run' was given; expected a URL such as s3://bucket/runs/one",
        ),
        (
            {"remote": "s3://bucket/run"},
            {},
            "remote='s3://bucket/run' was given; expected a dir with it, where snapshots are first",
        ),
        (
            {"resume": "s3://bucket/run/step-00000100"},
            {},
            "resume='s3://bucket/run/step-00000100' was given; expected a dir with it",
        ),
        (
            {"transfer": "my.module", "dir": "runs"},
            {},
            "transfer='my.module' was given; expected module:function",
        ),
        (
            {"transfer": "my.module:send"},
            {},
            "transfer='my.module:send' was given; expected a dir with it",
        ),
        (
            {"sinks": ["tensorbord"], "dir": "runs"},
            {},
            "sinks='tensorbord' was given; expected a URL, tensorboard, mlflow, wandb or",
        ),
        (
            {"sinks": "wandb,mlflow"},
            {},
            "sinks='wandb,mlflow' was given; expected a dir with it, where the record is first",
        ),
        (
            {},
            {"SAMESTEP_SINKS": "wandb,"},
            "sinks='' was given; expected a URL, tensorboard, mlflow, wandb or module:Class",
        ),
        (
            {"snapshot_every": "10 hours"},
            {},
            "snapshot_every='10 hours' was given; expected steps such as",
        ),
        (
            {"hot_every": 0},
            {},
            "hot_every='0' was given; expected steps such as \"100\", auto or none",
        ),
    ],
)
def test_a_wrong_option_is_named_with_what_to_do(arguments, environment, message):
    with pytest.raises(ConfigError) as caught:
        merge(arguments, environment)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ValueError)


def test_every_option_says_what_it_does_and_none_can_be_changed():
    assert all(field.metadata["description"] for field in fields(Config))
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.lanes = 3
    assert replace(config, lanes=3) == Config(lanes=3)
