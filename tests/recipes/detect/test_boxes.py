from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.detect.boxes import areas, generalized_iou, non_maximum_suppression, overlaps

sides = st.integers(0, 12)
box_lists = st.lists(
    st.tuples(sides, sides, sides, sides).map(
        lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
    )
)


def cells(box):
    """Return the unit squares of a box."""
    left, top, right, bottom = box
    return {(x, y) for x in range(left, right) for y in range(top, bottom)}


@given(boxes=box_lists)
def test_areas_and_overlaps_are_those_of_counted_cells(boxes):
    covered = [cells(box) for box in boxes]
    box_tensor = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)

    assert areas(box_tensor).tolist() == [len(box_cells) for box_cells in covered]
    for row, box_cells in zip(overlaps(box_tensor).tolist(), covered, strict=True):
        assert row == pytest.approx(
            [len(box_cells & other) / max(1, len(box_cells | other)) for other in covered], abs=1e-6
        )


@given(pairs=st.lists(st.tuples(*[st.integers(0, 9)] * 4, *[st.integers(0, 9)] * 4)))
def test_generalized_iou_takes_off_what_the_hull_has_more(pairs):
    boxes = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2, 4)
    boxes[:, :, 2:] += boxes[:, :, :2] + 1  # no box without area
    for (left, right), value in zip(
        boxes.int().tolist(), generalized_iou(boxes[:, 0], boxes[:, 1]).tolist(), strict=True
    ):
        union = len(cells(left) | cells(right))
        low, high = [map(pick, left, right) for pick in (min, max)]
        (x, y, *_), (*_, right_side, bottom) = low, high
        hull = (right_side - x) * (bottom - y)
        assert value == pytest.approx(
            len(cells(left) & cells(right)) / union - (hull - union) / hull, abs=1e-6
        )


@given(boxes=box_lists, data=st.data())
def test_what_is_kept_clashes_with_nothing_and_all_else_with_a_better_one(boxes, data):
    labels = data.draw(st.lists(st.integers(0, 1), min_size=len(boxes), max_size=len(boxes)))
    given_boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    kept = non_maximum_suppression(
        given_boxes, torch.tensor(labels, dtype=torch.int64), 0.5
    ).tolist()

    shared = overlaps(given_boxes)
    for index in range(len(boxes)):
        clashes = [
            better
            for better in kept
            if better < index and labels[better] == labels[index] and shared[better, index] >= 0.5
        ]
        assert (index in kept) == (not clashes)
    assert kept == sorted(kept)
