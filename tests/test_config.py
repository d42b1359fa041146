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
    """Check that a run can use every value."""
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
    assert config.system_every is None or 0 < config.system_every <= 10**9
    assert config.remote is None or (is_url(config.remote) and config.dir is not None)
    assert config.transfer is None or ({":", "."} & set(config.transfer) and config.dir is not None)
    assert not config.sinks or config.dir is not None
    assert config.precision in {"float32", "bfloat16", "float16"}
    assert config.exchange_dtype in {None, "bfloat16"}
    assert config.device in {"auto", "cpu", "cuda"}
    assert config.nonfinite_loss in {"stop", "skip", "continue"}
    assert config.snapshot_steps is None or config.snapshot_steps >= 1
    assert config.snapshot_seconds is None or 60 <= config.snapshot_seconds < math.inf


def is_used_or_an_error(name, arguments, environment):
    try:
        config = merge(arguments, environment)
    except ConfigError as error:
        message = str(error)
        return name in message.lower() and ("must be" in message or "requires dir" in message)
    is_usable(config)
    return True


@given(st.sampled_from(NAMES), VALUES)
@example("timeout", 10**400)
@example("timeout", math.inf)
@example("system_every", math.nan)
@example("system_every", 0)
@example("snapshot_every", "9" * 5000)
@example("snapshot_every", "9" * 400 + "min")
@example("snapshot_every", 0)
@example("seed", 2**63)
def test_any_argument_is_used_or_an_error_with_its_name(name, value):
    assert is_used_or_an_error(name, {name: value}, {})


@given(st.sampled_from(NAMES), VALUES.map(str))
@example("timeout", "1e999")
@example("timeout", "nan")
@example("seed", "9" * 5000)
def test_any_variable_is_used_or_an_error_with_its_name(name, text):
    assert is_used_or_an_error(name, {}, {PREFIX + name.upper(): text})


def test_the_environment_overrides_arguments_and_arguments_override_defaults():
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hot_every", "none"),
        ("snapshot_every", "none"),
        ("lanes", "8"),
        ("lanes", "none"),
        ("deterministic", "false"),
        ("timeout", "1.5"),
        ("check_every", "none"),
        ("devices", "2"),
        ("devices", "cpu,cpu"),
        ("dir", "runs/one"),
    ],
)
def test_texts_mean_the_same_from_code_and_from_the_environment(name, text):
    assert merge({name: text}, {}) == merge({}, {PREFIX + name.upper(): text})


def test_a_launcher_s_options_may_need_a_dir_that_the_script_sets():
    options = {"remote": "s3://bucket/run", "sinks": "wandb", "transfer": "my.module:send"}
    assert merge(options, {}, is_complete=False).remote == "s3://bucket/run"
    variables = {PREFIX + name.upper(): text for name, text in options.items()}
    assert merge({"dir": "runs"}, variables).sinks == ("wandb",)


