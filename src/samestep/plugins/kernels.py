"""Deterministic CUDA kernels for operations that torch refuses in deterministic mode.

torch's own kernels of these operations add floats atomically, in an order that changes from one
call to the next. `replaced_kernels` registers those of this file with torch's dispatcher, so that
calls from Python, C++ and compiled code all reach them. Each adds in a fixed order:

- A linear map that acts on each dimension alone (interpolation, average pooling, reflection)
  becomes, per dimension, one gather and one sum over the positions that an input contributes to.
- A pooling that keeps the positions of its maxima becomes an `index_put_`, which torch sorts.
- The others are computed from operations that torch has deterministic kernels for.

docs/gpu.md has a table of all operations, with what each costs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

aten: Any = torch.ops.aten
Line = Callable[..., Tensor]  # of a dimension: [inputs, length] -> [inputs, output length]
ZEROS, REFLECTION = 0, 2  # paddings of grid_sample; 1 is that of the border
LINEAR, NEAREST, BICUBIC = 0, 1, 2  # its modes
NO_REDUCTION, MEAN = 0, 1
CUBIC: Final = -0.75  # torch's parameter of bicubic interpolation


@contextmanager
def replaced_kernels(dispatch_key: str = "CUDA") -> Iterator[None]:
    """Register the kernels of this file with torch's dispatcher until the block ends."""
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():  # about replacing a kernel, which is what is wanted
            warnings.simplefilter("ignore")
            for name, kernel in KERNELS.items():
                library.impl(name, kernel, dispatch_key)
        yield
    finally:
        del library  # torch removes the kernels of a library that is garbage collected


# Linear maps that act on each dimension alone ------------------------------------------------


class Taps(NamedTuple):
    """Per input position, the output positions that it contributes to, padded to one number."""

    positions: Tensor  # int64[inputs * taps]
    weights: Tensor  # [inputs, taps]; 0 where padded


@lru_cache(maxsize=256)
def _taps(operation: str, arguments: tuple[Any, ...], size: int, where: torch.device) -> Taps:
    """Return the taps of an operation, which is applied to each unit vector on the CPU."""
    matrix = LINES[operation](torch.eye(size, dtype=torch.float64), *arguments)  # [inputs, outputs]
    taps = max(1, int((matrix != 0).sum(1).max()))
    # nonzero ones first, in the order of outputs
    positions = (matrix == 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, :taps]
    weights = matrix.gather(1, positions)
    return Taps(positions.flatten().to(where), weights.to(where))


def _transposed(gradient: Tensor, dimension: int, taps: Taps) -> Tensor:
    """Return the gradient of one dimension's inputs from that of its outputs."""
    gathered = gradient.index_select(dimension, taps.positions)
    gathered = gathered.unflatten(dimension, taps.weights.shape)  # [..., inputs, taps, ...]
    shape = [1] * gathered.ndim
    shape[dimension : dimension + 2] = taps.weights.shape
    weights = taps.weights.to(gathered.dtype).view(shape)
    result: Tensor = (gathered * weights).sum(dimension + 1)
    return result


def _separable(
    gradient: Tensor,
    operation: str,
    sizes: Sequence[int],
    arguments: Sequence[tuple[Any, ...]],
    like: Tensor,
) -> Tensor:
    """Return the gradient [..., *sizes] of the last dimensions, each with its arguments.

    It gets the memory format of `like`.
    """
    first = gradient.ndim - len(sizes)
    result = gradient.to(_accumulation_dtype(gradient))
    for offset, (size, options) in enumerate(zip(sizes, arguments, strict=True)):
        taps = _taps(operation, options, size, gradient.device)
        result = _transposed(result, first + offset, taps)
    return result.to(gradient.dtype).contiguous(memory_format=_memory_format(like))


