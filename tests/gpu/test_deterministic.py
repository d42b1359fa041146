"""Runs on GPUs use deterministic kernels of samestep, and give torch's own back at their end."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.plugins.kernels import KERNELS
from tests.gpu.test_lane_graph import verified
from tests.jobs import fingerprint
from tests.plugins.test_kernels import CASES, compare_on


class Segmenter(nn.Module):
    """A network with what torch refuses on GPUs: pooling to 7 and 4, upsampling, reflection."""

    def __init__(self):
        super().__init__()
        self.features, self.letters = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 6)
        self.masks = nn.Conv2d(8, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, images):
        features = self.features(images)
        average, largest = F.adaptive_avg_pool2d(features, 7), F.adaptive_max_pool2d(features, 4)
        size = images.shape[2:]
        pooled = [F.interpolate(part, size, mode="bicubic") for part in (average, largest)]
        # [batch, classes, height, width], and [steps, batch, letters] of the average's cells
        return self.masks(torch.cat(pooled, 1)), self.letters(average.flatten(2).permute(2, 0, 1))


def loss(model, batch):
    images, masks, letters = batch
    logits, steps = model(images)
    lengths = [[number] * len(images) for number in (len(steps), letters.shape[1])]
    ctc = F.ctc_loss(steps.log_softmax(-1), letters, *lengths)
    return F.cross_entropy(logits, masks) + ctc


def samples():
    """Return images, masks and letters."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(1, 9, 10, generator=generator),
            torch.randint(3, (9, 10), generator=generator),
            torch.randint(1, 6, (5,), generator=generator),
        )
        for _ in range(12)
    ]


@contextmanager
def without_cudnn_ctc():
    """Answer for libraries of GPUs, which simulated ones do not have."""
    library = torch.library.Library("aten", "IMPL")
    libraries = ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
    for name in [name + overload for name in libraries for overload in ("", ".Tensor")]:
        with suppress(RuntimeError):  # of another version of torch
            library.impl(name, lambda *_: False, "CUDA")
    yield


def trained(devices):
    """Return a hash of the trained model, and which kernels were called in the run and after it."""
    called = set()

    def noted(name, kernel):
        def call(*args, **kwargs):
            called.add(name)
            return kernel(*args, **kwargs)

        return call

    own_kernels = dict(KERNELS)
    KERNELS.update({name: noted(name, kernel) for name, kernel in own_kernels.items()})
    try:
        with without_cudnn_ctc(), ss.init(lanes=4, timeout=60, devices=devices) as run:
            assert run.device.type == "cuda"
            torch.manual_seed(0)
            model = run.replicate(Segmenter())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)
            for batch in run.batches(samples(), 8, steps=3):
                run.backward(loss, model, batch)
                optimizer.step()
                optimizer.zero_grad()
            state = {name: value.cpu() for name, value in model.state_dict().items()}
            during = sorted(called)
    finally:
        KERNELS.update(own_kernels)
    called.clear()
    scores = torch.zeros(2, 3, 4, 4, device="cuda", requires_grad=True)
    F.cross_entropy(scores, torch.zeros(2, 4, 4, dtype=torch.int64, device="cuda"))
    return fingerprint(state), during, sorted(called)


@pytest.mark.long
def test_segmentation_and_ctc_have_the_same_bits(gpus):
    [expected, during, after] = gpus.call(trained, 1)
    assert {"nll_loss2d_forward", "adaptive_max_pool2d_backward"} <= set(during)
    assert {"_adaptive_avg_pool2d_backward", "upsample_bicubic2d_backward"} <= set(during)
    assert {"_ctc_loss_backward", "reflection_pad2d_backward"} <= set(during)
    assert not after
    assert gpus.call(trained, 2)[0] == expected
    assert [result[0] for result in gpus.workers(2, trained, 1)] == [expected] * 2


class Pools(nn.Module):
    """A classifier with adaptive pooling to 7, and to a maximum of 4."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6 * 16, 3)

    def forward(self, images):
        features = F.adaptive_avg_pool2d(self.first(images).relu(), 7)
        return self.head(F.adaptive_max_pool2d(self.second(features), 4).flatten(1))


class Masks(nn.Module):
    """A network for segmentation."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Conv2d(6, 3, 1)

    def forward(self, images):
        features = self.down(images).relu()
        return F.interpolate(self.up(features), images.shape[2:], mode="bilinear")


class Speech(nn.Module):
    """A network whose steps of time are the rows of an image."""

    def __init__(self):
        super().__init__()
        self.steps, self.letters = nn.Conv1d(10, 8, 3, padding=1), nn.Linear(8, 6)

    def forward(self, images):
        steps = self.steps(images.flatten(1, 2).mT).relu()  # [batch, 8, steps]
        return self.letters(steps.permute(2, 0, 1)).log_softmax(-1)


def loss_of_class(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1].flatten(1).sum(1) % 3)


def loss_of_masks(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_of_letters(model, batch):
    images, _, letters = batch
    lengths = [[number] * len(images) for number in (images.shape[2], letters.shape[1])]
    return F.ctc_loss(model(images), letters, *lengths)


VERIFIED_LOSSES = {Masks: loss_of_masks, Speech: loss_of_letters, Pools: loss_of_class}
VERIFIED = """
import torch
import samestep as ss
from tests.gpu import test_deterministic as jobs

with jobs.without_cudnn_ctc(), ss.init(lanes=4, device="{device}") as run:
    torch.manual_seed(0)
    model = run.replicate(jobs.{model}())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(jobs.samples(), 8, steps=3):
        run.log(run.backward(jobs.{loss}, model, batch))
        optimizer.step()
        optimizer.zero_grad()
"""


def verified_script(model, device):
    """Return a script that trains a model of this file."""
    loss = VERIFIED_LOSSES[model].__name__
    return VERIFIED.format(model=model.__name__, loss=loss, device=device)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[pytest.mark.long] * (model is not Speech))
        for model in VERIFIED_LOSSES
    ],
)
def test_verify_finds_the_same_bits(model, gpus, tmp_path):
    assert gpus.call(verified, tmp_path, verified_script(model, "cuda"), "-n", "2") == 0
    assert "the same at every step: n=2" in gpus.printed


def compared():
    """Return the cases whose results on a device are not those of CPUs, with the reason."""
    torch.use_deterministic_algorithms(mode=True)
    failures = {}
    with without_cudnn_ctc():
        for case in CASES:
            try:
                compare_on("cuda", case)
            except (AssertionError, RuntimeError) as error:
                failures[case] = str(error)
    return failures


def test_kernels_compute_on_devices_what_cpus_compute(gpus):
    assert gpus.call(compared) == {}
