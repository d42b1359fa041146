from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from benchmarks.chaos import __main__ as module
from benchmarks.chaos.__main__ import Round, campaign, chaos, chosen, undisturbed
from benchmarks.chaos.faults import faults_for
from benchmarks.chaos.target import ChaosError, Resources
from tests.needs import needs

EPOCHS = 9
# The other kinds are parts of these: `kill_twice` also kills once.
ON_ONE_HOST = ("kill_twice", "stop_worker", "damage_hot_copies")
WITH_A_RESUME = ("resize", "truncate_snapshot")
ON_TWO_HOSTS = ("cut_link", "slow_disk", "kill_first_host")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return a run without faults."""
    return undisturbed(tmp_path_factory.mktemp("expected"), EPOCHS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("hosts", "kinds"), [(1, ON_ONE_HOST), (1, WITH_A_RESUME), (2, ON_TWO_HOSTS)]
)
def test_a_run_under_faults_ends_like_an_undisturbed_one(tmp_path, expected, hosts, kinds):
    if os.geteuid() == 0:
        needs("mkfs.ext4")
    if hosts > 1:
        needs("ip")
        needs("permission to make network namespaces", is_present=os.geteuid() == 0)
    chaos_round = Round(hosts, 1, len(kinds), EPOCHS, longest=2.0, only=kinds)
    result = chaos(tmp_path, chaos_round, expected, log=print)
    assert {name: len(durations) for name, durations in result["seconds"].items()} == dict.fromkeys(
        kinds, 1
    )


@pytest.mark.parametrize("hosts", [1, 2])
def test_by_default_each_kind_of_fault_has_its_share(hosts):
    survived, ending = faults_for(hosts, disk=True)
    shares = {**survived, **ending}
    assert Counter(chosen(random.Random(0), shares, sum(shares.values()))) == shares
    assert sum(shares.values()) >= 30


def test_a_campaign_continues_after_the_rounds_in_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "undisturbed", lambda *_: None)
    seeds = []

    def broken(_folder, chaos_round, _expected, **_):
        seeds.append(chaos_round.seed)
        if chaos_round.seed == 1:
            raise ChaosError("other bits")
        sample = Resources(memory=1, threads=2, files=3)
        return {
            "seconds": {"kill": [0.5, 0.25 * chaos_round.seed]},
            "resources": [(9, sample, sample)],
        }

    monkeypatch.setattr(module, "chaos", broken)
    rounds = [Round(1, seed, 2, 1) for seed in range(3)]
    assert campaign(rounds, tmp_path, 1, tmp_path / "log") == 1
    printed = capsys.readouterr().out
    assert "FAILED with seed 1: ChaosError: other bits" in printed
    assert "--hosts 1 --seed 1 --faults 2 --round 2" in printed
    assert seeds == [0, 1, 2]
    monkeypatch.setattr(module, "chaos", lambda *_, **__: {"seconds": {}, "resources": []})
    assert campaign(rounds, tmp_path, 1, tmp_path / "log") == 0
    printed = capsys.readouterr().out
    assert "| kill | 4 | 0.50 s | 0.50 s |" in printed
    assert "after 9 faults: memory 1 -> 1, threads 2 -> 2, files 3 -> 3" in printed


@pytest.mark.parametrize("grown", [{"memory": 10 << 20}, {"threads": 3}, {"files": 8}])
def test_a_launcher_that_grows_is_an_error(grown):
    before = Resources(memory=1 << 20, threads=2, files=5)
    assert module.check_resources({7: [before] * 10})[0] == (10, before, before)
    with pytest.raises(ChaosError, match=r"a launcher had .* first and .* later"):
        module.check_resources({7: [before] * 8 + [before._replace(**grown)] * 2})
