from __future__ import annotations

import atexit
import errno
import gc
import multiprocessing
import os
import random
import signal
import stat
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from samestep import host as files
from samestep.cluster import find_process
from samestep.cluster.launchers import SUBMITIT
from samestep.comm.store import group_store
from samestep.comm.token_store import join_store
from samestep.data.loader import Request, load
from samestep.errors import ConfigError, LaunchError, WorkerError, WorldError
from samestep.handoff import LAUNCHER_STATE
from samestep.launch import launch
from samestep.launch.local import preload
from samestep.snapshot.commit import PeerFailedError
from tests.launch.processes import end_soon, for_ever, listening, rank
from tests.slurm import SECOND_OF_TWO_TASKS

FORK = multiprocessing.get_context("fork")


def on_rank_one(action, others=lambda: None):
    """Return a body that does `action` on rank 1 and `others` elsewhere."""
    return lambda: action() if rank() == 1 else others()


def raise_(error):
    raise error


def wait_in_a_collective():
    dist.init_process_group("gloo")
    dist.barrier()


def ignoring_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for_ever()


def signal_handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def open_files():
    gc.collect()
    return {path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def test_the_result_is_that_of_rank_0():
    assert launch(lambda: {"rank": rank(), "tensor": torch.arange(3)}["rank"], workers=3) == 0
    assert torch.equal(launch(lambda: torch.arange(1_000_000)), torch.arange(1_000_000))


def test_closures_and_arguments_need_no_pickling():
    lock = threading.Lock()  # cannot be pickled
    assert launch(lambda argument: argument is lock, lock) is True


def test_workers_find_each_other():
    def body():
        dist.init_process_group("gloo")
        total = torch.tensor(rank() + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return int(total), find_process(os.environ)

    total, process = launch(body, workers=3)
    assert total == 6
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
        0,
        3,
        0,
        3,
    )
    assert (process.address, process.started_by) == ("127.0.0.1", "samestep")


def test_a_model_that_outlives_its_process_group_does_not_stop_its_worker():
    def body():
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
        model(torch.ones(1, 64)).sum().backward()
        sys.setswitchinterval(60)  # gloo's thread waits for Python's lock while `model` is freed
        dist.all_reduce(torch.ones(64))
        dist.destroy_process_group()
        return model is not None

    assert launch(body) is True


def test_process_groups_of_a_script_use_the_run_s_store_and_their_port_is_free():
    def body():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own = f"tcp://{address}:{port}"
        place = {"rank": rank(), "world_size": 2}
        sums = []
        for method in ({}, {"init_method": own, **place}, {}):
            dist.init_process_group("gloo", **method)
            kind = type(group_store()[1])
            total = torch.ones(1)
            dist.all_reduce(total)
            sums.append(total.item())
            dist.barrier()
            dist.destroy_process_group()
        store = dist.TCPStore(address, port, 2, is_master=rank() == 0)
        return kind.__name__, sums, store.add("arrived", 1) in {1, 2}

    assert launch(body, workers=2) == ("TokenStore", [2, 2, 2], True)


def test_destroyed_process_groups_keep_few_files_open():
    def body():
        numbers = []
        for _ in range(14):
            dist.init_process_group("gloo")
            dist.new_group([0, 1])
            total = torch.ones(1)
            dist.all_reduce(total)
            dist.destroy_process_group()
            numbers.append(len([*Path("/proc/self/fd").iterdir()]))
        return numbers

    numbers = launch(body, workers=2)
    assert numbers[3] > numbers[0]  # kept
    assert numbers[13] == numbers[9]


def test_workers_agree_on_a_process_group_after_one_of_them_has_failed(tmp_path):
    def body():
        failed = tmp_path / "failed"
        if rank() == 0:
            with pytest.raises(dist.DistError):  # worker 1 does not come
                dist.init_process_group("gloo", timeout=timedelta(seconds=0.2))
            failed.touch()
            store = join_store(os.environ, timedelta(seconds=60))
            store.wait(["group/1/joined/1"])  # which nobody will complete
        while not failed.exists():
            time.sleep(0.01)
        sums = []
        for _ in range(2):
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            other = dist.new_group([0, 1])
            total = torch.ones(1)
            dist.all_reduce(total, group=other)
            sums.append(total.item())
            dist.destroy_process_group()
        return sums

    assert launch(body, workers=2) == [2.0, 2.0]


def test_a_worker_that_does_not_exit_is_ended_with_its_result(capfd):
    def body():
        threading.Thread(target=for_ever, name="uploads").start()
        return rank()

    assert launch(body, timeout=0.5) == 0
    printed = capfd.readouterr().err
    assert "worker 1 was killed because its function returned" in printed
    assert "within timeout=0.5 s; still running: uploads\n" in printed


class Stuck:
    """An object whose destructor never returns, as that of a library that waits for others."""

    def __del__(self):
        for_ever()


def test_a_worker_whose_locals_cannot_be_freed_is_ended_with_its_result(capfd):
    def body():
        stuck = Stuck()
        return rank() if stuck else None

    assert launch(body, timeout=0.5) == 0
    assert "worker 1 was killed because its function returned" in capfd.readouterr().err


def test_a_failed_worker_whose_locals_cannot_be_freed_is_reported(capfd):
    def body():
        stuck = Stuck()
        raise ValueError(str(bool(stuck)))

    with pytest.raises(WorkerError, match="failed first: ValueError: True"):
        launch(body, workers=1, timeout=0.5)


def test_a_profiler_of_the_body_stays_until_it_ends(capfd):
    def body():
        sys.setprofile(count)
        return sys.getprofile() is count

    def count(*_):
        pass

    assert launch(body, workers=1) is True


def test_one_worker_is_a_process_of_its_own():
    assert launch(os.getpid, workers=1) != os.getpid()


def test_options_reach_the_workers_and_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("SAMESTEP_LANES", "3")
    names = ["SAMESTEP_LANES", "SAMESTEP_DETERMINISTIC", "SAMESTEP_SNAPSHOT_EVERY", "SAMESTEP_DIR"]
    options = {"lanes": 8, "deterministic": False, "snapshot_every": None, "dir": Path("runs/one")}
    assert launch(lambda: [os.environ[name] for name in names], **options) == [
        "8",
        "false",
        "none",
        "runs/one",
    ]
    assert os.environ["SAMESTEP_LANES"] == "3"


@pytest.mark.parametrize(("options", "threads"), [({}, 1), ({"threads": 2}, 2)])
def test_threads_are_set_whatever_the_launcher_has(options, threads):
    assert launch(torch.get_num_threads, workers=1, **options) == threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lane": 8}, "lane is not an option of samestep; did you mean lanes"),
        ({"lanes": "many"}, "lanes must be an integer or none, got 'many'"),
        ({"lanes": 0}, "lanes must be at least 1, got 0"),
    ],
)
def test_an_invalid_option_is_an_error_before_anything_starts(monkeypatch, options, message):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a worker was started"))
    with pytest.raises(ConfigError, match=message):
        launch(rank, **options)


