"""Deterministic kernels agree with torch's CPU kernels, in whose place they are registered here."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import samestep as ss
from samestep.errors import LossError
from samestep.plugins.kernels import KERNELS, replaced_kernels
from samestep.step.guards import REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"
DOUBLE = torch.float64
LABELS = torch.tensor([[[-100, 2, 4], [0, 0, 1]], [[3, 3, -100], [1, 4, 2]]])  # [2, 2, 3]
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0], dtype=DOUBLE)
TARGETS = torch.tensor([[1, 1, 4, 2, 8], [3, 2, 7, 0, 0], [0, 0, 0, 0, 0]])  # of CTC
LENGTHS = {"inputs": torch.tensor([12, 9, 5]), "targets": torch.tensor([5, 3, 0])}
PADDINGS = ("zeros", "border", "reflection")


def values(*shape):
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(shape, dtype=DOUBLE, generator=generator, device="cpu")


def ctc(logits, targets=TARGETS, lengths=LENGTHS["inputs"], **options):
    where = logits.device
    lengths = lengths.to(where), LENGTHS["targets"].to(where)
    return F.ctc_loss(logits.log_softmax(-1), targets.to(where), *lengths, **options)


def concatenated():
    return torch.cat(
        [row[:length] for row, length in zip(TARGETS, LENGTHS["targets"], strict=True)]
    )


# name: (kernels, function, inputs)
CASES = {
    "cross entropy on images, sum": (
        ["nll_loss2d_forward"],
        lambda x: F.cross_entropy(x, LABELS.to(x.device), reduction="sum"),
        [values(2, 5, 2, 3)],
    ),
    "cross entropy on images, weighted mean": (
        ["nll_loss2d_forward"],
        lambda x: F.cross_entropy(x, LABELS.to(x.device), CLASS_WEIGHTS.to(x)),
        [values(2, 5, 2, 3)],
    ),
    "cross entropy on images, none": (
        ["nll_loss2d_forward"],
        lambda x: F.cross_entropy(x, LABELS.to(x.device), reduction="none"),
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
        lambda x: F.ctc_loss(
            x.log_softmax(-1), TARGETS[:2].to(x.device) % 8, [12, 9], [5, 3], blank=8
        ),
        [values(12, 2, 9)],
    ),
    "CTC, no targets": (
        ["_ctc_loss_backward"],
        lambda x: F.ctc_loss(x.log_softmax(-1), TARGETS.to(x.device), [12, 9, 5], [0, 0, 0]),
        [values(12, 3, 9)],
    ),
    "CTC, NaN without a path": (
        ["_ctc_loss_backward"],
        lambda x: ctc(x, lengths=torch.tensor([4, 9, 5]), reduction="none"),
        [values(12, 3, 9)],
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
    "adaptive_max_pool2d of no samples": (
        ["adaptive_max_pool2d_backward"],
        lambda x: F.adaptive_max_pool2d(x, 4),
        [values(0, 3, 7, 11)],
    ),
    "adaptive_max_pool2d to more than the input": (
        ["adaptive_max_pool2d_backward"],
        lambda x: F.adaptive_max_pool2d(x, (9, 5)),
        [values(2, 3, 4, 3)],
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
    "grid_sample next to pixels that are not finite": (
        ["grid_sampler_2d_backward"],
        lambda x, grid: F.grid_sample(
            x.masked_fill(torch.arange(4) == 3, math.inf), grid, align_corners=False
        ),
        [values(2, 3, 5, 4), values(2, 4, 6, 2) - 2],
    ),
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
    "bincount of no values": (
        ["bincount"],
        lambda x: torch.bincount(torch.zeros(0, dtype=torch.int64), x.detach(), 5),
        [values(0)],
    ),
    "median": (["median.dim"], lambda x: torch.median(x, 1), [values(3, 8)]),
    "kthvalue": (
        ["kthvalue"],
        lambda x: torch.kthvalue(x, 3, 0),
        [torch.tensor([[1.0, math.nan], [3.0, 2.0], [2.0, 5.0], [5.0, math.nan]], dtype=DOUBLE)],
    ),
    **{
        f"cumprod {shape}": (["cumprod"], lambda x: torch.cumprod(x, -1), [values(*shape)])
        for shape in ((7,), (1, 7), (2, 7))
    },
    **{
        f"logcumsumexp {shape}": (
            ["_logcumsumexp"],
            lambda x: torch.logcumsumexp(x, -1),
            [values(*shape)],
        )
        for shape in ((7,), (1, 7), (2, 7))
    },
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
        gradients = torch.autograd.grad(
            outputs[0], inputs, values(*outputs[0].shape).to(outputs[0])
        )
    return [output.detach() for output in outputs] + list(gradients)


def compare_on(device, case):
    """Raise `AssertionError` unless a case has the results of CPUs on a device, and equal bits."""
    _, function, inputs = CASES[case]
    expected = results(function, inputs)
    inputs = [value.to(device) for value in inputs]
    with torch.device(device), replaced_kernels(device.upper()):
        actual, again = results(function, inputs), results(function, inputs)
    for value, same, reference in zip(actual, again, expected, strict=True):
        assert value.device.type == device
        torch.testing.assert_close(value.cpu(), reference, equal_nan=True)
        assert value.equal(same) or bool(value.isnan().any())


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


# CPUs have no operation that calls them
WITHOUT_CASE = {"_ctc_loss_backward.Tensor", "cudnn_grid_sampler_backward"}


def test_every_kernel_has_a_case():
    tested = {kernel for kernels, *_ in CASES.values() for kernel in kernels}
    assert tested == KERNELS.keys() - WITHOUT_CASE


def test_sampling_by_cudnn_has_the_gradients_of_torch():
    function = CASES["grid_sample, bilinear, zeros, align_corners=True"][1]
    images, grid = inputs = CASES["grid_sample, bilinear, zeros, align_corners=True"][2]
    _, *expected = results(function, inputs)
    gradient = values(2, 3, 4, 6)
    actual = KERNELS["cudnn_grid_sampler_backward"](images, grid, gradient)
    torch.testing.assert_close(list(actual), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float64])
def test_histograms_of_integers_do_not_overflow(dtype):
    inputs = torch.arange(200).to(dtype)
    with replaced_kernels("CPU"):
        counts = torch.histc(inputs, 50, 0, 199)
    assert counts.dtype == dtype
    assert counts.tolist() == torch.histc(torch.arange(200.0), 50, 0, 199).tolist()


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.cat((x, x), -1)[..., ::2],
}


def resized(data, dimensions):
    return data.draw(st.tuples(*[st.integers(1, 9)] * dimensions))


@settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_kernels_compute_what_torch_computes_for_any_shape_and_layout(data):
    dimensions = data.draw(st.integers(1, 3), "dimensions")
    shape = data.draw(st.tuples(st.integers(0, 2), *[st.integers(1, 6)] * (dimensions + 1)))
    choose = data.draw
    pools = [getattr(F, f"adaptive_{kind}_pool{dimensions}d") for kind in ("avg", "max")]
    pool, size = choose(st.sampled_from(pools)), resized(data, dimensions)
    functions = [lambda x: pool(x, size)]
    modes = [["linear"], ["bilinear", "bicubic"], ["trilinear"]][dimensions - 1]
    options = {
        "size": resized(data, dimensions),
        "mode": choose(st.sampled_from(modes)),
        "align_corners": choose(st.booleans()),
    }
    options["antialias"] = dimensions == 2 and choose(st.booleans())
    functions.append(lambda x: F.interpolate(x, **options))
    pads = [choose(st.integers(0, size - 1)) for size in reversed(shape[2:]) for _ in range(2)]
    functions.append(lambda x: F.pad(x, pads, mode="reflect"))
    if dimensions == 3:
        kernel, stride, dilation = (choose(st.integers(1, 3)) for _ in range(3))
        padding, ceils = choose(st.integers(0, kernel // 2)), choose(st.booleans())
        functions += [
            lambda x: F.max_pool3d(x, kernel, stride, padding, dilation, ceils),
            lambda x: F.avg_pool3d(x, kernel, stride, padding, ceils, ceils),
        ]
    function = choose(st.sampled_from(functions))
    layout = LAYOUTS[choose(st.sampled_from([*LAYOUTS]))]
    inputs = layout(values(*shape))
    try:
        expected = results(function, [inputs])
    except RuntimeError:  # such as a window that is larger than the input
        return
    with replaced_kernels("CPU"):
        actual, again = results(function, [inputs]), results(function, [inputs])
    for value, same, reference in zip(actual, again, expected, strict=True):
        torch.testing.assert_close(value, reference)
        assert value.equal(same)


@settings(derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_ctc_computes_what_torch_computes_for_any_lengths(data):
    steps, batch = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    blank = data.draw(st.integers(0, 3))
    letters = st.integers(0, 3).filter(lambda letter: letter != blank)
    words = data.draw(st.lists(st.lists(letters, max_size=4), min_size=batch, max_size=batch))
    width = max(map(len, words)) + data.draw(st.integers(0, 2))
    padded = torch.tensor([word + [blank] * (width - len(word)) for word in words])
    joined = torch.tensor([letter for word in words for letter in word], dtype=torch.int64)
    targets = data.draw(st.sampled_from([padded.long(), joined]))
    lengths = data.draw(st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    options = {
        "blank": blank,
        "reduction": data.draw(st.sampled_from(["none", "mean", "sum"])),
        "zero_infinity": data.draw(st.booleans()),
    }

    def loss(logits):
        probs = logits.log_softmax(-1)
        return F.ctc_loss(probs, targets, lengths, [len(word) for word in words], **options)

    inputs = [values(steps, batch, 4)]
    expected = results(loss, inputs)
    with replaced_kernels("CPU"):
        actual = results(loss, inputs)
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_computes_what_torch_computes(reduction, weights, smoothing):
    labels = [LABELS, LABELS[:0], torch.full_like(LABELS, -100)]  # some, none, and only ignored
    for of_images in labels:
        inputs = [values(len(of_images), 5, 2, 3).contiguous(memory_format=torch.channels_last)]

        def loss(logits, of_images=of_images):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            return F.cross_entropy(logits, of_images, weights, **options)

        expected = results(loss, inputs)
        with replaced_kernels("CPU"):
            actual = results(loss, inputs)
        torch.testing.assert_close(actual, expected, equal_nan=True)


TRANSFORMED = (
    "cross entropy on images, weighted mean",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "interpolate by a factor",
    "reflection_pad2d",
    "grid_sample, bilinear, zeros, align_corners=False",
    "cumprod (7,)",
    "kthvalue",
)


@pytest.mark.parametrize("case", TRANSFORMED)
def test_kernels_are_called_by_transformed_functions(case):
    _, function, inputs = CASES[case]

    def total(*args):
        outputs = function(*args)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum()

    gradients = torch.func.grad(total, argnums=tuple(range(len(inputs))))
    batched = [torch.stack((value, 2 * value)) for value in inputs]
    expected = torch.func.vmap(gradients)(*batched)
    with replaced_kernels("CPU"):
        torch.testing.assert_close(torch.func.vmap(gradients)(*batched), expected, equal_nan=True)
        for no_gradients in (torch.no_grad, torch.inference_mode):
            with no_gradients():
                total(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            assert total(*[value.float() for value in inputs]).dtype == torch.float32


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
@pytest.mark.parametrize(
    "case",
    [
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool2d",
        "max_pool3d",
        "interpolate by a factor",
        "reflection_pad2d",
        "reflection_pad3d",
    ],
)
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
    [
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "interpolate by a factor",
        "reflection_pad2d",
        "cross entropy on images, weighted mean",
        "avg_pool3d, (False, True, 5)",
        "max_pool3d",
        "cumprod (7,)",
        "logcumsumexp (7,)",
    ],
)
def test_gradients_have_gradients(case):
    _, function, inputs = CASES[case]
    with replaced_kernels("CPU"):
        if "pool" in case or "pad" in case:  # one plane is enough
            inputs = [value[:1, :1] for value in inputs]
        inputs = [value.clone().requires_grad_() for value in inputs]
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
        (lambda: torch.bincount(torch.ones(2)), "integers"),
        (lambda: torch.kthvalue(torch.ones(2, 3), 4, 1), "k must be from 1 to 3, .*, got 4"),
        (lambda: torch.bincount(torch.tensor([1]), torch.ones(2)), r"the shape \[1\] of the input"),
        (lambda: torch.histc(torch.ones(3), 0), "bins must be at least 1, got 0"),
        (lambda: torch.histc(torch.ones(3), 3, 2, 1), "must be finite and increase"),
    ],
)
def test_bad_input_is_refused(call, message):
    with replaced_kernels("CPU"), pytest.raises(RuntimeError, match=message):
        call()


SECTION = DOCUMENT.read_text("utf-8").partition("## Deterministic kernels")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("| ") and line.count("|") == 9
][1:]  # (operation, what happens, since, prefixes of cases, error, memory, times)


def cases_of(row):
    return [case for case in CASES if case.startswith(tuple(re.findall("`([^`]+)`", row[3])))]


def test_documentation_names_every_operation_that_torch_refuses():
    """The list is that of the installed torch, so a new version may add rows."""
    text = torch.use_deterministic_algorithms.__doc__
    refused = text.partition("operations will throw a")[2].partition("In addition,")[0]
    names = re.findall(r"(?m)^        \* :\w+:`([\w.]+)`", refused)
    assert len(names) > 20
    missing = [name for name in names if f"`{name.rpartition('.')[2]}" not in SECTION]
    assert not missing
    assert all(part in SECTION for part in REFUSED)


def test_each_case_belongs_to_a_row_of_the_documentation():
    assert all(all(row) for row in ROWS)
    assert sorted(case for row in ROWS for case in cases_of(row)) == sorted(CASES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[3].replace("`", ""))
def test_errors_are_those_of_the_documentation(row):
    for case in cases_of(row):
        _, function, inputs = CASES[case]
        expected = results(function, inputs)
        with replaced_kernels("CPU"):
            actual = results(function, inputs, torch.float32)
        for value, reference in zip(actual, expected, strict=True):
            finite = reference.isfinite()
            if finite.any():
                largest = float(reference[finite].abs().max())
                error = float((value.double() - reference)[finite].abs().max())
                assert error <= float(row[4]) * largest, case


# as an operation of torch: its frames are not those of a user
REFUSED_OPERATION = """
class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, operation, fails_in_backward):
        ctx.operation = operation
        if not fails_in_backward:
            raise RuntimeError(REFUSAL.format(operation))
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(REFUSAL.format(ctx.operation))
"""
REFUSAL = "{} does not have a deterministic implementation, but you set 'torch.use_deter...'"


# as torch and torchvision name them
REFUSED_NAMES = {
    "max_unpooling2d_forward_out": "torch.zeros(...).scatter",
    "put_": "index_put_",
    "embedding_bag_backward_cuda_max": "torch.nn.Embedding and a maximum",
    "scatter_reduce_cuda_prod_": "reduce='sum' of logarithms",
    "index_reduce_cuda": "index_add_",
    "roi_pool_backward_kernel": "torchvision.ops.roi_align",
    "ps_roi_align_backward_kernel": "torchvision.ops.roi_align",
    "compute_grad_input": "torch.nn.functional.grid_sample",
    "deform_conv2d": "torch.nn.functional.grid_sample",
    "quantized_resize_cpu_": "a new tensor",
    "median CUDA with indices output": "torch.median without out=",
    "_histc_cuda with floating point input": "torch.histc without out=",
    "_bincount_cuda": "torch.bincount without out=",
}


def test_every_refused_operation_has_a_name():
    assert all(any(part in name for name in REFUSED_NAMES) for part in REFUSED)


@pytest.mark.parametrize("fails_in_backward", [False, True])
def test_the_line_that_calls_a_refused_operation_is_named(fails_in_backward):
    names = {"torch": torch, "REFUSAL": REFUSAL}
    exec(compile(REFUSED_OPERATION, torch.__file__, "exec"), names)
    errors = {}
    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Linear(2, 1))
        for batch in run.batches([torch.ones(2)] * 4, 4, steps=1):
            for name in REFUSED_NAMES:

                def loss(model, batch, name=name):
                    value = model(batch)
                    return names["Refused"].apply(value, name, fails_in_backward).mean()  # the line

                with pytest.raises(LossError) as caught:
                    run.backward(loss, model, batch)
                errors[name] = str(caught.value)
    for name, advice in REFUSED_NAMES.items():
        assert errors[name].startswith(f"{name} has no deterministic kernel")
        assert f"; use {advice}" in errors[name]
        assert re.search(
            rf"{re.escape(__file__)}:\d+ calls it: .*  # the line; use", errors[name]
        ), errors[name]
