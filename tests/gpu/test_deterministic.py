"""Runs on GPUs use deterministic kernels of samestep, and give torch's own back at their end."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.step.deterministic import KERNELS
from tests.jobs import fingerprint


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


def trained(devices):
    """Return a hash of the trained model, and which kernels were called in the run and after it."""
    generator = torch.Generator().manual_seed(3)
    samples = [
        (
            torch.randn(1, 9, 10, generator=generator),
            torch.randint(3, (9, 10), generator=generator),
            torch.randint(1, 6, (5,), generator=generator),
        )
        for _ in range(12)
    ]
    called = set()

    def noted(name, kernel):
        def call(*args, **kwargs):
            called.add(name)
            return kernel(*args, **kwargs)

        return call

    libraries = torch.library.Library("aten", "IMPL")  # of GPUs: simulated ones have none
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"):
        with suppress(RuntimeError):  # of another version of torch
            libraries.impl(name, lambda *_: False, "CUDA")
    own_kernels = dict(KERNELS)
    KERNELS.update({name: noted(name, kernel) for name, kernel in own_kernels.items()})
    try:
        with ss.init(lanes=4, timeout=60, devices=devices) as run:
            assert run.device.type == "cuda"
            torch.manual_seed(0)
            model = run.replicate(Segmenter())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.track(model=model, optimizer=optimizer)
            for batch in run.batches(samples, 8, steps=3):
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


def test_segmentation_and_ctc_have_the_same_bits(gpus):
    [expected, during, after] = gpus.call(trained, 1)
    assert {"nll_loss2d_forward", "adaptive_max_pool2d_backward"} <= set(during)
    assert {"_adaptive_avg_pool2d_backward", "upsample_bicubic2d_backward"} <= set(during)
    assert {"_ctc_loss_backward", "reflection_pad2d_backward"} <= set(during)
    assert not after
    assert gpus.call(trained, 2)[0] == expected
    assert [result[0] for result in gpus.workers(2, trained, 1)] == [expected] * 2