def test_an_invalid_variable_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a worker was started"))
    monkeypatch.setenv("SAMESTEP_LANES", "many")
    with pytest.raises(ConfigError, match="SAMESTEP_LANES must be an integer or none, got 'many'"):
        launch(rank)


SEVERAL = {  # variables of the second of two processes, and of a process that is alone
    "srun": SECOND_OF_TWO_TASKS,
    "submitit": dict(zip(SUBMITIT, ("1", "2", "1", "7"), strict=True)),
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
}
ALONE = {
    "srun of one task": {**SECOND_OF_TWO_TASKS, "SLURM_STEP_NUM_TASKS": "1"},
    "submitit with one task": {**SEVERAL["submitit"], SUBMITIT[1]: "1"},
    "torchrun with one worker": {**SEVERAL["torchrun"], "RANK": "0", "WORLD_SIZE": "1"},
    "a leftover rank": {"RANK": "1"},
}


@pytest.mark.parametrize("launcher", SEVERAL)
def test_processes_of_one_job_do_not_launch_separate_runs(monkeypatch, launcher):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a worker was started"))
    for name, value in SEVERAL[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"each of 2 processes \(\w+=1 of \w+=2\) would start wo"):
        launch(rank)


@pytest.mark.parametrize("launcher", ALONE)
def test_a_process_of_a_launcher_that_is_alone_launches(monkeypatch, launcher):
    for name, value in ALONE[launcher].items():
        monkeypatch.setenv(name, value)
    assert launch(rank, workers=2) == 0