def _interpolation(operation: str) -> Callable[..., Tensor]:
    def backward(
        gradient: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> Tensor:
        scales += (None,) * (len(output_size) - len(scales))
        arguments = [
            (size, align_corners, scale) for size, scale in zip(output_size, scales, strict=True)
        ]
        return _separable(gradient, operation, input_size[2:], arguments, gradient)

    return backward


def _adaptive_avg_pool_backward(gradient: Tensor, inputs: Tensor, *, dimensions: int) -> Tensor:
    arguments = [(size,) for size in gradient.shape[-dimensions:]]
    return _separable(gradient, "adaptive_avg_pool", inputs.shape[-dimensions:], arguments, inputs)


def _avg_pool3d_backward(  # noqa: PLR0917 (torch passes all by position)
    gradient: Tensor,
    inputs: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    kernel_size, padding = _per_dimension(kernel_size), _per_dimension(padding)
    stride = _per_dimension(stride) if stride else kernel_size
    arguments = [
        (*of_dimension, ceil_mode, count_include_pad, None if divisor_override is None else 1)
        for of_dimension in zip(kernel_size, stride, padding, strict=True)
    ]
    result = _separable(gradient, "avg_pool", inputs.shape[-3:], arguments, inputs)
    return result if divisor_override is None else result / divisor_override


def _reflection_pad_backward(gradient: Tensor, inputs: Tensor, padding: Sequence[int]) -> Tensor:
    dimensions = len(padding) // 2  # padding has the last dimension first
    arguments = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(dimensions))]
    return _separable(gradient, "reflection_pad", inputs.shape[-dimensions:], arguments, inputs)


def _interpolate_line(
    values: Tensor,
    size: int,
    align_corners: bool,
    scale: float | None,
    *,
    operation: str,
) -> Tensor:
    forward: Line = getattr(aten, operation)
    if operation == "upsample_linear1d":
        return forward(values[:, None], [size], align_corners, scale)[:, 0]
    # in the last dimension of an image with one row; the scale of the other one is 1
    image = values[:, None, None]
    return forward(image, [1, size], align_corners, None, scale)[:, 0, 0]


