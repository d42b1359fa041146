from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from recipes.detect.coco import AnnotationError
from recipes.pretrained import PretrainedError
from recipes.settings import (
    SETTINGS_FILE,
    RunSettings,
    SettingsError,
    parser,
    read,
    run_script,
    run_settings,
    setting,
    write_run_settings,
    write_settings,
)
from recipes.stain.data import StripError
from recipes.vit.data import ImageError
from samestep.errors import ConfigError, DataError, LoaderError, RecordError, SnapshotError


@dataclass(frozen=True)
class Inner:
    rate: float = setting(0.5, "a rate")
    shape: tuple[int, ...] = setting((1, 2), "a shape")
    kind: Literal["fast", "slow"] = setting("fast", "a kind")


@dataclass(frozen=True)
class Outer:
    steps: int = setting(10, "how many")
    limit: float | None = setting(None, "a limit")
    loud: bool = setting(False, "a switch")
    title: str = setting("none", "a title")
    folder: Path | None = setting(None, "a folder")
    folders: dict[str, Path] | None = setting(None, "folders by name")
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)


KEYS = {
    "steps": 3,
    "limit": 0.25,
    "loud": True,
    "title": "17",
    "folder": Path("a/b"),
    "folders": {"one": Path("a"), "two": Path("b")},
    **{
        f"{section}.{name}": value
        for section in ("inner", "other")
        for name, value in (("rate", 2.0), ("shape", (3,)), ("kind", "slow"))
    },
}

floats = st.floats(allow_nan=False)
inners = st.builds(
    Inner,
    rate=floats,
    shape=st.lists(st.integers()).map(tuple),
    kind=st.sampled_from(["fast", "slow"]),
)
outers = st.builds(
    Outer,
    steps=st.integers(),
    limit=st.none() | floats,
    loud=st.booleans(),
    title=st.text().filter(lambda text: "$" not in text and text != "???"),  # OmegaConf's
    folder=st.none()
    | st.from_regex(r"[a-z0-9. /-]+", fullmatch=True)
    .map(Path)
    .filter(lambda path: str(path) not in {"none", "null"}),
    inner=inners,
    other=inners,
)


def value_of(settings, key):
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def plain(value):
    return (
        str(value)
        if isinstance(value, Path)
        else {name: str(path) for name, path in value.items()}
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, tuple)
        else value
    )


def write(path, content):
    path.write_text(yaml.safe_dump(content))
    return str(path)