@pytest.mark.parametrize("workers", [0, -1])
def test_at_least_one_worker_is_required(workers):
    with pytest.raises(ConfigError, match=f"workers must be at least 1, got {workers}"):
        launch(rank, workers=workers)


def test_cuda_in_use_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a worker was started"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="CUDA is already in use in this process"):
        launch(rank)


def test_if_a_worker_cannot_start_the_others_are_killed(monkeypatch):
    fork, forks = os.fork, iter(range(9))

    def failing_fork():
        if next(forks) == 1:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", failing_fork)
    with pytest.raises(LaunchError, match=r"workers could not be started.*temporarily unavailable"):
        launch(for_ever)
    assert multiprocessing.active_children() == []


def test_the_first_failure_is_raised_with_the_workers_own_traceback():
    def fail():
        dist.init_process_group("gloo")
        raise ValueError("lost")

    with pytest.raises(WorkerError, match="worker 1 failed first: ValueError: lost") as caught:
        launch(on_rank_one(fail, others=wait_in_a_collective))
    assert caught.value.rank == 1
    first, frame, _, *_, last = caught.value.traceback.splitlines()
    assert first.startswith("Traceback")
    assert frame.endswith("in <lambda>")  # the traceback starts with the user's code
    assert last == "ValueError: lost"


@pytest.mark.parametrize("error", [ValueError("lost"), OSError(28, "full", "a.pt")])
def test_the_workers_exception_is_the_cause(error):
    with pytest.raises(WorkerError) as caught:
        launch(lambda: raise_(error))
    cause = caught.value.__cause__
    assert (type(cause), cause.args, str(cause)) == (type(error), error.args, str(error))


def test_an_exception_that_cannot_be_rebuilt_is_no_cause():
    class LocalError(Exception):
        pass

    for error in (LocalError("lost"), ValueError(torch.ones(1))):
        with pytest.raises(WorkerError, match="failed first: ") as caught:
            launch(lambda error=error: raise_(error), workers=1)
        assert caught.value.__cause__ is None


def test_the_earliest_of_several_failures_is_raised():
    failed = FORK.Event()

    class FirstError(Exception):
        def __str__(self):
            failed.set()
            return "lost"

    def rank_0():
        failed.wait()
        raise ValueError("later")

    with pytest.raises(WorkerError, match="worker 1 failed first: FirstError: lost"):
        launch(on_rank_one(lambda: raise_(FirstError()), others=rank_0))


@pytest.mark.parametrize(
    "effect", [WorldError("the others are gone"), PeerFailedError("worker 1 could not write")]
)
def test_a_secondary_error_gives_way_to_its_cause(effect):
    raised = FORK.Event()

    def rank_0():
        raised.wait()
        raise effect

    def rank_1():
        try:
            raise ValueError("the cause")
        finally:
            raised.set()
            time.sleep(0.5)  # what leaving a run may take

    with pytest.raises(WorkerError, match="worker 1 failed first: ValueError: the cause"):
        launch(on_rank_one(rank_1, others=rank_0))


@pytest.mark.parametrize("others", [wait_in_a_collective, for_ever])
def test_a_killed_worker_is_named(others):
    def die():
        if others is wait_in_a_collective:
            dist.init_process_group("gloo")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"^worker 1 failed first: killed by SIGKILL$") as caught:
        launch(on_rank_one(die, others))
    assert (caught.value.rank, caught.value.traceback) == (1, "")


