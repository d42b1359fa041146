from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.detect.config import LossSettings, Settings
from recipes.detect.data import Batch
from recipes.detect.losses import (
    BACKGROUND,
    assign,
    centerness,
    detection_loss,
    draw_locations,
    focal_loss,
    positives_of,
)
from recipes.detect.masks import grid_points
from recipes.detect.model import Detector
from recipes.settings import read
from tests.recipes.detect.small import SMALL

MODEL = read(Settings, SMALL).model
LEVELS = {4: (16, 16), 8: (8, 8), 16: (4, 4)}  # of an image of 64 x 64 pixels
POINTS = torch.cat(
    [grid_points(*size, stride, torch.device("cpu")) for stride, size in LEVELS.items()]
)
STRIDES = torch.cat(
    [torch.full((height * width,), float(stride)) for stride, (height, width) in LEVELS.items()]
)

corners = st.tuples(st.floats(0, 60), st.floats(0, 60), st.floats(1, 64), st.floats(1, 64))
box_tensors = st.lists(corners, max_size=5).map(
    lambda boxes: torch.tensor(
        [[x, y, min(64, x + w), min(64, y + h)] for x, y, w, h in boxes]
    ).reshape(-1, 4)
)


@given(boxes=box_tensors, radius=st.floats(0.5, 3))
def test_a_location_learns_the_smallest_box_that_fits_it(boxes, radius):
    learnt = assign(POINTS, STRIDES, boxes, LossSettings(center_radius=radius))

    for (x, y), stride, chosen in zip(
        POINTS.tolist(), STRIDES.tolist(), learnt.tolist(), strict=True
    ):
        fitting = {}
        for number, (left, top, right, bottom) in enumerate(boxes.tolist()):
            reaches = (x - left, y - top, right - x, bottom - y)
            off_center = max(abs(x - (left + right) / 2), abs(y - (top + bottom) / 2))
            low, high = {4: (0, 32), 8: (32, 64), 16: (64, math.inf)}[stride]
            if (
                min(reaches) > 0
                and off_center < radius * stride - 1e-3
                and low < max(reaches) <= high
            ):
                fitting[number] = (right - left) * (bottom - top)
        if chosen == BACKGROUND:
            assert not fitting
        else:
            smallest = min(fitting.values(), default=math.inf)
            left, top, right, bottom = boxes[chosen].tolist()
            assert (right - left) * (bottom - top) <= smallest * (1 + 1e-5)
            assert left < x < right
            assert top < y < bottom


@given(
    learnt=st.lists(st.integers(-1, 4), max_size=30),
    max_locations=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_each_box_weighs_one_with_all_or_draw_locations_its_locations(learnt, max_locations, seed):
    torch.manual_seed(seed)
    learnt = torch.tensor(learnt, dtype=torch.int64)
    everything, drawn = positives_of(learnt), draw_locations(learnt, max_locations)

    for positives, limit in ((everything, len(learnt)), (drawn, max_locations)):
        assert torch.equal(learnt[positives.locations], positives.boxes)
        for box in range(5):
            count = int((learnt == box).sum())
            assert int((positives.boxes == box).sum()) == min(count, limit)
            assert float(positives.weights[positives.boxes == box].sum()) == pytest.approx(
                float(count > 0), abs=1e-5
            )


def test_the_locations_drawn_for_masks_change():
    learnt = torch.zeros(50, dtype=torch.int64)
    assert len({tuple(draw_locations(learnt, 3).locations.tolist()) for _ in range(9)}) > 1


@given(logit=st.floats(-20, 20), truth=st.booleans(), gamma=st.floats(0.5, 4))
def test_focal_loss_is_its_formula(logit, truth, gamma):
    chance = 1 / (1 + math.exp(-logit))
    right = chance if truth else 1 / (1 + math.exp(logit))
    expected = (0.25 if truth else 0.75) * (1 - right) ** gamma * -math.log(right)
    loss = focal_loss(
        torch.tensor([logit], dtype=torch.float64),
        torch.tensor([float(truth)], dtype=torch.float64),
        0.25,
        gamma,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_centerness_is_one_at_the_centre_and_falls_to_zero_at_the_sides():
    box = torch.tensor([[0.0, 0.0, 8.0, 4.0]]).expand(3, 4)
    points = torch.tensor([[4.0, 2.0], [2.0, 2.0], [0.0, 2.0]])
    assert centerness(points, box).tolist() == pytest.approx([1.0, math.sqrt(1 / 3), 0.0])


# The whole loss


def make_batch(*counts):
    """Return images of 32 x 48 pixels with so many boxes each, and their masks."""
    images = torch.rand(len(counts), 3, 32, 48)
    boxes = [
        torch.cat([at := torch.rand(count, 2) * 16, at + 4 + torch.rand(count, 2) * 12], dim=1)
        for count in counts
    ]
    labels = [torch.randint(3, (count,)) for count in counts]
    masks = [torch.zeros(count, 32, 48, dtype=torch.uint8) for count in counts]
    for image_boxes, drawn in zip(boxes, masks, strict=True):
        for (left, top, right, bottom), mask in zip(
            image_boxes.round().int().tolist(), drawn, strict=True
        ):
            mask[top:bottom, left:right] = 1
    return Batch(images, [(32, 48)] * len(counts), boxes, labels, masks, entries=[])


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0), (5,)])
def test_the_loss_of_a_lane_is_the_sum_of_its_images(counts):
    torch.manual_seed(0)
    model, batch, settings = (
        Detector(MODEL, 3),
        make_batch(*counts),
        LossSettings(mask_locations=1000),
    )
    total, sums = detection_loss(model, batch, settings=settings)
    parts = [
        detection_loss(
            model, Batch(*(field[i : i + 1] for field in batch[:5]), entries=[]), settings=settings
        )
        for i in range(len(counts))
    ]

    torch.testing.assert_close(total, torch.stack([loss for loss, _ in parts]).sum())
    torch.testing.assert_close(total, torch.stack(list(sums.values())).sum())
    assert list(sums) == ["class", "box", "centerness", "mask"]
    for name, value in sums.items():
        torch.testing.assert_close(value, torch.stack([losses[name] for _, losses in parts]).sum())


def test_without_boxes_only_the_background_is_learnt():
    torch.manual_seed(0)
    model = Detector(MODEL, 3)
    loss, sums = detection_loss(model, make_batch(0, 0), settings=LossSettings())
    loss.backward()
    assert loss > 0
    assert [float(sums[name].detach()) for name in ("box", "centerness", "mask")] == [0, 0, 0]
    learning = {
        name.partition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert learning == {"backbone", "pyramid", "class_tower", "class_head"}


def test_with_boxes_every_parameter_learns():
    torch.manual_seed(0)
    model = Detector(MODEL, 3)
    detection_loss(model, make_batch(4, 4), settings=LossSettings())[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.long
def test_a_detector_learns_one_image_by_heart():
    torch.manual_seed(0)
    model, batch = Detector(MODEL, 3), make_batch(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss, sums = detection_loss(model, batch, settings=LossSettings())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append({name: float(value.detach()) for name, value in sums.items()})
    assert all(losses[-1][name] < losses[0][name] * 0.7 for name in ("class", "box", "mask")), (
        losses[0],
        losses[-1],
    )