def _avg_pool_line(
    values: Tensor,
    kernel_size: int,
    stride: int,
    padding: int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    per_dimension = [(1, 1, number) for number in (kernel_size, stride)]
    options = (ceil_mode, count_include_pad, divisor_override)
    volume = values[:, None, None, None]
    pooled: Tensor = aten.avg_pool3d(volume, *per_dimension, (0, 0, padding), *options)
    return pooled[:, 0, 0, 0]


LINES: Final[dict[str, Line]] = {
    "linear": partial(_interpolate_line, operation="upsample_linear1d"),
    "bicubic": partial(_interpolate_line, operation="upsample_bicubic2d"),
    "antialiased bilinear": partial(_interpolate_line, operation="_upsample_bilinear2d_aa"),
    "antialiased bicubic": partial(_interpolate_line, operation="_upsample_bicubic2d_aa"),
    "adaptive_avg_pool": lambda values, size: aten._adaptive_avg_pool2d(  # noqa: SLF001
        values[:, None, None], [1, size]
    )[:, 0, 0],
    "avg_pool": _avg_pool_line,
    "reflection_pad": lambda values, *padding: aten.reflection_pad1d(values[:, None], padding)[
        :, 0
    ],
}


# Poolings that keep the positions of their maxima -------------------------------------------


def _max_pool_backward(
    gradient: Tensor, inputs: Tensor, *arguments: Any, dimensions: int
) -> Tensor:
    """Add each output's gradient to the input that `arguments[-1]` names within its plane."""
    size = math.prod(inputs.shape[-dimensions:])
    planes = math.prod(inputs.shape[:-dimensions])  # 0 in an empty batch
    indices = (
        arguments[-1].flatten(-dimensions).reshape(planes, math.prod(gradient.shape[-dimensions:]))
    )
    starts = torch.arange(planes, device=indices.device)[:, None] * size
    result = _added_up(planes * size, indices + starts, gradient)
    memory_format = _memory_format(inputs)
    return result.view(inputs.shape).to(gradient.dtype).contiguous(memory_format=memory_format)


# grid_sample --------------------------------------------------------------------------------


class GridTap(NamedTuple):
    """One of the input positions in one dimension that a sample is interpolated from."""

    position: Tensor  # int64[batch, outputs]
    weight: Tensor
    slope: Tensor  # the derivative of the weight by the grid's coordinate


def _grid_sampler_backward(
    gradient: Tensor,
    inputs: Tensor,
    grid: Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    batch, channels, *sizes = inputs.shape
    pixels = math.prod(sizes)
    dtype = _accumulation_dtype(gradient)
    rows = gradient.to(dtype).flatten(2).transpose(1, 2)  # [batch, outputs, channels]
    flat_inputs = inputs.to(dtype).flatten(2).transpose(1, 2).reshape(batch * pixels, channels)
    coordinates = grid.to(dtype).flatten(1, -2)  # [batch, outputs, dimensions], the last size first
    taps = [
        _grid_taps(coordinates[..., -1 - i], size, mode, padding, align_corners)
        for i, size in enumerate(sizes)
    ]
    samples = torch.arange(batch, device=grid.device)[:, None] * pixels
    slopes_added = [torch.zeros_like(coordinates[..., 0]) for _ in sizes]  # [batch, outputs] each
    positions, sources = [], []
    for corner in product(*taps):
        position, inside = samples, torch.ones((), dtype=torch.bool, device=grid.device)
        stride = pixels
        for tap, size in zip(corner, sizes, strict=True):
            stride //= size
            inside = inside & (tap.position >= 0) & (tap.position < size)
            position = position + tap.position.clamp(0, size - 1) * stride
        if output_mask[0]:
            weight = inside * math.prod(tap.weight for tap in corner)
            positions.append(position)
            sources.append(rows * weight[..., None])
        if output_mask[1] and mode != NEAREST:
            products = (flat_inputs[position] * rows).sum(-1)  # [batch, outputs]
            values = torch.where(inside, products, 0)  # even if what is clamped to is not finite
            for i in range(len(sizes)):
                slopes = [tap.slope if j == i else tap.weight for j, tap in enumerate(corner)]
                slopes_added[i] += values * math.prod(slopes)
    input_gradient = None
    if output_mask[0]:
        flat = torch.zeros_like(flat_inputs)
        flat.index_put_(
            (torch.stack(positions).flatten(),), torch.stack(sources).flatten(0, 2), True
        )
        input_gradient = flat.view(batch, pixels, channels).transpose(1, 2).reshape(inputs.shape)
        input_gradient = input_gradient.to(inputs.dtype).contiguous()
    if not output_mask[1]:
        return input_gradient, None
    grid_gradient = torch.stack(slopes_added[::-1], -1)  # the last size first
    return input_gradient, grid_gradient.view(grid.shape).to(grid.dtype)


def _cudnn_grid_sampler_backward(
    inputs: Tensor, grid: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return both gradients of the images that torch samples with cuDNN, which adds atomically.

    torch refuses it since 2.13; older versions do not notice it.
    """
    return _grid_sampler_backward(gradient, inputs, grid, LINEAR, ZEROS, True, (True, True))


def _grid_taps(
    coordinate: Tensor,
    size: int,
    mode: int,
    padding: int,
    align_corners: bool,
) -> list[GridTap]:
    """Return the taps of one dimension, from a coordinate from -1 to 1."""
    slope = (size - 1) / 2 if align_corners else size / 2
    pixel = (coordinate + 1) * slope - (0 if align_corners else 0.5)
    if mode == BICUBIC:  # pads each tap instead
        low = pixel.floor()
        weights = _cubic(pixel - low)
        return [
            GridTap(_padded(low + i - 1, size, padding, align_corners)[0].long(), w, s * slope)
            for i, (w, s) in enumerate(weights)
        ]
    pixel, factor = _padded(pixel, size, padding, align_corners)
    if mode == NEAREST:
        return [GridTap(pixel.round().long(), torch.ones_like(pixel), torch.zeros_like(pixel))]
    low = pixel.floor()
    part, slopes = pixel - low, factor * slope
    return [
        GridTap(low.long(), 1 - part, -slopes),
        GridTap(low.long() + 1, part, slopes),
    ]


def _padded(
    pixel: Tensor,
    size: int,
    padding: int,
    align_corners: bool,
) -> tuple[Tensor, Tensor]:
    """Return a coordinate in pixels as the padding maps it, and the derivative of that."""
    factor = torch.ones_like(pixel)
    if padding == ZEROS:
        # far outside, also if it is not finite, as torch has it
        return pixel.nan_to_num(-100.0).clamp(-100.0, size + 100.0), factor
    if padding == REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(pixel), torch.zeros_like(pixel)
        distance = pixel - low
        factor = torch.where(distance < 0, -factor, factor)
        flips = (distance.abs() / span).floor()
        extra = distance.abs() - flips * span
        is_flipped = flips.remainder(2) == 1
        pixel = torch.where(is_flipped, span - extra, extra) + low
        factor = torch.where(is_flipped, -factor, factor)
    outside = (pixel <= 0) | (pixel >= size - 1)
    return pixel.clamp(0, size - 1).nan_to_num(0.0), factor.masked_fill(outside, 0)


def _cubic(part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return weights of the four nearest pixels and their derivatives (Keys, 1981)."""

    def near(x: Tensor) -> tuple[Tensor, Tensor]:  # |x| <= 1
        return (
            ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1,
            (3 * (CUBIC + 2) * x - 2 * (CUBIC + 3)) * x,
        )

    def far(x: Tensor) -> tuple[Tensor, Tensor]:  # 1 < |x| < 2
        return (
            ((x - 5) * x + 8) * x * CUBIC - 4 * CUBIC,
            ((3 * x - 10) * x + 8) * CUBIC,
        )

    mirrored = [near(1 - part), far(2 - part)]  # their distance falls as `part` grows
    return [far(part + 1), near(part), *((weight, -slope) for weight, slope in mirrored)]


# Losses -------------------------------------------------------------------------------------


def _nll_loss2d_forward(
    inputs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    dtype = _accumulation_dtype(inputs)
    kept = target != ignore_index  # [batch, height, width]
    classes = torch.where(kept, target, 0)
    picked = inputs.gather(1, classes[:, None])[:, 0].to(dtype)
    weights = torch.ones_like(picked) if weight is None else weight.to(dtype)[classes]
    losses = torch.where(kept, -picked * weights, 0)
    if reduction == NO_REDUCTION:
        return losses.to(inputs.dtype), inputs.new_zeros(())
    total, total_weight = losses.sum(), torch.where(kept, weights, 0).sum()
    loss = total / total_weight if reduction == MEAN else total
    return loss.to(inputs.dtype), total_weight.to(inputs.dtype)


def _ctc_loss_backward(  # noqa: PLR0917
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int] | Tensor,
    target_lengths: Sequence[int] | Tensor,
    negative_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,  # noqa: FBT002
) -> Tensor:
    """Return the gradient of `log_probs` by the backward recursion in log space (Graves, 2006)."""
    steps, batch, classes = log_probs.shape
    where = log_probs.device
    inputs = torch.as_tensor(input_lengths, device=where)[:, None]  # [batch, 1]
    states = torch.as_tensor(target_lengths, device=where)[:, None] * 2 + 1
    labels = _ctc_labels(targets, states, log_alpha.shape[2], blank)  # [batch, states]
    label_probs = log_probs.gather(2, labels.expand(steps, -1, -1))  # [steps, batch, states]
    impossible = label_probs.new_full((batch, 2), -math.inf)
    state = torch.arange(labels.shape[1], device=where)
    ends = (state == states - 1) | (state == states - 2)
    last = torch.where(ends, 0.0, -math.inf).to(label_probs.dtype)
    # a label may follow another one without a blank between them
    skips = torch.zeros_like(labels, dtype=torch.bool)
    skips[:, :-2] = labels[:, :-2] != labels[:, 2:]

    log_beta = torch.empty_like(label_probs)
    following = torch.full_like(last, -math.inf)
    for step in reversed(range(steps)):
        padded = torch.cat((following, impossible), 1)
        skipping = padded[:, 2:].masked_fill(~skips, -math.inf)
        paths = torch.stack((following, padded[:, 1:-1], skipping)).logsumexp(0)
        paths = torch.where(inputs == step + 1, last, paths)
        following = torch.where(
            (inputs > step) & (state < states), paths + label_probs[step], -math.inf
        )
        log_beta[step] = following
    # Both recursions contain the probability of the state itself.
    log_alpha = log_alpha.transpose(0, 1)
    possible = (log_alpha > -math.inf) & (log_beta > -math.inf)
    nll = negative_log_likelihood[:, None]
    occupied = torch.where(possible, (log_alpha + log_beta - label_probs + nll).exp(), 0)
    starts = torch.arange(steps * batch, device=where).view(steps, batch, 1) * classes
    per_class = _added_up(steps * batch * classes, labels + starts, occupied).view(log_probs.shape)
    result = (log_probs.exp() - per_class) * gradient[:, None]
    # no path of that length has the target: torch's gradient is NaN, too
    result = torch.where(nll == math.inf, 0 if zero_infinity else math.nan, result)
    in_range = torch.arange(steps, device=where)[:, None, None] < inputs
    return torch.where(in_range, result, 0)


def _ctc_labels(targets: Tensor, states: Tensor, width: int, blank: int) -> Tensor:
    """Return the labels of all states, [batch, width]: blanks around and between the targets."""
    label = torch.arange(width // 2, device=states.device)
    lengths = states // 2
    if targets.ndim == 1:  # one after the other
        position = (lengths.cumsum(0) - lengths + label).clamp(max=max(len(targets) - 1, 0))
        values = targets.to(states.device)[position] if len(targets) else position
    else:
        values = targets.to(states.device)[:, : width // 2]
    labels = torch.full((len(states), width), blank, device=states.device)
    labels[:, 1::2] = torch.where(label < lengths, values, blank)
    return labels


# Counts and order statistics ----------------------------------------------------------------


def _bincount(inputs: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength < 0:
        raise RuntimeError(f"minlength must be at least 0, got {minlength}")
    is_integer = not (inputs.is_floating_point() or inputs.is_complex())
    if inputs.ndim != 1 or not is_integer or (inputs.numel() and int(inputs.min()) < 0):
        raise RuntimeError("bincount needs one dimension of integers that are at least 0")
    if weights is not None and weights.shape != inputs.shape:
        raise RuntimeError(f"weights must have the shape {list(inputs.shape)} of the input")
    size = max(minlength, int(inputs.max()) + 1) if inputs.numel() else minlength
    if weights is None or not inputs.numel():  # as torch does
        values = torch.ones_like(inputs, dtype=torch.int64)
    else:
        values = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    return _added_up(size, inputs.long(), values)


def _histc(inputs: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    if bins <= 0:
        raise RuntimeError(f"bins must be at least 1, got {bins}")
    inputs = inputs.flatten()
    low, high = torch.tensor([min, max], dtype=inputs.dtype).tolist()
    if low == high and inputs.numel():
        low, high = inputs.min().item(), inputs.max().item()
    if low == high:
        low, high = low - 1, high + 1
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise RuntimeError(f"the range of a histogram must be finite and increase: {low}, {high}")
    inside = inputs[(inputs >= low) & (inputs <= high)]
    # products overflow in narrow integers
    precise = _accumulation_dtype(inputs) if inputs.is_floating_point() else torch.int64
    inside = inside.to(precise)
    numbers = torch.div((inside - low) * bins, high - low, rounding_mode="trunc")
    numbers = numbers.long().clamp(max=bins - 1)
    return _added_up(bins, numbers, torch.ones_like(numbers)).to(inputs.dtype)


def _median(
    inputs: Tensor,
    dim: int,
    keepdim: bool = False,  # noqa: FBT002
    *,
    skips_nan: bool,
) -> tuple[Tensor, Tensor]:
    """Return the lower median and the first index that has it."""
    if inputs.ndim == 0:
        return inputs.clone(), torch.zeros_like(inputs, dtype=torch.int64)
    values, indices = inputs.sort(dim=dim, stable=True)  # NaN last
    is_nan = values.isnan()
    numbers = (~is_nan).sum(dim, keepdim=True)
    middle = (numbers - 1).clamp(min=0) // 2
    if not skips_nan:  # NaN if there is any, the first one
        middle = torch.where(numbers < inputs.shape[dim], numbers, middle)
    results = values.gather(dim, middle), indices.gather(dim, middle)
    return results if keepdim else (results[0].squeeze(dim), results[1].squeeze(dim))


def _kthvalue(
    inputs: Tensor,
    k: int,
    dim: int = -1,
    keepdim: bool = False,  # noqa: FBT002
) -> tuple[Tensor, Tensor]:
    """Return the k-th smallest value and the first index that has it."""
    length = inputs.shape[dim] if inputs.ndim else 1
    if not 1 <= k <= length:
        raise RuntimeError(f"k must be from 1 to {length}, the length of the dimension, got {k}")
    if inputs.ndim == 0:
        return inputs.clone(), torch.zeros_like(inputs, dtype=torch.int64)
    values, indices = inputs.sort(dim=dim, stable=True)
    # equal values are in the order of their indices; one NaN counts as another
    kth = values.narrow(dim, k - 1, 1)
    equals = (values == kth) | (values.isnan() & kth.isnan())
    first = equals.to(torch.uint8).argmax(dim, keepdim=True)
    results = kth.clone(), indices.gather(dim, first)
    return results if keepdim else (results[0].squeeze(dim), results[1].squeeze(dim))


# Scans --------------------------------------------------------------------------------------


def _scanned(
    inputs: Tensor, dim: int, *, dtype: torch.dtype | None = None, operation: str
) -> Tensor:
    """Return cumulated values. torch's kernel for a single row adds in an order that varies.

    That for several rows does not, so a single one is doubled.
    """
    values = inputs if dtype is None else inputs.to(dtype)
    if (
        dtype is None
        and operation == "cumprod"
        and not (values.is_floating_point() or values.is_complex())
    ):
        values = values.long()
    results = torch.empty_like(values, memory_format=torch.contiguous_format)
    cumulate: Callable[..., Tensor] = getattr(aten, operation).out
    if values.ndim == 0 or values.numel() != values.shape[dim]:
        return cumulate(values, dim, out=results)
    rows = torch.stack((values.flatten(), values.flatten()))
    cumulated = cumulate(rows, 1, out=torch.empty_like(rows))
    return cumulated[0].view(values.shape)


# Shared -------------------------------------------------------------------------------------


def _added_up(size: int, positions: Tensor, values: Tensor) -> Tensor:
    """Return [size] with each value added at its position, in the order of values."""
    result = torch.zeros(size, dtype=values.dtype, device=values.device)
    return result.index_put_((positions.reshape(-1),), values.reshape(-1), accumulate=True)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in {torch.float16, torch.bfloat16} else tensor.dtype


def _memory_format(tensor: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = formats.get(tensor.ndim)
    if channels_last is None or tensor.is_contiguous():
        return torch.contiguous_format
    is_channels_last = tensor.is_contiguous(memory_format=channels_last)
    return channels_last if is_channels_last else torch.contiguous_format


def _per_dimension(numbers: Iterable[int]) -> list[int]:
    numbers = list(numbers)
    return numbers * 3 if len(numbers) == 1 else numbers


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "nll_loss2d_forward": _nll_loss2d_forward,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_ctc_loss_backward.Tensor": _ctc_loss_backward,
    "_adaptive_avg_pool2d_backward": partial(_adaptive_avg_pool_backward, dimensions=2),
    "_adaptive_avg_pool3d_backward": partial(_adaptive_avg_pool_backward, dimensions=3),
    "avg_pool3d_backward": _avg_pool3d_backward,
    "adaptive_max_pool2d_backward": partial(_max_pool_backward, dimensions=2),
    "adaptive_max_pool3d_backward": partial(_max_pool_backward, dimensions=3),
    "max_pool3d_with_indices_backward": partial(_max_pool_backward, dimensions=3),
    "fractional_max_pool2d_backward": partial(_max_pool_backward, dimensions=2),
    "fractional_max_pool3d_backward": partial(_max_pool_backward, dimensions=3),
    "upsample_linear1d_backward": _interpolation("linear"),
    "upsample_bilinear2d_backward": _interpolation("linear"),
    "upsample_trilinear3d_backward": _interpolation("linear"),
    "upsample_bicubic2d_backward": _interpolation("bicubic"),
    "_upsample_bilinear2d_aa_backward": _interpolation("antialiased bilinear"),
    "_upsample_bicubic2d_aa_backward": _interpolation("antialiased bicubic"),
    "reflection_pad1d_backward": _reflection_pad_backward,
    "reflection_pad2d_backward": _reflection_pad_backward,
    "reflection_pad3d_backward": _reflection_pad_backward,
    "grid_sampler_2d_backward": _grid_sampler_backward,
    "grid_sampler_3d_backward": _grid_sampler_backward,
    "cudnn_grid_sampler_backward": _cudnn_grid_sampler_backward,
    "bincount": _bincount,
    "histc": _histc,
    "median.dim": partial(_median, skips_nan=False),
    "nanmedian.dim": partial(_median, skips_nan=True),
    "kthvalue": _kthvalue,
    "cumprod": partial(_scanned, operation="cumprod"),
    "_logcumsumexp": partial(_scanned, operation="_logcumsumexp"),
}
