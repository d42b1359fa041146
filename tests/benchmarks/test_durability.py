from __future__ import annotations

import random
import subprocess
import sys

from benchmarks.durability.disk import LOSSES, Call, replay
from tests.needs import needs


def call(name, path, data=b"", *, offset=0, new_size=-1, other=""):
    return Call(name, 1, 0, offset, new_size, path, other, data)


def left(tmp_path, calls, loss):
    """Return what 50 power losses may leave, as files with their content, None for folders."""
    states = set()
    for seed in range(50):
        folder = tmp_path / f"{len(calls)}-{loss}-{seed}"
        replay(calls).write(folder, loss, random.Random(seed))
        states.add(
            tuple(
                (str(path.relative_to(folder)), None if path.is_dir() else path.read_bytes())
                for path in sorted(folder.rglob("*"))
            )
        )
    return states


REPLACED = [
    call("mkdir", "run"),
    call("open", "run/a", new_size=0),
    call("write", "run/a", b"old"),
    call("fsync", "run/a"),
    call("fsync", "run"),
    call("fsync", ""),
    call("open", "run/b", new_size=0),
    call("write", "run/b", b"newer"),
    call("rename", "run/b", other="run/a"),
]
BEFORE, AFTER = (
    (("run", None), ("run/a", b"old")),
    (("run", None), ("run/a", b"newer")),
)


def test_what_was_synced_is_certain(tmp_path):
    for loss in LOSSES:
        assert left(tmp_path, REPLACED[:6], loss) == {BEFORE}
    assert left(tmp_path, REPLACED[:5], "all") == {()}  # the folder's own name is not synced


def test_what_was_not_synced_is_lost_torn_or_reordered(tmp_path):
    assert left(tmp_path, REPLACED, "all") == left(tmp_path, REPLACED, "names") == {BEFORE}
    assert left(tmp_path, REPLACED, "none") == {AFTER}
    assert left(tmp_path, REPLACED, "content") == {
        (("run", None), ("run/a", content)) for content in (b"", bytes(5))
    }
    mixed = left(tmp_path, REPLACED, "some")
    assert {BEFORE, AFTER} < mixed
    assert (("run", None), ("run/a", b"ne")) in mixed
    synced = [*REPLACED[:-1], call("fsync", "run/b"), REPLACED[-1]]
    assert left(tmp_path, synced, "content") == {AFTER}


def test_a_link_gives_a_file_a_second_name(tmp_path):
    linked = [*REPLACED[:6], call("link", "run/a", other="run/c"), call("unlink", "run/a")]
    both, second = (("run/a", b"old"),), (("run/c", b"old"),)
    states = {(("run", None), *names) for names in ((), both, second, both + second)}
    assert left(tmp_path, linked, "none") == {(("run", None), *second)}
    assert left(tmp_path, linked, "some") == states
    assert left(tmp_path, [*linked, call("fsync", "run")], "all") == {(("run", None), *second)}


def test_no_failed_call_no_power_loss_and_no_slow_call_loses_anything():
    needs("gcc")
    command = [sys.executable, "-m", "benchmarks.durability", "--sample", "1", "1", "--slow", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 failures of" in done.stdout
    assert "1 power losses and 1 runs with slow calls" in done.stdout