@pytest.mark.parametrize("handled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_worker_that_the_launcher_stops_is_not_named(handled):
    def wait_to_be_stopped():
        if handled:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        for_ever()

    def lose_the_others():
        raise WorldError("worker 1 did not respond")

    message = r"^worker 0 failed first: WorldError: worker 1 did not respond"
    with pytest.raises(WorkerError, match=message):
        launch(on_rank_one(wait_to_be_stopped, lose_the_others), max_restarts=0)


def test_workers_that_skip_the_end_of_their_function_have_not_succeeded():
    message = "worker . failed first: exited before its function returned, perhaps by os._exit"
    with pytest.raises(WorkerError, match=message):
        launch(lambda: os._exit(0))
    assert launch(lambda: sys.exit(0)) is None


def test_a_worker_that_exits_without_a_report_has_its_status():
    with pytest.raises(WorkerError, match=r"^worker 1 failed first: exited with status 7$"):
        launch(on_rank_one(lambda: os._exit(7)))


def test_a_result_that_cannot_be_pickled_is_the_workers_error():
    with pytest.raises(WorkerError, match=r"worker 0 failed first: .*[Pp]ickle"):
        launch(lambda: lambda: None)


@pytest.mark.parametrize("code", [0, None, False])
def test_an_exit_with_status_0_is_a_success(code):
    assert launch(lambda: sys.exit(code)) is None
    assert launch(lambda: sys.exit(code) if rank() == 1 else "result") == "result"


@pytest.mark.parametrize(
    ("code", "message"), [(3, "exited with status 3"), ("out of ideas", "out of ideas")]
)
def test_an_exit_with_a_status_or_text_is_a_failure(code, message):
    with pytest.raises(WorkerError, match=f"worker 1 failed first: {message}$"):
        launch(on_rank_one(lambda: sys.exit(code)))


@pytest.mark.parametrize(
    "others",
    [
        for_ever,
        pytest.param(ignoring_sigterm, marks=pytest.mark.long),
        pytest.param(wait_in_a_collective, marks=pytest.mark.long),
    ],
)
def test_others_end_after_a_failure(others):
    with pytest.raises(WorkerError, match="worker 1 failed first: ValueError: lost"):
        launch(on_rank_one(lambda: raise_(ValueError("lost")), others), timeout=1e6)


def test_the_child_of_a_failed_worker_is_killed():
    child = FORK.Value("i")

    def fail():
        child.value = os.fork()
        if child.value == 0:
            ignoring_sigterm()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="worker 1"):
        launch(on_rank_one(fail))
    assert end_soon([child.value])


def test_a_worker_has_its_own_session_so_that_ctrl_c_reaches_only_the_launcher():
    assert launch(lambda: os.getsid(0) == os.getpid()) is True


def test_workers_have_the_signal_handlers_of_a_new_process():
    def handlers():
        return [
            signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        ]

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        assert launch(lambda: [str(handler) for handler in handlers()]) == [
            str(handler) for handler in (signal.SIG_DFL, signal.default_int_handler, signal.SIG_IGN)
        ]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)


def test_exit_functions_of_a_worker_run_in_it_and_those_of_the_launcher_do_not(tmp_path):
    atexit.register(launchers := (tmp_path / "launcher").touch)
    try:
        launch(lambda: atexit.register((tmp_path / "worker").touch) and None, workers=1)
    finally:
        atexit.unregister(launchers)
    assert [path.name for path in tmp_path.iterdir()] == ["worker"]


@pytest.mark.long
def test_workers_do_not_collect_the_launchers_garbage():
    collected_by = FORK.Value("i")

    class Garbage:
        def __init__(self):
            vars(self)["itself"] = self  # a cycle, which only a collection ends

        def __del__(self):
            collected_by.value = os.getpid()

    gc.disable()
    try:
        Garbage()
        launch(gc.collect)
        assert collected_by.value == 0
        assert not gc.isenabled()
        assert launch(gc.isenabled)
    finally:
        gc.enable()
        gc.collect()
    assert collected_by.value == os.getpid()


