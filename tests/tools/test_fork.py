"""A fork shares the trunk's first steps bit for bit, and its record is complete."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import samestep as ss
from recipes.detect import make_data
from samestep.cli import main
from samestep.record import read_events, read_history
from samestep.record.chain import FILE, ROW_BYTES, Chain
from samestep.tools.fork import trunk_command
from samestep.tools.replay import RecordedRun
from tests.faults import flip_byte
from tests.jobs import fingerprint
from tests.python import run_python
from tests.recipes.atari.test_train import SMALL as SMALL_ATARI
from tests.recipes.detect.small import SMALL as SMALL_DETECT
from tests.recipes.gpt.small import SMALL as SMALL_GPT
from tests.recipes.gpt.small import make_texts
from tests.recipes.stain.strips import SMALL as SMALL_STAIN
from tests.recipes.stain.strips import make_strips
from tests.recipes.vit.test_train import SMALL as SMALL_VIT
from tests.tools import branches
from tests.tools.test_replay import content

SCRIPT = str(Path(branches.__file__))
ARGUMENTS = "shuffled", "1.0"
STEPS = 10


def start(directory, workers, *flags, arguments=ARGUMENTS):
    words = "-m", "samestep", "run", "-n", workers, "--dir", directory, *flags, SCRIPT, *arguments
    run_python(*words, check=True)


def state(directory):
    """Return hashes of what the last snapshot has of tracked objects, and the logged means."""
    snapshot = ss.read_snapshot(directory)
    tracked = {name: own for name, own in snapshot.state.items() if name != "run"}
    return fingerprint(tracked) | means(directory)


def means(directory):
    events = [event for event in read_history(directory) if event["event"] == "scalars"]
    return {f"step {event['step']}": repr(event["values"]) for event in events}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """The directory of a run of 2 workers, with snapshots after 4, 8 and 10 steps."""
    directory = tmp_path_factory.mktemp("runs") / "trunk"
    start(directory, 2, "--snapshot-every", 4)
    return directory


@pytest.fixture
def call(capfd):
    """Return a function that calls a command and returns the exit status and the output."""

    def run(*words):
        status = main([*map(str, words)])
        return status, "".join(capfd.readouterr())

    return run


def test_a_fork_with_nothing_changed_ends_with_the_bits_of_the_trunk(trunk, tmp_path, call):
    before, fork = content(trunk), tmp_path / "new" / "fork"
    flags = "--dir", fork, "--no-start", "-n", 1
    status, printed = call("fork", trunk, "--at", 6, *flags, SCRIPT, *ARGUMENTS)
    assert status == 0, printed
    assert f"repeating 2 steps of {trunk} from step-00000004" in printed
    command = f"samestep run -n 1 --dir {fork} {SCRIPT} {shlex.join(ARGUMENTS)}"
    assert f"to go on: {command}" in printed
    assert [path.name for path in fork.parent.iterdir()] == ["fork"]
    start(fork, 1)
    assert state(fork) == state(trunk)
    assert content(trunk) == before
    (forked,) = [event for event in read_events(fork) if event["event"] == "forked"]
    (begun,) = [event for event in read_events(trunk) if event["event"] == "started"]
    assert (forked["step"], forked["run"], forked["trunk"]) == (6, begun["run"], str(trunk))
    with closing(Chain.open(fork)) as rows, closing(Chain.open(trunk)) as of_trunk:
        rows.check()
        assert [rows[step] for step in range(STEPS)] == [of_trunk[step] for step in range(STEPS)]
        assert rows[5].head.hex() == forked["chain"]


def test_a_fork_at_a_snapshot_becomes_a_run_with_other_arguments(
    trunk, tmp_path, monkeypatch, call
):
    calls = []
    monkeypatch.setattr("os.execv", lambda path, words: calls.append((path, words)))
    fork = tmp_path / "fork"
    words = "fork", trunk, "--at", 8, "--dir", fork, "-n", 3, SCRIPT, "shuffled", "0.5"
    assert "starting, and to go on after a stop: samestep run -n 3" in call(*words)[1]
    ((path, [_, *command]),) = calls
    assert path == sys.executable
    run_python(*command, check=True)
    old, new = means(trunk), means(fork)
    assert [step for step in old if old[step] != new[step]] == ["step 8", "step 9"]
    assert new.keys() == old.keys()
    assert "\nB is a fork of A, from step 8 on\n" in call("compare", trunk, fork)[1]
    assert "\nA is a fork of B, from step 8 on\n" in call("compare", fork, trunk)[1]
    uses = [call("which", run, "--sample", 5)[1].splitlines()[-1] for run in (trunk, fork)]
    assert uses[0].endswith("start 1 (the first), 2 workers")
    assert uses[1].endswith("start 1 of trunk (the first), 2 workers")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"at": 11}, "--at must be a step from 1 to 10, as in the record, got 11"),
        ({"at": 0}, "--at must be a step from 1 to 10, as in the record, got 0"),
        ({"at": -3}, "--at must be a step from 1 to 10, as in the record, got -3"),
        ({"flags": ["--lanes", "8"]}, "--lanes must be 4, as in .*, got 8: it is fixed"),
        ({"flags": ["--seed", "1"]}, "--seed must be 0, as in .*, got 1: it is fixed"),
        ({"flags": ["--resume", "never"]}, "--resume is none of a new run; leave it out"),
        ({"flags": ["-n", "5"]}, "-n must be from 1 to the 4 lanes, got 5"),
        ({"flags": ["-n", "0"]}, "-n must be from 1 to the 4 lanes, got 0"),
        ({"run": "none"}, "cannot read a record at .*none"),
        ({"to": "trunk"}, "--dir must be new or empty, and .* is not"),
        ({"to": "trunk/fork"}, "--dir must be outside of .*, where nothing is written"),
        ({"script": "none.py"}, "script 'none.py' does not exist"),
    ],
)
def test_what_cannot_be_forked_is_refused(trunk, capfd, changes, words):
    given = {"at": 6, "flags": [], "run": "trunk", "to": "fork", "script": SCRIPT, **changes}
    run, to = trunk.parent / given["run"], trunk.parent / given["to"]
    flags = "--at", given["at"], "--dir", to, "--no-start", *given["flags"]
    before = content(trunk.parent)
    assert main([*map(str, ("fork", run, *flags, given["script"], *ARGUMENTS))]) in {1, 2}
    printed = capfd.readouterr().err
    assert re.search(words, printed), printed
    assert content(trunk.parent) == before


def test_a_damaged_snapshot_and_another_program_are_noticed(trunk, tmp_path, capfd):
    copy = shutil.copytree(trunk, tmp_path / "trunk")
    files = sorted((copy / "step-00000008").iterdir(), key=lambda path: path.stat().st_size)
    flip_byte(files[-1], -1)
    words = "--at", 8, "--dir", tmp_path / "fork", "--trunk-args", "shuffled 2.0", SCRIPT
    assert main([*map(str, ("fork", copy, *words, *ARGUMENTS))]) == 1
    printed = capfd.readouterr().err
    assert re.search(r"skipped: .*step-00000008", printed), printed
    assert f"repeating 4 steps of {copy} from step-00000004" in printed
    assert "the repeated steps have other bits than those of" in printed
    assert "first at step 4" in printed
    assert "arguments: shuffled 1.0 -> shuffled 2.0" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["trunk"]


def test_a_chain_that_was_cut_is_said_to_begin_anew(trunk, tmp_path, call):
    copy, fork = shutil.copytree(trunk, tmp_path / "trunk"), tmp_path / "fork"
    os.truncate(copy / FILE, 5 * ROW_BYTES)
    words = "--at", 8, "--dir", fork, "--no-start", SCRIPT, *ARGUMENTS
    status, printed = call("fork", copy, *words)
    assert status == 0
    assert "does not reach step 8, where the fork's begins anew" in printed
    assert not (fork / FILE).exists()


def test_another_program_with_the_same_means_is_named(trunk, tmp_path, capfd):
    copy = shutil.copytree(trunk, tmp_path / "trunk")
    path = copy / FILE
    rows = path.read_bytes()
    at = len(rows) - (STEPS - 5) * ROW_BYTES  # of step 5
    path.write_bytes(rows[:at] + bytes(32) + rows[at + 32 : at + ROW_BYTES - 8] + bytes(8))
    words = "--at", 6, "--dir", tmp_path / "fork", "--no-start", SCRIPT, *ARGUMENTS
    assert main([*map(str, ("fork", copy, *words))]) == 1
    printed = capfd.readouterr().err
    assert f"another chain than those of {copy}, first at step 5 in: program; start" in printed


@pytest.mark.long
def test_all_steps_are_repeated_without_a_snapshot(trunk, tmp_path, call):
    copy = shutil.copytree(trunk, tmp_path / "trunk")
    shutil.rmtree(copy / "step-00000004")
    words = "--at", 3, "--dir", tmp_path / "fork", "-n", 2, "--no-start", SCRIPT, *ARGUMENTS
    status, printed = call("fork", copy, *words)
    assert status == 0, printed
    assert f"repeating 3 steps of {copy} from the beginning" in printed
    start(tmp_path / "fork", 2)
    assert state(tmp_path / "fork") == state(trunk)
    # a fork of a fork
    words = "--at", 6, "--dir", tmp_path / "twig", "--no-start", SCRIPT, *ARGUMENTS
    status, printed = call("fork", tmp_path / "fork", *words)
    assert status == 0, printed
    start(tmp_path / "twig", 4)
    assert state(tmp_path / "twig") == state(trunk)
    # a fork whose only change is the rate, beside the fork of the fork
    other = tmp_path / "other"
    words = "--at", 4, "--dir", other, "--no-start", SCRIPT, "shuffled", "0.5"
    assert call("fork", trunk, *words)[0] == 0
    start(other, 1, arguments=("shuffled", "0.5"))
    both = f"both are forks of {trunk.name}, from steps 3 and 4 on"
    assert both in call("compare", tmp_path / "twig", other)[1]


def make_digits(folder):
    """Write a few digits in COCO format; return the setting that names them."""
    make_data.main([str(folder), "--train", "13", "--val", "5"])
    return [f"data.path={folder}"]


def strips(folder):
    """Write strips of tissue; return the setting that names them."""
    return [make_strips(folder)]


# settings of runs of 6 or 8 steps, a function that makes their data, and a learning rate
RECIPES = {
    "vit": (SMALL_VIT, None, "optimizer.learning_rate=0.005"),
    "stain": ([*SMALL_STAIN, "epochs=3"], strips, "optimizer.generator_learning_rate=0.005"),
    "detect": (SMALL_DETECT, make_digits, "optimizer.learning_rate=0.005"),
    "atari": (SMALL_ATARI, None, "optimizer.learning_rate=0.005"),
    "gpt": ([*SMALL_GPT, "steps=6"], make_texts, "optimizer.learning_rate=0.005"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_forks_of_a_recipe(name, tmp_path, call, monkeypatch):
    """A fork with nothing changed, and one with another rate that keeps the first steps."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # this process forks
    settings, make, change = RECIPES[name]
    trunk, same, other, folder = (tmp_path / each for each in ("trunk", "same", "other", "data"))
    module = "-m", f"recipes.{name}.train", *settings, *(make(folder) if make else [])
    run = "-m", "samestep", "run", "-n"
    run_python(*run, 2, "--dir", trunk, "--snapshot-every", 2, *module, check=True)
    for fork, changes in ((same, []), (other, [change])):
        words = "--at", 5, "--dir", fork, "-n", 1, "--no-start", *module, *changes
        status, printed = call("fork", trunk, *words)
        assert status == 0, printed
        assert f"repeating 1 step of {trunk} from step-00000004" in printed
        run_python(*run, 3, "--dir", fork, *module, *changes, check=True)
    assert state(same) == state(trunk)
    assert call("compare", trunk, same)[0] == 0
    printed = call("compare", trunk, other)[1]
    assert "from step 5 on, first in its rates\nB is a fork of A, from step 5 on\n" in printed