def test_variables_of_this_process_are_read(monkeypatch):
    monkeypatch.setenv("SAMESTEP_SEED", "12")
    assert merge({"seed": 1}).seed == 12


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"snapshot_every": 500}, Config(snapshot_every="500")),
        ({"snapshot_every": " 2 min "}, Config(snapshot_every=" 2 min ")),
        ({"hot_every": 100}, Config(hot_every="100")),
        ({"resume": Path("runs/one/step-00000005")}, Config(resume="runs/one/step-00000005")),
        ({"dir": "runs"}, Config(dir=Path("runs"))),
        ({"timeout": 3}, Config(timeout=3.0)),
    ],
)
def test_values_are_converted(arguments, config):
    assert merge(arguments, {}) == config


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
        ({"lane": 4}, {}, "lane is not an option of samestep; did you mean lanes?"),
        (
            {},
            {"SAMESTEP_SNAPSHOT_EVRY": "5"},
            "SAMESTEP_SNAPSHOT_EVRY is not an option of samestep; did you mean snapshot_every?",
        ),
        ({"xyz": 4}, {}, "xyz is not an option of samestep; the options are lanes, seed, dir"),
        (
            {"precision": "bfloat"},
            {},
            (
                "precision must be one of float32, bfloat16, float16, got 'bfloat'; "
                "did you mean bfloat16?"
            ),
        ),
        (
            {"exchange_dtype": "float16"},
            {},
            "exchange_dtype must be bfloat16 or none, got 'float16'; did you mean bfloat16?",
        ),
        ({"exchange_dtype": 16}, {}, "exchange_dtype must be text or none, got 16"),
        (
            {"device": "gpu"},
            {},
            "device must be one of auto, cpu, cuda, got 'gpu'; did you mean cuda?",
        ),
        ({"lanes": True}, {}, "lanes must be an integer or none, got True"),
        ({"lanes": 0}, {}, "lanes must be at least 1, got 0"),
        ({"graphs": "auto"}, {}, "graphs must be on or off, got 'auto'"),
        ({"deterministic": 1}, {}, "deterministic must be true or false, got 1"),
        ({"dir": 3}, {}, "dir must be a path or none, got 3"),
        (
            {},
            {"SAMESTEP_LANES": "eight"},
            "SAMESTEP_LANES must be an integer or none, got 'eight'",
        ),
        ({}, {"SAMESTEP_TIMEOUT": "long"}, "SAMESTEP_TIMEOUT must be a number, got 'long'"),
        ({"devices": 0}, {}, "devices must be at least 1, got 0"),
        ({"devices": 1001}, {}, "devices must be at most 1000, got 1001"),
        (
            {"devices": ["cpu", "cuda:0"]},
            {},
            "devices must be a number, or names of one kind such as",
        ),
        (
            {"devices": ["cpu", "gpu"]},
            {},
            "devices must be a number, or names of one kind such as",
        ),
        (
            {"devices": []},
            {},
            "devices must be a number, or names of one kind such as",
        ),
        (
            {"devices": ["cpu"], "device": "cuda"},
            {},
            "devices=cpu requires device=cpu or auto, got 'cuda'",
        ),
        (
            {},
            {"SAMESTEP_DEVICES": "cuda:0,"},
            "devices must be a number, or names of one kind such as",
        ),
        (
            {"remote": "bucket/run", "dir": "runs"},
            {},
            "remote must be a URL such as s3://bucket/runs/one, got 'bucket/run'",
        ),
        (
            {"remote": "s3://bucket/run"},
            {},
            "remote='s3://bucket/run' requires dir, where snapshots are saved first",
        ),
        (
            {"resume": "s3://bucket/run/step-00000100"},
            {},
            "resume='s3://bucket/run/step-00000100' requires dir, where snapshots are saved first",
        ),
        (
            {"transfer": "send", "dir": "runs"},
            {},
            "transfer must be module:function, got 'send'",
        ),
        (
            {"transfer": "my.module:send"},
            {},
            "transfer='my.module:send' requires dir, where snapshots are saved first",
        ),
        (
            {"sinks": ["tensorbord"], "dir": "runs"},
            {},
            "sinks must be a URL, tensorboard, mlflow, wandb or module:Class, got 'tensorbord'",
        ),
        (
            {"sinks": "wandb,mlflow"},
            {},
            "sinks='wandb,mlflow' requires dir, where the record is written first",
        ),
        (
            {},
            {"SAMESTEP_SINKS": "wandb,"},
            "sinks must be a URL, tensorboard, mlflow, wandb or module:Class, got ''",
        ),
        (
            {"snapshot_every": "10 hours"},
            {},
            "snapshot_every must be steps such as",
        ),
        (
            {"hot_every": 0},
            {},
            "hot_every must be steps such as \"100\", auto or none, got '0'",
        ),
    ],
)
def test_an_invalid_option_is_an_error(arguments, environment, message):
    with pytest.raises(ConfigError) as caught:
        merge(arguments, environment)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ValueError)


def test_every_option_has_a_description_and_is_frozen():
    assert all(field.metadata["description"] for field in fields(Config))
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.lanes = 3
    assert replace(config, lanes=3) == Config(lanes=3)
