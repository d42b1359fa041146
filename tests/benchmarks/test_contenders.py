from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from statistics import mean

import pytest

from benchmarks.contenders import CONTENDERS, WORKERS
from benchmarks.contenders.with_ideal_link import BURST, HOSTS, RATE
from benchmarks.jobs import JOBS, dqn, layers, mlp, vit
from benchmarks.jobs.job import BATCHES_AN_EPOCH
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("default")  # warnings of peers are not ours
SAMPLES = 2 * BATCHES_AN_EPOCH
# Every batch is the complete data set, so that the loss does not depend on the order of samples.
SMALL = {
    name: replace(
        JOBS[name], batch_size=SAMPLES, warmup_steps=1, steps=2, build=partial(build, 2, **sizes)
    )
    for name, build, sizes in [
        ("vit", vit.build, {"depth": 1}),
        ("mlp", mlp.build, {"hidden": (64, 48)}),
        ("dqn", dqn.build, {}),
        ("layers", layers.build, {"depth": 10}),
    ]
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    # importing Fabric sets it
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def train(name, workers, job):
    CONTENDERS[name].load()  # once here, not in every worker
    return run_workers(CONTENDERS[name].train, workers, SMALL[job])


@cache
def plain_loss(job):
    return train("plain", 1, job)[0]["loss"]


@pytest.mark.parametrize(
    ("name", "hosts", "itemsize"), [("ideal", 2, 4), ("ideal-16", 2, 2), ("ideal", 4, 6)]
)
def test_an_ideal_link_trains_and_sends_all_gradients_in_each_step(
    name, hosts, itemsize, monkeypatch
):
    rate = 1000.0  # bytes per second, so slow that only the gradients count
    monkeypatch.setenv(RATE, str(rate))
    monkeypatch.setenv(BURST, "0")
    monkeypatch.setenv(HOSTS, str(hosts))
    monkeypatch.setenv("WORLD_SIZE", "1")
    job = SMALL["layers"]
    nbytes = itemsize * sum(parameter.numel() for parameter in job.build().model.parameters())
    figures = CONTENDERS[name].train(job)
    assert figures["samples_a_second"] == pytest.approx(SAMPLES / (nbytes / rate), rel=1e-2)
    assert figures["loss"] == pytest.approx(plain_loss("layers"), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "job"),
    [
        (name, job)
        for name, contender in CONTENDERS.items()
        for job in SMALL
        # jobs differ little for exchanges that only round
        if contender.role not in {"reference", "bound"}
        and (contender.role != "16-bit" or job == "layers")
    ],
)
def test_every_contender_trains_like_the_plain_loop(name, job):
    figures = train(name, WORKERS, job)
    loss, tolerance = plain_loss(job), 1e-2 if CONTENDERS[name].role == "16-bit" else 1e-5
    assert mean(worker["loss"] for worker in figures) == pytest.approx(loss, rel=tolerance)
    assert all(
        worker["samples_a_second"] > 0 and worker["memory_megabytes"] > 0 for worker in figures
    )
