"""Objects with CUDA tensors arrive on the receiver's device, not on the sender's index."""

from __future__ import annotations

import pytest
import torch
import torchmetrics

import samestep as ss
from tests.gpu.simulated import VISIBLE
from tests.jobs import Net, images
from tests.run import test_histogram


def exchanged():
    with ss.init(timeout=60) as run:
        tensor = torch.full((2,), 1.0 + run.rank, device=run.device)
        view = {"a": tensor, "b": tensor[:1], "p": torch.nn.Parameter(tensor)}
        views = run.all_gather(view)
        devices = {t.device for each in views for t in each.values()}
        devices |= {run.broadcast(tensor).device}
        means = run.reduce_dict({"x": tensor})
        metric = torchmetrics.classification.MulticlassConfusionMatrix(10).to(run.device)
        model = run.replicate(Net())

        def score(model, batch):
            metric.update(model(batch[0]), batch[1])
            return {"counts": metric}

        counts = run.evaluate(score, model, images(37), 5)["counts"]
        devices |= {means["x"].device}
        assert counts.device.type == "cpu"  # values of metrics, wherever they were updated
        return str(run.device), set(map(str, devices)), means["x"].tolist(), counts.sum().item()


def test_tensors_arrive_on_the_receivers_device(gpus):
    for rank, result in enumerate(gpus.workers(2, exchanged)):
        assert result == (f"cuda:{rank}", {f"cuda:{rank}"}, [1.5, 1.5], 37)


def seen():
    import os

    rank = os.environ["RANK"]
    os.environ[VISIBLE] = rank  # as with srun --gpus-per-task=1
    with ss.init(timeout=60) as run:
        received = run.all_gather(torch.ones(1, device=run.device))
        return run._world.backend, {str(tensor.device) for tensor in received}


@pytest.mark.long
def test_workers_that_each_see_one_gpu_do_not_share_it(gpus):
    assert gpus.workers(2, seen) == [("NCCL", {"cuda:0"})] * 2


@pytest.mark.long
def test_histograms_count_what_workers_have_on_devices(gpus, tmp_path):
    gpus.call(test_histogram.job, tmp_path / "one", True)
    gpus.workers(2, test_histogram.job, tmp_path / "two", True, **{VISIBLE: "0,1"})
    alone, together = (test_histogram.histograms(tmp_path / name) for name in ("one", "two"))
    assert len(alone) > 4
    assert together == alone
