from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from recipes.detect.masks import CONTROLS, LAYERS, REACH, grid_points, mask_logits


@given(
    objects=st.integers(0, 4),
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_each_object_has_the_network_that_its_controls_say(objects, height, width, seed):
    torch.manual_seed(seed)
    stride = 4
    features, controls = torch.randn(8, height, width), torch.randn(objects, CONTROLS)
    points, strides = (
        torch.rand(objects, 2) * 20,
        torch.tensor([4.0, 8.0])[torch.randint(2, (objects,))],
    )

    logits = mask_logits(features, stride, controls, points, strides)

    assert logits.shape == (objects, 2 * height, 2 * width)
    pixels = grid_points(height, width, stride, torch.device("cpu")).T.view(2, height, width)
    for object_logits, control, point, own_stride in zip(
        logits, controls, points, strides, strict=True
    ):
        x, start = (
            torch.cat([(pixels - point[:, None, None]) / (REACH * own_stride), features])[None],
            0,
        )
        for number, (inputs, outputs) in enumerate(LAYERS):
            weights, biases = (
                control[start : start + inputs * outputs],
                control[start + inputs * outputs :][:outputs],
            )
            x = F.conv2d(
                x if number == 0 else x.relu(), weights.view(outputs, inputs, 1, 1), biases
            )
            start += (inputs + 1) * outputs
        torch.testing.assert_close(
            object_logits,
            F.interpolate(x, scale_factor=2, mode="bilinear")[0, 0],
            rtol=1e-4,
            atol=1e-4,
        )
        assert start == CONTROLS


def test_points_are_the_centres_of_cells():
    assert grid_points(2, 3, 4, torch.device("cpu")).tolist() == [
        [2, 2],
        [6, 2],
        [10, 2],
        [2, 6],
        [6, 6],
        [10, 6],
    ]