@given(settings=outers)
def test_written_settings_are_read_back_equal(settings, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    write_settings(folder, settings)

    assert read(Outer, [str(folder / SETTINGS_FILE)]) == settings


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_set_in_a_file_or_an_argument_alone(key, tmp_path):
    in_file = read(Outer, [write(tmp_path / "a.yaml", nested(key, plain(KEYS[key])))])
    in_argument = read(Outer, [f"{key}={plain(KEYS[key])}"])

    assert in_file == in_argument
    assert value_of(in_file, key) == KEYS[key]
    assert {other for other in KEYS if value_of(in_file, other) != value_of(Outer(), other)} == {
        key
    }


@given(layers=st.sets(st.sampled_from(["grand base", "base", "file", "argument"])))
def test_the_nearest_layer_wins(layers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    values = {"grand base": 1, "base": 2, "file": 3, "argument": 4}
    chain = {
        "grand base": {},
        "base": {"base": "../layers/grand base.yaml"},
        "file": {"base": "base.yaml"},
    }
    (folder / "layers").mkdir()
    for layer, content in chain.items():
        layer_values = {"steps": values[layer]} if layer in layers else {}
        write(folder / "layers" / f"{layer}.yaml", content | layer_values | {"inner": {"rate": 7}})
    arguments = ["steps=4"] if "argument" in layers else []

    # arguments win wherever they stand
    settings = read(Outer, [*arguments, str(folder / "layers" / "file.yaml")])

    assert settings.steps == max((values[layer] for layer in layers), default=10)
    assert settings.inner == Inner(rate=7.0)


@given(key=st.sampled_from(sorted(KEYS)), data=st.data())
def test_a_misspelt_key_is_named_with_its_source_and_the_right_one(key, data, tmp_path_factory):
    start = key.rfind(".") + 1
    at = data.draw(st.integers(start, len(key) - 1))
    wrong = key[:at] + "x" + key[at:]
    file = write(tmp_path_factory.getbasetemp() / "wrong.yaml", nested(wrong, 1))

    for source, given_text in ((f"{wrong}=1", f"{wrong}=1"), (file, file)):
        with pytest.raises(SettingsError) as caught:
            read(Outer, [given_text])
        assert source in str(caught.value)
        assert f"unknown setting {wrong}; did you mean {key}?" in str(caught.value)


def test_named_values_replace_those_of_a_file(tmp_path):
    file = write(tmp_path / "a.yaml", {"folders": {"one": "a", "two": "b"}})
    assert read(Outer, [file, "folders={one: c}"]).folders == {"one": Path("c")}
    with pytest.raises(SettingsError, match=r"expected dict\[str, Path\] \| None for folders"):
        read(Outer, ["folders=a"])


def test_a_key_without_its_section_finds_the_section():
    with pytest.raises(SettingsError, match=r"unknown setting rate; did you mean inner\.rate\?"):
        read(Outer, ["rate=3"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps=1.5", "expected int for steps"),
        ("steps=true", "expected int for steps"),
        ("steps=none", "expected int for steps"),
        ("loud=loudly", "expected bool for loud"),
        ("limit=high", "expected float | None for limit"),
        ("inner.shape=[1, a]", "expected tuple[int, ...] for inner.shape"),
        ("inner.shape=[1, ", "expected tuple[int, ...] for inner.shape"),
        ("inner.kind=fats", "expected one of ['fast', 'slow'] for inner.kind; did you mean fast?"),
        (
            "inner=3",
            "unknown setting inner; it is a section with inner.rate, inner.shape, inner.kind",
        ),
        ("steps", "expected a file that ends in .yaml or key=value"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(text, expected):
    with pytest.raises(SettingsError) as caught:
        read(Outer, [text])
    assert text in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"steps": "three"},
        {"loud": "yes please"},
        {"limit": [1]},
        {"inner": 3},
        {"inner": {"kind": 1}},
        [1],
        {3: 4},
    ],
)
def test_a_wrong_value_in_a_file_is_named_with_the_file(content, tmp_path):
    file = write(tmp_path / "wrong.yaml", content)
    with pytest.raises(SettingsError) as caught:
        read(Outer, [file])
    assert file in str(caught.value)
    assert any(
        str(key) in str(caught.value) for key in (content if isinstance(content, dict) else "1")
    )


@pytest.mark.parametrize(
    "value", ["${steps}", f"{'a' * 40}${{oc.env:HOME}}{'b' * 40}", ["${steps}"]]
)
def test_a_reference_is_refused_in_a_file_and_in_an_argument(value, tmp_path):
    key = "title" if isinstance(value, str) else "inner.shape"
    file = write(tmp_path / "a.yaml", nested(key, value))
    for source in (file, f"{key}={value}"):
        with pytest.raises(SettingsError, match=rf"{key}=.*references such as .* not supported"):
            read(Outer, [source])


@pytest.mark.parametrize(
    ("word", "meant"), [("true", True), ("yes", True), ("off", False), ("false", False)]
)
def test_a_switch_takes_the_words_of_yaml(word, meant):
    assert read(Outer, [f"loud={word}"]).loud is meant


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    (tmp_path / "a.yaml").write_text("limit: 1e-3\ninner: {rate: .inf}\n")

    settings = read(Outer, [str(tmp_path / "a.yaml"), "other.rate=5e2"])

    assert (settings.limit, settings.inner.rate, settings.other.rate) == (1e-3, math.inf, 500.0)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_base_files_that_form_a_cycle_are_an_error(length, tmp_path):
    for number in range(length):
        write(tmp_path / f"{number}.yaml", {"base": f"{(number + 1) % length}.yaml"})
    with pytest.raises(SettingsError, match=r"cycle: .*0\.yaml -> .*0\.yaml"):
        read(Outer, [str(tmp_path / "0.yaml")])


def test_a_file_that_is_missing_or_not_yaml_is_named(tmp_path):
    (tmp_path / "torn.yaml").write_text("steps: [1,")
    for name, fault in (("missing", "does not exist"), ("torn", "cannot be read as YAML")):
        with pytest.raises(SettingsError, match=f"{name}.yaml {fault}"):
            read(Outer, [str(tmp_path / f"{name}.yaml")])
    base = r"missing\.yaml, the base of .*a\.yaml, does not exist"
    with pytest.raises(SettingsError, match=base):
        read(Outer, [write(tmp_path / "a.yaml", {"base": "missing.yaml"})])


def test_settings_of_a_run_are_fetched_from_its_remote_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_REMOTE", (tmp_path / "remote").as_uri())
    write_settings(tmp_path / "run", Outer(steps=3))
    assert read(Outer, [run_settings(tmp_path / "elsewhere")]) == Outer(steps=3)
    monkeypatch.delenv("SAMESTEP_REMOTE")
    assert run_settings(tmp_path / "elsewhere") == str(tmp_path / "elsewhere" / SETTINGS_FILE)
    with pytest.raises(SettingsError, match=r"the --dir of a run, and .* does not exist"):
        run_settings(tmp_path / "none")


@dataclass(frozen=True)
class Classes:
    class_names: tuple[str, ...] | None = setting(None, "names")


@dataclass(frozen=True)
class Named(RunSettings):
    data: Classes = field(default_factory=Classes)


@pytest.mark.parametrize(
    ("step", "before", "after", "is_refused"),
    [
        (3, ["cat", "dog"], ("dog", "cat"), True),
        (3, ["cat", "dog"], ("cat", "dog"), False),
        (3, None, ("dog", "cat"), False),
        (0, ["cat", "dog"], ("dog", "cat"), False),
    ],
)
def test_a_run_that_resumes_keeps_the_order_of_its_classes(
    step, before, after, is_refused, tmp_path
):
    write(tmp_path / SETTINGS_FILE, {"data": {"class_names": before}})
    config = SimpleNamespace(precision="float32", seed=0)
    run = SimpleNamespace(is_main=True, dir=tmp_path, step=step, config=config, lanes=2)
    refused = pytest.raises(SettingsError, match=r"class_names must be \['cat', 'dog'\], as in .*")
    with refused if is_refused else nullcontext():
        write_run_settings(run, Named(data=Classes(after)))
    names = before if is_refused else list(after)
    assert yaml.safe_load((tmp_path / SETTINGS_FILE).read_text())["data"]["class_names"] == names


def test_the_record_has_the_settings_without_what_the_run_decides():
    assert Named(lanes=3, data=Classes(("cat",))).recorded() == {"data": {}}


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert read(Outer, [str(tmp_path / "empty.yaml")]) == Outer()


def test_results_need_a_directory_before_the_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        parser(Outer, "").check_output(tmp_path / "file")
    assert "File exists: " in (said := capsys.readouterr().err)
    assert "choose a directory for the results with --out DIR" in said
    parser(Outer, "").check_output(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_setting_may_be_a_settings_file(tmp_path):
    assert read(Outer, [f"folder={tmp_path / 'a.yaml'}"]).folder == tmp_path / "a.yaml"


def test_help_lists_every_setting_with_default_type_and_description():
    help_text = parser(Outer, "A test.").format_help()

    for key in KEYS:
        assert f"  {key}=" in help_text
    assert "steps=10\n      how many (int)" in help_text
    assert "limit=none\n      a limit (float | None)" in help_text
    assert "inner.shape=[1, 2]\n      a shape (tuple[int, ...])" in help_text
    assert "inner.kind=fast\n      a kind (one of ['fast', 'slow'])" in help_text


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_help_and_argument_errors_are_printed_by_rank_0_only(rank, printed, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    for arguments in (["--help"], ["--unknown"]):
        with pytest.raises(SystemExit):
            parser(Outer, "Do something.").parse_args(arguments)
        assert any(capsys.readouterr()) is printed


@pytest.mark.parametrize("arguments", [["--dir", "runs/two"], []])
def test_a_dir_of_samestep_run_is_the_recipe_s(arguments, monkeypatch):
    monkeypatch.setenv("SAMESTEP_DIR", "runs/one")
    parsed = parser(Outer, "Do something.").parse_intermixed_args(["steps=3", *arguments])
    assert (parsed.dir, parsed.settings) == (Path("runs/one"), ["steps=3"])


@dataclass(frozen=True)
class WithRate(Outer):
    learning_rate: float = setting(1.0, "a rate")


@pytest.mark.parametrize("key", ["lr", "inner.lr", "learning-rate"])
def test_a_setting_is_suggested_for_what_other_programs_call_it(key):
    with pytest.raises(SettingsError, match="did you mean learning_rate"):
        read(WithRate, [f"{key}=3"])


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--steps", "3"], "--steps is no flag, but a setting; write steps=3"),
        (["-step=3"], "-step is no flag, but a setting; write steps=3"),
        (["--loud", "--dir", "x"], "--loud is no flag, but a setting; write loud=true"),
        (["--Inner.Rate", "steps=3"], "--Inner.Rate is no flag, but a setting; write inner.rate=…"),
        (["--lr", "3"], "--lr is no flag, but a setting; write learning_rate=3"),
        (["--gpus", "0"], "unrecognized arguments: --gpus"),
    ],
)
def test_a_setting_that_is_written_as_a_flag_is_said_in_the_form_to_write(words, instead, capsys):
    with pytest.raises(SystemExit):
        parser(WithRate, "").parse_intermixed_args(words)
    assert instead in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_the_rank_that_launchers_pass_is_accepted_from_them_alone(flag, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parser(Outer, "Do something.").parse_intermixed_args([flag])
    assert "--local-rank is for launchers, which also set LOCAL_RANK" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    parsed = parser(Outer, "Do something.").parse_intermixed_args([flag, "steps=3"])
    assert (parsed.dir, parsed.settings) == (None, ["steps=3"])


@pytest.mark.parametrize("error", [AnnotationError, ImageError, PretrainedError, StripError])
def test_errors_of_data_and_pretrained_files_are_one_line(error):
    def fail():
        raise error("a.json: no images")

    with pytest.raises(SystemExit, match=r"^a.json: no images$"):
        run_script(fail)


def test_an_error_of_a_data_set_keeps_its_traceback_unless_it_is_of_the_data():
    def fail(cause):
        raise LoaderError("loading lane 0 of step 1 failed") from cause

    with pytest.raises(SystemExit, match=r"^a.png cannot be read$"):
        run_script(lambda: fail(ImageError("a.png cannot be read")))
    with pytest.raises(LoaderError):
        run_script(lambda: fail(KeyError("a")))


@pytest.mark.parametrize("error", [ConfigError, DataError, RecordError, SnapshotError])
def test_what_samestep_refuses_of_its_user_is_one_line(error):
    def fail():
        raise error("lanes must be at least 1, got 0")

    with pytest.raises(SystemExit, match=r"^lanes must be at least 1, got 0$"):
        run_script(fail)


@dataclass(frozen=True)
class Limited:
    parts: tuple[int, ...] = setting((1, 2), "numbers", least=1)
    rate: float | None = setting(None, "a rate", above=0, most=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parts=[3, 0]", r"parts must be at least 1, got \(3, 0\)"),
        ("rate=0", r"rate must be above 0, got 0\.0"),
        ("rate=1.5", r"rate must be at most 1, got 1\.5"),
        ("rate=.nan", "rate must be above 0, got nan"),
    ],
)
def test_numbers_have_limits(text, message):
    assert read(Limited, ["parts=[]", "rate=1"]) == Limited(parts=(), rate=1.0)
    with pytest.raises(SettingsError, match=f"^{message}$"):
        read(Limited, [text])


def test_a_wrong_setting_ends_a_script_with_its_message_only():
    with pytest.raises(SystemExit, match=r"^setps=3: unknown setting setps; did you mean steps\?$"):
        run_script(lambda: read(Outer, ["setps=3"]))
