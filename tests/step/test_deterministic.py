"""Deterministic kernels agree with torch's CPU kernels, in whose place they are registered here."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep as ss
from samestep.errors import LossError
from samestep.step.deterministic import KERNELS, REFUSED, replaced_kernels

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"
DOUBLE = torch.float64
LABELS = torch.tensor([[[-100, 2, 4], [0, 0, 1]], [[3, 3, -100], [1, 4, 2]]])  # [2, 2, 3]
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0], dtype=DOUBLE)
TARGETS = torch.tensor([[1, 1, 4, 2, 8], [3, 2, 7, 0, 0], [0, 0, 0, 0, 0]])  # of CTC
LENGTHS = {"inputs": torch.tensor([12, 9, 5]), "targets": torch.tensor([5, 3, 0])}
PADDINGS = ("zeros", "border", "reflection")


def values(*shape):
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def ctc(logits, targets=TARGETS, lengths=LENGTHS["inputs"], **options):
    probs = logits.log_softmax(-1)
    return F.ctc_loss(probs, targets, lengths, LENGTHS["targets"], **options)


def concatenated():
    return torch.cat(
        [row[:length] for row, length in zip(TARGETS, LENGTHS["targets"], strict=True)]
    )


# name: (kernels, function, inputs)
CASES = {
    "cross entropy on images, sum": (
        ["nll_loss2d_forward"],
        lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
        [values(2, 5, 2, 3)],
    ),
    "cross entropy on images, weighted mean": (
        ["nll_loss2d_forward"],
        lambda x: F.cross_entropy(x, LABELS, CLASS_WEIGHTS.to(x.dtype)),
        [values(2, 5, 2, 3)],
    ),
    "cross entropy on images, none": (
        ["nll_loss2d_forward"],
        lambda x: F.cross_entropy(x, LABELS, reduction="none"),
        [values(2, 5, 2, 3)],
    ),
    "CTC": (["_ctc_loss_backward"], ctc, [values(12, 3, 9)]),
    "CTC, targets in one dimension": (
        ["_ctc_loss_backward"],
        lambda x: ctc(x, concatenated(), reduction="sum"),
        [values(12, 3, 9)],
    ),
    "CTC, lists of lengths, last blank": (
        ["_ctc_loss_backward"],
        lambda x: F.ctc_loss(x.log_softmax(-1), TARGETS[:2] % 8, [12, 9], [5, 3], blank=8),
        [values(12, 2, 9)],
    ),
    "CTC, too short inputs": (
        ["_ctc_loss_backward"],
        lambda x: ctc(x, lengths=torch.tensor([4, 9, 5]), zero_infinity=True, reduction="none"),
        [values(12, 3, 9)],
    ),
    "adaptive_avg_pool2d": (
        ["_adaptive_avg_pool2d_backward"],
        lambda x: F.adaptive_avg_pool2d(x, (3, 7)),
        [values(2, 3, 5, 11)],
    ),
    "adaptive_avg_pool3d": (
        ["_adaptive_avg_pool3d_backward"],
        lambda x: F.adaptive_avg_pool3d(x, (2, 9, 1)),
        [values(2, 3, 4, 6, 5)],
    ),
    "adaptive_max_pool2d": (
        ["adaptive_max_pool2d_backward"],
        lambda x: F.adaptive_max_pool2d(x, 4),
        [values(2, 3, 7, 11)],
    ),
    "adaptive_max_pool2d of one sample": (
        ["adaptive_max_pool2d_backward"],
        lambda x: F.adaptive_max_pool2d(x, 4),
        [values(3, 7, 11)],
    ),
    "adaptive_max_pool3d": (
        ["adaptive_max_pool3d_backward"],
        lambda x: F.adaptive_max_pool3d(x, (2, 3, 4)),
        [values(2, 3, 4, 7, 5)],
    ),
    "max_pool3d": (
        ["max_pool3d_with_indices_backward"],
        lambda x: F.max_pool3d(x, 3, 2, 1),
        [values(2, 3, 4, 7, 5)],
    ),
    "fractional_max_pool2d": (
        ["fractional_max_pool2d_backward"],
        lambda x: F.fractional_max_pool2d(
            x, 2, (4, 5), _random_samples=torch.full((2, 3, 2), 0.4, dtype=x.dtype)
        ),
        [values(2, 3, 7, 11)],
    ),
    "fractional_max_pool3d": (
        ["fractional_max_pool3d_backward"],
        lambda x: F.fractional_max_pool3d(
            x, 2, (3, 4, 5), _random_samples=torch.full((2, 3, 3), 0.4, dtype=x.dtype)
        ),
        [values(2, 3, 6, 7, 11)],
    ),
    **{
        f"avg_pool3d, {options}": (
            ["avg_pool3d_backward"],
            lambda x, options=options: F.avg_pool3d(x, (2, 3, 2), 2, (0, 1, 1), *options),
            [values(2, 2, 4, 6, 5)],
        )
        for options in itertools.product((False, True), (False, True), (None, 5))
    },
    **{
        f"{kernel} of {size}, align_corners={aligns}": (
            [f"{kernel}_backward"],
            lambda x, name=kernel, size=size, aligns=aligns: getattr(torch.ops.aten, name)(
                x, size[: x.ndim - 2], aligns, *[None] * (x.ndim - 2)
            ),
            [values(2, 3, *shape)],
        )
        for kernel, shape in {
            "upsample_linear1d": (5,),
            "upsample_bilinear2d": (5, 4),
            "upsample_trilinear3d": (3, 5, 4),
            "upsample_bicubic2d": (5, 4),
            "_upsample_bilinear2d_aa": (5, 4),
            "_upsample_bicubic2d_aa": (5, 4),
        }.items()
        for size in ((9, 3, 1), (1, 13, 7))
        for aligns in (False, True)
    },
    "interpolate by a factor": (
        ["upsample_bicubic2d_backward"],
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
        [values(2, 3, 5, 4)],
    ),
    "reflection_pad1d": (
        ["reflection_pad1d_backward"],
        lambda x: F.pad(x, (2, 3), mode="reflect"),
        [values(2, 3, 5)],
    ),
    "reflection_pad2d": (
        ["reflection_pad2d_backward"],
        lambda x: F.pad(x, (2, 3, 1, 0), mode="reflect"),
        [values(2, 3, 5, 4)],
    ),
    "reflection_pad3d": (
        ["reflection_pad3d_backward"],
        lambda x: F.pad(x, (2, 3, 1, 0, 1, 2), mode="reflect"),
        [values(2, 3, 4, 5, 4)],
    ),
    **{
        f"grid_sample, {mode}, {padding}, align_corners={aligns}": (
            ["grid_sampler_2d_backward"],
            lambda x, grid, options=(mode, padding, aligns): F.grid_sample(x, grid, *options),
            [values(2, 3, 5, 4), 1.3 * values(2, 4, 6, 2)],
        )
        for mode, padding, aligns in itertools.product(
            ("bilinear", "nearest", "bicubic"), PADDINGS, (False, True)
        )
    },
    **{
        f"grid_sample of volumes, {mode}, {padding}": (
            ["grid_sampler_3d_backward"],
            lambda x, grid, options=(mode, padding, False): F.grid_sample(x, grid, *options),
            [values(2, 3, 3, 5, 4), 1.3 * values(2, 2, 4, 3, 3)],
        )
        for mode, padding in itertools.product(("bilinear", "nearest"), PADDINGS)
    },
    "bincount": (
        ["bincount"],
        lambda x: torch.bincount(torch.arange(8) % 3, x.detach(), 5),
        [values(8)],
    ),
    "bincount without weights": (
        ["bincount"],
        lambda _: torch.bincount(torch.arange(8) % 3),
        [values(1)],
    ),
    "histc": (["histc"], lambda x: torch.histc(x.detach(), 7, -1, 1), [values(50)]),
    "histc of all": (["histc"], lambda x: torch.histc(x.detach(), 7), [values(50)]),
    "median": (["median.dim"], lambda x: torch.median(x, 1), [values(3, 8)]),
    "nanmedian": (
        ["nanmedian.dim"],
        lambda x: torch.nanmedian(x, 0, keepdim=True),
        [torch.tensor([[1.0, math.nan], [3.0, 2.0], [2.0, 5.0]], dtype=DOUBLE)],
    ),
    "median with NaN": (
        ["median.dim"],
        lambda x: torch.median(x, 0),
        [torch.tensor([[1.0, math.nan], [3.0, 2.0], [2.0, 5.0]], dtype=DOUBLE)],
    ),
}


def results(function, inputs, dtype=DOUBLE):
    """Return the outputs of a function and the gradients of its inputs."""
    inputs = [value.to(dtype).requires_grad_() for value in inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    gradients = []
    if outputs[0].requires_grad:
        gradients = torch.autograd.grad(outputs[0], inputs, values(*outputs[0].shape).to(dtype))
    return [output.detach() for output in outputs] + list(gradients)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each kernel."""
    numbers = dict.fromkeys(KERNELS, 0)

    def counted(name, kernel):
        def call(*args, **kwargs):
            numbers[name] += 1
            return kernel(*args, **kwargs)

        return call

    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, counted(name, kernel))
    return numbers


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_torch_computes(calls, case):
    kernels, function, inputs = CASES[case]
    expected = results(function, inputs)
    with replaced_kernels("CPU"):
        actual, again = results(function, inputs), results(function, inputs)
        narrow = results(function, inputs, torch.float32)
    assert {name for name, number in calls.items() if number} == set(kernels)
    for value, same, single, reference in zip(actual, again, narrow, expected, strict=True):
        torch.testing.assert_close(value, reference, equal_nan=True)
        assert value.stride() == reference.stride()
        assert value.equal(same) or bool(value.isnan().any())
        torch.testing.assert_close(
            single.double(), reference.double(), rtol=1e-4, atol=1e-5, equal_nan=True
        )
        assert single.dtype in {torch.float32, value.dtype}


