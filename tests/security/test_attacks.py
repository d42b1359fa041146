"""Attacks by processes without the token: the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import pytest

from samestep.launch import launch
from tests.namespaces import hosts
from tests.ports import free_port
from tests.security.attackers import ATTACKS, FORK
from tests.security.job import main
from tests.security.launched import JOB, LAUNCHERS, PHASES, TOKEN, attacked, everything
from tests.slurm import slurm

ON_STORE = tuple(ATTACKS)[:4]
# the store of torchrun's agent responds slowly after the others
WITHOUT_FLOODS = (*(name for name in ON_STORE if "fills" not in name), "sends pickles")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    for phase in PHASES:
        (directory / f"{phase}.go").touch()
    launch(lambda: main(directory), workers=2, max_restarts=1)
    return (directory / "result").read_text()


def check(outcome, undisturbed, phases=PHASES):
    assert not outcome.exploded, "a pickle was run"
    assert outcome.result == undisturbed, outcome.output
    assert TOKEN not in outcome.output
    assert outcome.seen.keys() == set(phases)


# tests/comm/test_unauthenticated.py and test_floods.py have single attacks
@pytest.mark.long
@pytest.mark.parametrize("launcher", ["samestep run", "samestep run --nodes"])
def test_no_attack_disturbs_a_run_with_a_token(launcher, tmp_path, undisturbed):
    check(attacked(launcher, tmp_path / "job", everything()), undisturbed)


def seen_on_store(outcome):
    """Return what the attackers of the store saw, of every user and in every phase."""
    return {
        value
        for seen in outcome.seen.values()
        for name, value in seen.items()
        if name.removeprefix("other user ") in ON_STORE
    }


@pytest.mark.long
def test_attacks_under_other_launchers(tmp_path, undisturbed):
    jobs = {
        "ss.launch": (everything(), None),
        "torchrun": (dict.fromkeys(PHASES, WITHOUT_FLOODS), TOKEN),
        "mpirun": (everything(), None),
    }
    if shutil.which("mpirun") is None:
        del jobs["mpirun"]
    (tmp_path / "mpirun").mkdir()
    (tmp_path / "mpirun" / "lasts").touch()
    with ProcessPoolExecutor(len(jobs), FORK) as pool:  # most of the time, jobs wait
        started = {
            launcher: pool.submit(attacked, launcher, tmp_path / launcher, *how)
            for launcher, how in jobs.items()
        }
        outcomes = {launcher: future.result() for launcher, future in started.items()}
    for launcher, each in outcomes.items():
        check(each, undisturbed, PHASES[:2] if launcher == "mpirun" else PHASES)
    torchrun = outcomes.pop("torchrun").seen["running"]  # its agent's store accepts everyone
    assert torchrun["writes a failure"] == "written"
    assert "worker/0" in torchrun["reads the store"]
    for each in outcomes.values():
        assert seen_on_store(each) == {"read nothing", "refused"}


@pytest.mark.long
def test_attacks_on_tasks_of_slurm(tmp_path_factory, undisturbed):
    with slurm(tmp_path_factory.mktemp("s")) as cluster:
        directory = cluster.directory / "job"
        directory.mkdir()
        (directory / "lasts").touch()
        # no garbage: srun itself ends when its own ports receive it
        attacks = {"forming": ON_STORE, "running": (*ON_STORE, "sends pickles")}
        outcome = attacked("srun", directory, attacks, environment=cluster.environment)
    check(outcome, undisturbed, PHASES[:2])
    assert seen_on_store(outcome) == {"read nothing", "refused"}


def on_two_hosts(machines, launcher, directory):
    """Return the commands that run the job on two hosts."""
    master = f"{machines[0].address}:{free_port()}"
    place = ["env", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"]
    place += [f"MASTER_ADDR={machines[0].address}", f"MASTER_PORT={master.partition(':')[2]}"]
    nodes = ["-m", "samestep", "run", "--nodes", "2", "--master", master, "-n", "1"]
    return [
        host.command(sys.executable, *nodes, str(JOB), str(directory))
        if launcher == "samestep run"
        else host.command(*place, f"RANK={rank}", sys.executable, str(JOB), str(directory))
        for rank, host in enumerate(machines)
    ]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["samestep run", "variables"])
def test_attacks_of_another_host(launcher, tmp_path, undisturbed, monkeypatch):
    (tmp_path / "lasts").touch()
    with hosts(3) as (*machines, stranger), ThreadPoolExecutor(1) as thread:
        monkeypatch.setitem(LAUNCHERS, "two hosts", partial(on_two_hosts, machines, launcher))
        thread.submit(stranger.enter).result()
        outcome = thread.submit(attacked, "two hosts", tmp_path, everything()).result()
    check(outcome, undisturbed, PHASES[:2])
    assert seen_on_store(outcome) == {"read nothing", "refused"}
    sent = outcome.seen["running"]["sends garbage and huge lengths"]
    assert int(sent.split()[2]) >= 2  # to the store and to gloo
