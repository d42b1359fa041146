from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest

from samestep import cli
from samestep.config import Config
from samestep.errors import ConfigError, SnapshotError
from samestep.launch import local as command
from samestep.record.events import samestep_version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
HELP_WITHOUT_TORCH = """
import sys
from contextlib import suppress
from samestep.cli import COMMANDS, main
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
    with suppress(SystemExit):
        main(arguments)
    assert "torch" not in sys.modules, arguments
for line in sys.stdin.read().splitlines():
    try:
        assert main(line.split()) != 0, line
    except SystemExit as error:
        assert error.code, line
    assert "torch" not in sys.modules, line
"""
WRONG_USE = """\
none
run --unknown
run --unknown 1 {script}
run --lanes x {script}
run -n 0 {script}
run none.py
verify
verify --steps 0 {script}
verify -n x {script}
verify none.py
replay
replay none --step 3 {script}
replay {folder} --step 3 {script}
replay {folder} --step 3 none.py
snapshots
snapshots list
snapshots check none
snapshots export {folder}
scale --unknown {script}
scale -n x {script}
scale none.py
watch
watch none
report none
doctor --unknown
doctor -n 0
submit
submit slurm {script}
examples --unknown
"""


def exit_status(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code


@pytest.fixture
def runs(monkeypatch):
    """Collect the arguments of scripts instead of running them."""
    collected = []
    monkeypatch.setattr(
        command, "run_script", lambda *arguments, **named: collected.append((*arguments, named))
    )
    return collected


def test_help_and_answers_to_wrong_use_do_not_load_torch(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    wrong = WRONG_USE.format(script=script, folder=tmp_path)
    command = [sys.executable, "-c", HELP_WITHOUT_TORCH]
    completed = subprocess.run(command, input=wrong, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("usage: samestep") == 1 + len(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_every_command_starts_with_its_summary(name, capsys):
    assert exit_status(name, "--help") == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert help_text.startswith(f"usage: samestep {name}")
    assert cli.COMMANDS[name].summary[1:] in help_text


def test_run_has_a_flag_for_every_option(runs):
    text = {
        "lanes": "8",
        "dir": "runs/one",
        "deterministic": "false",
        "timeout": "2.5",
        "snapshot_every": "none",
    }
    flags = [
        part
        for option in fields(Config)
        for part in ("--" + option.name.replace("_", "-"), text.get(option.name, "1"))
    ]
    assert cli.main(["run", *flags, "train.py"]) == 0
    options = runs[0][3]
    assert options.keys() == {option.name for option in fields(Config)}
    assert [options[name] for name in text] == [8, Path("runs/one"), False, 2.5, None]


def test_arguments_after_the_script_belong_to_it(runs):
    assert (
        cli.main(
            ["run", "-n", "2", "--lanes", "8", "train.py", "--lanes", "3", "-n", "5", "--", "x"]
        )
        == 0
    )
    assert runs == [
        (
            "train.py",
            ["--lanes", "3", "-n", "5", "--", "x"],
            2,
            {"lanes": 8},
            {"as_module": False, "spec": None},
        )
    ]


def test_a_module_can_be_run(runs):
    cli.main(["run", "-m", "recipes.vit", "--help"])
    assert runs == [("recipes.vit", ["--help"], 1, {}, {"as_module": True, "spec": None})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "unknown command 'rum'"),
        (["run"], "arguments are required: script"),
        (["run", "--lane", "8", "train.py"], "unrecognized arguments: --lane"),
        (["run", "-n", "two", "train.py"], "expected a number or auto, got 'two'"),
    ],
)
def test_wrong_use_is_an_error(arguments, message, capsys):
    assert exit_status(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["--lanes", "many", "train.py"],
            2,
            "samestep: error: --lanes must be an integer or none, got 'many'",
        ),
        (["no-such-script.py"], 2, "samestep: error: script 'no-such-script.py' does not exist"),
        (["-n", "0", cli.__file__], 2, "samestep: error: workers must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line_with_a_status(arguments, status, message, capfd):
    assert cli.main(["run", *arguments]) == status
    printed = capfd.readouterr().err
    assert printed.startswith(message)
    assert printed.count("\n") == 1


def test_the_first_failure_of_a_run_is_printed_once(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('lost')")
    assert cli.main(["run", "-n", "2", str(script)]) == 1
    printed = capfd.readouterr().err
    assert printed.startswith("samestep: error: worker ")
    assert printed.count("Traceback") == 1


@pytest.mark.parametrize(
    ("error", "status"), [(SnapshotError("torn"), 1), (KeyboardInterrupt(), 130)]
)
def test_every_command_has_the_same_exit_statuses(monkeypatch, capsys, error, status):
    def fail(_):
        raise error

    monkeypatch.setattr(command, "main", fail)
    assert cli.main(["run", "train.py"]) == status
    assert capsys.readouterr().err.startswith("samestep: ")  # Ctrl-C is not silent either


def test_an_installed_version_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "version", lambda name: f"1.2.3 of {name}")
    samestep_version.cache_clear()
    assert exit_status("--version") == 0
    samestep_version.cache_clear()
    assert capsys.readouterr().out == "samestep 1.2.3 of samestep\n"


def test_python_m_samestep_is_samestep():
    completed = subprocess.run(
        [sys.executable, "-m", "samestep", "--help"], capture_output=True, text=True, check=True
    )
    assert completed.stdout.startswith("usage: samestep ")


def test_an_exit_status_needs_no_streams():
    program = (
        "import sys; sys.stdout = sys.stderr = None; "
        "from samestep.cli import main_and_exit; main_and_exit()"
    )
    arguments = [sys.executable, "-c", program, "snapshots", "/nowhere"]
    assert subprocess.run(arguments, check=False).returncode == ConfigError.status


@pytest.mark.parametrize(
    ("seed", "tunables"),
    [
        pytest.param(None, None, marks=pytest.mark.long),
        pytest.param(None, "", marks=pytest.mark.long),
        pytest.param(None, "glibc.malloc.tcache_count=3", marks=pytest.mark.long),
        ("7", "glibc.malloc.tcache_count=3"),
    ],
)
def test_a_run_has_the_same_hashes_of_strings_every_time_and_settings_of_malloc(
    seed, tunables, tmp_path
):
    """Few small blocks are kept, so that they do not settle between large gradients."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(hash('samestep'), os.environ['GLIBC_TUNABLES'])")
    user_variables = {"PYTHONHASHSEED": seed, "GLIBC_TUNABLES": tunables}
    others = {name: value for name, value in os.environ.items() if name not in user_variables}
    environment = {name: value for name, value in user_variables.items() if value is not None}
    expected = {
        "PYTHONHASHSEED": seed or "0",
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=2" if tunables is None else tunables,
    }

    def printed(*arguments, **variables):
        return subprocess.run(
            [sys.executable, *arguments, script],
            env={**others, **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert printed("-m", "samestep", "run", **environment) == printed(**expected)


def test_samestep_alone_prints_help(capsys):
    assert cli.main([]) == 0
    alone = capsys.readouterr().out
    assert cli.main(["help"]) == 0
    assert alone == capsys.readouterr().out
    assert "commands:\n" in alone
    assert "\n  run " in alone


def test_help_of_a_command(capsys):
    assert exit_status("help", "watch") == 0
    assert capsys.readouterr().out.startswith("usage: samestep watch")


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["rum"], "unknown command 'rum'; did you mean run?"),
        (["help", "snapshot"], "did you mean snapshots?"),
        (["xyz"], "unknown command 'xyz'\n"),
        (["run", "--max-restart", "3", "train.py"], "did you mean --max-restarts?"),
        (["watch", "--prot", "1"], "did you mean --port?"),
        (["run", "--n", "2", "train.py"], "unrecognized arguments: --n\n"),
        (["doctor", "--xyz"], "unrecognized arguments: --xyz\n"),
    ],
)
def test_misspelled_commands_and_flags_get_a_suggestion(arguments, suggestion, capsys):
    assert exit_status(*arguments) == 2
    assert suggestion in capsys.readouterr().err


def test_ctrl_c_while_python_starts_again_is_one_line():
    code = """
import os, signal
from samestep.cli import main_and_exit

def interrupted(*arguments, execv=os.execv):
    signal.raise_signal(signal.SIGINT)
    execv(*arguments)

os.execv = interrupted  # sets PYTHONHASHSEED
main_and_exit()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", code, "run", "train.py"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr == "samestep: run was interrupted\n"
    assert ended.returncode == cli.EXIT_INTERRUPTED


@pytest.mark.long
def test_an_old_torch_is_named_with_what_is_needed():
    bound = re.search(r'"torch>=([\d.]+)"', PYPROJECT.read_text())[1]
    for version, is_old in (("2.5.1", True), (bound, False), ("2.13.0+cpu", False)):
        code = f"import torch; torch.__version__ = torch.torch_version.TorchVersion({version!r})"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; import samestep; samestep.init"],
            capture_output=True,
            text=True,
            check=False,
        )
        message = f"samestep needs PyTorch {bound} or newer, got {version}"
        assert (message in done.stderr) == (done.returncode != 0) == is_old


@pytest.mark.long
def test_an_old_torch_is_one_line_of_a_command(tmp_path):
    (tmp_path / "train.py").touch()
    code = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.5.1')"
    code += f"; from samestep.cli import main; exit(main(['run', {str(tmp_path / 'train.py')!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert line.startswith("samestep: error: samestep needs PyTorch 2.")
    assert done.returncode == ConfigError.status