@pytest.mark.long
def test_a_fork_goes_on_by_itself(trunk, tmp_path):
    """The command becomes the run, which stops at once here."""
    words = "--at", 8, "--dir", tmp_path / "fork", "--stop-after", 9, SCRIPT, *ARGUMENTS
    run_python("-m", "samestep", "fork", trunk, *words, check=True)
    assert ss.read_snapshot(tmp_path / "fork").step == 9


@pytest.mark.parametrize(
    ("recorded", "script", "given", "expected"),
    [
        (f"{SCRIPT} a 1", SCRIPT, {}, [SCRIPT, "a", "1"]),
        (f"{SCRIPT} --token *** 1", SCRIPT, {}, "have a secret, which its record masks; pass all"),
        (f"{SCRIPT} --token *** 1", SCRIPT, {"trunk_args": "--token x"}, [SCRIPT, "--token", "x"]),
        ("gone/branches.py 'a b'", SCRIPT, {}, [SCRIPT, "a b"]),
        ("gone/other.py a", SCRIPT, {}, "the script of the trunk, gone/other.py, is needed"),
        ("", SCRIPT, {}, "the script of the trunk, which its record does not name"),
        ("/old/jobs/train.py a", "jobs.train", {"module": True}, ["-m", "jobs.train", "a"]),
        ("/old/jobs/__main__.py", "jobs", {"module": True}, ["-m", "jobs"]),
        (f"{SCRIPT} a", "jobs.train", {"module": True}, [SCRIPT, "a"]),
    ],
)
def test_the_command_of_the_trunk(recorded, script, given, expected):
    options = SimpleNamespace(**{"script": script, "module": False, "trunk_args": None, **given})
    record = RecordedRun(Path("trunk"), 5, {"command": recorded}, None, 0, 1)
    if isinstance(expected, list):
        assert trunk_command(record, options) == expected
        return
    with pytest.raises(ss.ConfigError, match=expected):
        trunk_command(record, options)