def test_every_kernel_has_a_case():
    tested = {kernel for kernels, *_ in CASES.values() for kernel in kernels}
    assert tested == KERNELS.keys() - {"_ctc_loss_backward.Tensor"}


def test_ctc_takes_lengths_that_are_on_the_device():
    probs, gradient = values(12, 3, 9).log_softmax(-1), values(3)
    lengths = [LENGTHS["inputs"], LENGTHS["targets"]]
    nll, alpha = torch.ops.aten._ctc_loss(probs, TARGETS, *map(Tensor.tolist, lengths))
    arguments = [nll, alpha, 0]
    expected = torch.ops.aten._ctc_loss_backward(
        gradient, probs, TARGETS, *map(Tensor.tolist, lengths), *arguments
    )
    actual = KERNELS["_ctc_loss_backward.Tensor"](gradient, probs, TARGETS, *lengths, *arguments)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["adaptive_avg_pool2d", "adaptive_max_pool2d", "reflection_pad2d"])
def test_16_bit_gradients_are_added_in_float32(dtype, case):
    _, function, inputs = CASES[case]
    expected = results(function, [value.to(dtype) for value in inputs])
    with replaced_kernels("CPU"):
        actual = results(function, inputs, dtype)
    assert all(value.dtype == dtype for value in actual)
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=4e-3 * 4, atol=1e-2)