@pytest.mark.parametrize(
    "body",
    [pytest.param(rank, marks=pytest.mark.long), on_rank_one(lambda: raise_(ValueError("lost")))],
)
def test_nothing_stays_behind_in_the_launcher(body, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def state():
        return (
            dict(os.environ),
            signal_handlers(),
            threading.enumerate(),
            multiprocessing.active_children(),
            list(tmp_path.iterdir()),
        )

    def attempt():
        with suppress(WorkerError):
            launch(body)

    attempt()  # what torch keeps for itself from the first time is no leak
    before, files = state(), open_files()
    attempt()
    assert state() == before
    assert open_files() == files


def test_launching_from_another_thread_works():
    results = []
    thread = threading.Thread(target=lambda: results.append(launch(rank)))
    thread.start()
    thread.join()
    assert results == [0]


def test_workers_listen_only_on_the_loopback_interface():
    def body():
        dist.init_process_group("gloo")
        dist.barrier()
        observed = (
            listening(os.getpid()),
            listening(os.getppid()),
            os.environ["GLOO_SOCKET_IFNAME"],
            os.environ["NCCL_SOCKET_IFNAME"],
        )
        dist.barrier()
        dist.destroy_process_group()
        return observed

    worker, launcher, *interfaces = launch(body)
    assert interfaces == ["lo", "lo"]
    assert worker
    assert not launcher  # process groups use the store of the run, which has no port
    assert {address for address, _ in worker | launcher} == {"0100007F"}  # 127.0.0.1


def test_a_long_error_message_is_printed_once():
    with pytest.raises(WorkerError) as caught:
        launch(on_rank_one(lambda: raise_(ValueError("a line\nand more"))))
    first, *_, last = str(caught.value).splitlines()
    assert first == "worker 1 failed first: ValueError: a line"
    assert last == "and more"
    assert str(caught.value).count("\nand more") == 1


def test_a_closed_standard_file_is_not_reused():
    def launcher():
        for number in range(3):
            os.close(number)
        sys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None
        files = launch(
            lambda: [os.fstat(int(number)) for number in os.environ[LAUNCHER_STATE].split(",")]
        )
        memory = [file for file in files if not stat.S_ISSOCK(file.st_mode)]
        os._exit(any(file.st_nlink for file in memory))  # memory has no name

    process = FORK.Process(target=launcher)
    process.start()
    process.join()
    assert process.exitcode == 0


# the address of a socket has 107 bytes at most
@pytest.mark.parametrize("name", ["short", 100 * "long"])
def test_sockets_of_killed_loader_processes_are_removed(name, monkeypatch):
    preload()  # torch._dynamo creates a folder of its own
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        tempfile.TemporaryDirectory(dir=short) as other,
    ):
        folder = Path(other, name[:200])
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(files, "_SHORT", other)

        def body():
            for _ in load(
                [torch.ones(1)],
                [Request("here", [0], 0)],
                collate_fn=None,
                loader_workers=1,
                pin_memory=False,
            ):
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(WorkerError, match="SIGKILL"):
            launch(body)
        assert list(folder.iterdir()) == []
        assert list(Path(other).iterdir()) == [folder]


def test_workers_draw_the_same_before_init_at_every_start(tmp_path):
    def draws(start, seed):
        def body():
            values = [random.random(), np.random.rand(), float(torch.rand(()))]
            (tmp_path / f"{start}-{rank()}").write_text(repr(values))

        launch(body, workers=2, seed=seed)
        return [(tmp_path / f"{start}-{number}").read_text() for number in range(2)]

    first = draws("first", 0)
    assert first[0] == first[1]
    assert draws("again", 0) == first
    assert draws("other", 1) != first
