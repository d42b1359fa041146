"""Workers with several devices."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torch import nn

import samestep as ss
from samestep.cli import main
from tests.jobs import Net, classify, events, image_job, images, left_by
from tests.workers import run_workers


def test_each_device_runs_its_lanes_with_its_own_parameters_and_buffers():
    ran = []

    def loss_fn(model, batch):
        ran.append(
            (len(batch[0]), model.head.weight.data_ptr(), model.features[1].running_mean.data_ptr())
        )
        return classify(model, batch)

    with ss.init(devices=["cpu", "cpu", "cpu"], lanes=4) as run:
        model = run.replicate(Net())
        own_weight = model.head.weight.data_ptr()
        run.backward(loss_fn, model, next(iter(run.batches(images(10), 10))))
        assert len({weight for _, weight, _ in ran}) == len({mean for _, _, mean in ran}) == 3
        assert [weight for _, weight, _ in ran].count(own_weight) == 1
        # The lanes have 2, 3, 2 and 3 of 10 samples. The three devices take turns with one, one
        # and two lanes.
        assert [samples for samples, _, _ in ran] == [2, 3, 2, 3]
        assert [weight for _, weight, _ in ran][2] == [weight for _, weight, _ in ran][3]
        assert model.head.weight.data_ptr() == own_weight
        assert model.head.weight.grad is not None


def test_module_in_a_closure_runs_on_the_current_device():
    def trained(devices):
        with ss.init(devices=["cpu"] * devices, lanes=2) as run:
            torch.manual_seed(0)
            nets = {"student": run.replicate(Net()), "teacher": run.replicate(Net())}
            optimizer = torch.optim.SGD(nets["student"].parameters(), lr=0.1)
            seen = set()

            def loss_fn(student, batch):
                seen.add(nets["teacher"].head.weight.data_ptr())
                return (student(batch[0]) - nets["teacher"](batch[0]).detach()).square().mean()

            for batch in run.batches(images(32), 8):
                run.backward(loss_fn, nets["student"], batch)
                optimizer.step()
                optimizer.zero_grad()
            assert len(seen) == devices
            return [parameter.detach().clone() for parameter in nets["student"].parameters()]

    assert all(
        torch.equal(parameter, other)
        for parameter, other in zip(trained(1), trained(2), strict=True)
    )


def test_module_without_update_is_frozen_on_every_device():
    with ss.init(devices=2, lanes=2) as run:
        body, judge = run.replicate(nn.Linear(2, 2)), run.replicate(nn.Linear(2, 1))
        judge.requires_grad_(requires_grad=False)
        frozen = []

        def loss_fn(models, batch):
            frozen.append(not judge.weight.requires_grad)
            return judge(body(batch)).mean()

        run.backward(
            loss_fn,
            None,
            next(iter(run.streams(lambda lane: iter([torch.ones(3, 2)]), name="ones"))),
            update=body,
        )
        assert frozen == [True, True]
        assert judge.weight.grad is None


def evaluated(devices):
    """Return the results of an evaluation, and the number of replicas that it used."""
    with ss.init(devices=["cpu"] * devices, lanes=8) as run:
        torch.manual_seed(0)
        model, metric, seen = (
            run.replicate(Net()),
            torchmetrics.classification.MulticlassConfusionMatrix(10),
            {},
        )
        average = nn.Linear(64, 10)  # not replicated

        def score(model, batch):
            seen[model.head.weight.data_ptr()] = True
            metric.update(model(batch[0]), batch[1])
            return {"loss": classify(model, batch)[0], "counts": metric}

        means = run.evaluate(score, model, images(37), 5)
        outputs = run.evaluate(
            lambda model, batch: model(batch[0]), model, images(37), 5, gather=True
        )
        others = run.evaluate(
            lambda model, batch: model(batch[0].flatten(1)).mean(), average, images(37), 5
        )
        return {**means, "outputs": outputs, "others": others}, len(seen)


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluation_is_equal_on_any_number_of_devices(workers):
    (expected, single) = evaluated(1)
    results, several = run_workers(evaluated, workers, 3)[0]
    assert (single, several) == (1, 3)
    assert torch.equal(results["outputs"], expected["outputs"])
    assert torch.equal(results["counts"], expected["counts"])
    assert results["loss"] == expected["loss"]
    assert results["others"] == expected["others"]


def test_run_resumes_on_a_different_number_of_devices(tmp_path):
    expected = left_by(image_job, tmp_path / "straight", 1, lanes=8)
    with (
        ss.init(dir=tmp_path / "parted", lanes=8, devices=["cpu", "cpu"], stop_after=3) as run,
        pytest.raises(SystemExit),
    ):
        image_job(run)
    assert left_by(image_job, tmp_path / "parted", 2, devices=["cpu"] * 3) == expected
    assert [event["devices"] for event in events(tmp_path / "parted")[:1]] == [["cpu", "cpu"]]


def test_default_is_one_lane_per_device():
    with ss.init(devices=3) as run:
        assert (run.lanes, run.world_size, run.devices) == (3, 1, [torch.device("cpu")] * 3)


def test_more_devices_than_lanes_is_an_error(tmp_path):
    with pytest.raises(
        ss.ConfigError,
        match=r"lanes must be at least the number of devices \(4\), got 3; increase lanes",
    ):
        ss.init(lanes=3, devices=4)
    left_by(image_job, tmp_path, 1, lanes=2)
    with pytest.raises(ss.ConfigError, match=r"number of devices \(3\), got 2 in the snapshot"):
        ss.init(dir=tmp_path, devices=3)


def test_launched_workers_get_their_devices():
    def devices():
        with ss.init() as run:
            return run.world_size, len(run.devices), run.lanes

    assert ss.launch(devices, workers=2, devices=["cpu", "cpu"], lanes=5) == (2, 2, 5)


SCRIPT = """
import samestep as ss
with ss.init() as run:
    run.print(run.world_size, len(run.devices))
"""


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ([], "3 1"),
        (["--mode", "ddp"], "3 1"),
        (["--mode", "dp"], "1 3"),
        (["--devices", "cpu,cpu"], "3 2"),
    ],
)
def test_mode_assigns_devices_to_workers(flags, printed, tmp_path, capfd):
    (script := tmp_path / "print_devices.py").write_text(SCRIPT)
    assert main(["run", "-n", "3", *flags, str(script)]) == 0
    assert capfd.readouterr().out.splitlines() == [printed]


def test_mode_with_devices_is_an_error(tmp_path, capsys):
    (script := tmp_path / "print_devices.py").write_text(SCRIPT)
    assert main(["run", "--mode", "dp", "--devices", "2", str(script)]) == 2
    assert "--devices cannot be combined with --mode dp" in capsys.readouterr().err