@pytest.mark.parametrize("case", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
def test_gradients_have_the_memory_format_of_inputs(case):
    _, function, [inputs] = CASES[case]
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    with replaced_kernels("CPU"):
        *_, gradient = results(function, [inputs])
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "case",
    ["adaptive_avg_pool2d", "adaptive_max_pool2d", "interpolate by a factor", "reflection_pad2d"],
)
def test_gradients_have_gradients(case):
    _, function, inputs = CASES[case]
    with replaced_kernels("CPU"):
        inputs = [value[:1, :1].clone().requires_grad_() for value in inputs]
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.long
def test_compiled_code_calls_the_kernels(calls, monkeypatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # of its thread, which torch would start

    def loss(images):
        return F.cross_entropy(F.adaptive_avg_pool2d(images, (2, 3)), LABELS)

    expected = results(loss, [values(2, 5, 7, 6)])
    with replaced_kernels("CPU"):
        actual = results(torch.compile(loss, backend="aot_eager"), [values(2, 5, 7, 6)])
    assert calls["nll_loss2d_forward"]
    assert calls["_adaptive_avg_pool2d_backward"]
    torch.testing.assert_close(actual, expected)


def test_torchs_own_kernels_return_afterwards(calls):
    with pytest.raises(ZeroDivisionError), replaced_kernels("CPU"):
        raise ZeroDivisionError
    _, function, inputs = CASES["adaptive_avg_pool2d"]
    results(function, inputs)
    assert not any(calls.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.bincount(torch.tensor([1, -1])), "at least 0"),
        (lambda: torch.bincount(torch.tensor([1]), torch.ones(2)), r"the shape \[1\] of the input"),
        (lambda: torch.histc(torch.ones(3), 0), "bins must be at least 1, got 0"),
        (lambda: torch.histc(torch.ones(3), 3, 2, 1), "must be finite and increase"),
    ],
)
def test_bad_input_is_refused(call, message):
    with replaced_kernels("CPU"), pytest.raises(RuntimeError, match=message):
        call()


def test_documentation_names_every_operation_that_torch_refuses():
    """The list is that of the installed torch, so a new version may add rows."""
    text = torch.use_deterministic_algorithms.__doc__
    refused = text.partition("operations will throw a")[2].partition("In addition,")[0]
    names = re.findall(r"(?m)^        \* :\w+:`([\w.]+)`", refused)
    assert len(names) > 20
    table = (
        DOCUMENT.read_text("utf-8").partition("## Deterministic kernels")[2].partition("\n## ")[0]
    )
    missing = [name for name in names if f"`{name.rpartition('.')[2]}" not in table]
    assert not missing
    assert all(part in table for part in REFUSED)


# as an operation of torch: its frames are not those of a user
REFUSED_OPERATION = """
class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, fails):
        if fails == "forward":
            raise RuntimeError(REFUSAL.format("max_unpooling2d_forward_out_cuda"))
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(REFUSAL.format("embedding_bag_backward_cuda_max"))
"""
REFUSAL = "{} does not have a deterministic implementation, but you set 'torch.use_deter...'"


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("forward", "max_unpooling2d_forward_out_cuda .*; use torch.zeros"),
        ("backward", "embedding_bag_backward_cuda_max .*; use torch.nn.Embedding and a maximum"),
    ],
)
def test_the_line_that_calls_a_refused_operation_is_named(fails, message):
    names = {"torch": torch, "REFUSAL": REFUSAL}
    exec(compile(REFUSED_OPERATION, torch.__file__, "exec"), names)

    def loss(model, batch):
        return names["Refused"].apply(model(batch), fails).mean()  # the line

    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Linear(2, 1))
        for batch in run.batches([torch.ones(2)] * 4, 4, steps=1):
            with pytest.raises(LossError, match=message) as caught:
                run.backward(loss, model, batch)
            assert re.search(
                rf"{re.escape(__file__)}:\d+ calls it: .*  # the line", str(caught.value)
            )
