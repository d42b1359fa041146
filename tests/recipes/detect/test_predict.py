from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from recipes.detect.coco import read_annotations
from recipes.detect.config import DataSettings, LossSettings, PredictSettings, Settings
from recipes.detect.data import collate, open_images
from recipes.detect.evaluate import average_precision, best_by, shown
from recipes.detect.losses import assign
from recipes.detect.model import Detector
from recipes.detect.picture import picture
from recipes.detect.predict import full_mask, predict
from recipes.settings import read
from tests.recipes.detect.small import SMALL

MODEL = read(Settings, SMALL).model


@pytest.fixture(scope="module")
def val(digits):
    return open_images(DataSettings(path=digits)).val


def truth_of(val):
    """Return what a perfect detector would predict."""
    return [
        [
            {
                **{name: annotation[name] for name in ("image_id", "category_id", "bbox")},
                "score": 1.0,
                "segmentation": {
                    "size": annotation["segmentation"]["size"],
                    "counts": annotation["segmentation"]["counts"].decode(),
                },
            }
            for annotation in val.truth.imgToAnns[entry["id"]]
        ]
        for entry in val.entries
    ]


# Average precision


def test_the_truth_scores_one_and_nothing_scores_zero(val):
    truth = truth_of(val)
    scores = average_precision(val.truth, truth)
    assert {
        name: scores[name]
        for name in ("box_ap", "box_ap75", "mask_ap", "mask_ap50", "mask_ap_small")
    } == pytest.approx(
        {"box_ap": 1, "box_ap75": 1, "mask_ap": 1, "mask_ap50": 1, "mask_ap_small": 1}
    )
    empty = average_precision(val.truth, [[] for _ in truth])
    assert empty["box_ap"] == empty["mask_ap"] == 0


def test_boxes_and_masks_are_scored_by_themselves(val):
    truth = truth_of(val)
    for predictions in truth:
        for prediction in predictions:
            prediction["bbox"] = [0, 0, 1, 1]
    scores = average_precision(val.truth, truth)
    assert (scores["box_ap"], scores["mask_ap"]) == (0, pytest.approx(1))


def test_a_class_or_an_image_that_is_wrong_costs(val):
    for key in ("category_id", "image_id"):
        truth = truth_of(val)
        numbers = sorted({prediction[key] for predictions in truth for prediction in predictions})
        for predictions in truth:
            for prediction in predictions:
                prediction[key] = numbers[(numbers.index(prediction[key]) + 1) % len(numbers)]
        assert average_precision(val.truth, truth)["box_ap"] < 0.5


@pytest.mark.parametrize(
    ("box", "precision"), [([20, 0, 5, 5], 1), ([20, 0, 20, 10], 1), ([0, 20, 5, 5], 0.5)]
)
def test_predictions_in_a_crowd_cost_nothing_and_others_do(box, precision, tmp_path):
    entry = {"image_id": 1, "category_id": 1}
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 40}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {**entry, "bbox": [0, 0, 10, 10], "iscrowd": 0},
            {**entry, "bbox": [20, 0, 20, 10], "iscrowd": 1},
        ],
    }
    (tmp_path / "crowd.json").write_text(json.dumps(content))
    truth = read_annotations(tmp_path / "crowd.json", masks=False)
    predictions = [
        {**entry, "bbox": box, "score": 0.9},
        {**entry, "bbox": [0, 0, 10, 10], "score": 0.5},
    ]
    assert average_precision(truth, [predictions])["box_ap"] == pytest.approx(precision)


def test_without_any_object_there_is_no_score(val, tmp_path):
    content = {**json.loads(val.file.read_text()), "annotations": []}
    (tmp_path / "empty.json").write_text(json.dumps(content))
    truth = read_annotations(tmp_path / "empty.json")
    scores = average_precision(truth, [[] for _ in val.entries])
    assert (scores, best_by(scores)) == ({}, None)
    assert shown(scores) == "no AP: the held-out images have no objects"


# Predictions


class Oracle(Detector):
    """Says the true boxes and classes of a batch, at the locations that would learn them."""

    def __init__(self, batch, classes):
        super().__init__(MODEL, classes)
        self.batch = batch

    def forward(self, images):
        outputs = super().forward(images)
        points, strides = outputs.points, outputs.strides
        class_logits, distances = (
            torch.full_like(outputs.class_logits, -9),
            torch.ones_like(outputs.distances),
        )
        for image, (boxes, labels) in enumerate(
            zip(self.batch.boxes, self.batch.labels, strict=True)
        ):
            learnt = assign(points, strides, boxes, LossSettings())
            (where,) = (learnt >= 0).nonzero(as_tuple=True)
            class_logits[image, where, labels[learnt[where]]] = 9
            goals = boxes[learnt[where]]
            distances[image, where] = torch.cat(
                [points[where] - goals[:, :2], goals[:, 2:] - points[where]], dim=1
            )
        return outputs._replace(
            class_logits=class_logits,
            distances=distances,
            centerness=torch.full_like(outputs.centerness, 9),
        )


@torch.no_grad()
def test_a_model_that_knows_the_truth_scores_one(digits):
    for short_sides in ((), (60,)):  # also when images are resized on their way into the model
        val = open_images(DataSettings(path=digits, short_sides=short_sides, longest_side=400)).val
        predictions = []
        for index in range(len(val)):
            batch = collate([val[index]], multiple=4)
            model = Oracle(batch, classes=10)
            predictions += predict(
                model, batch, categories=list(val.names), settings=PredictSettings()
            )
        assert average_precision(val.truth, predictions)["box_ap"] > 0.9
        assert [len(image_predictions) for image_predictions in predictions] == [
            len(val.truth.imgToAnns[entry["id"]]) for entry in val.entries
        ]


@torch.no_grad()
def test_predictions_are_the_likeliest_within_limits(val):
    torch.manual_seed(0)
    model = Detector(MODEL, classes=10)
    torch.nn.init.normal_(model.class_head.weight, std=3)
    batch = collate([val[index] for index in range(len(val))], multiple=4)
    for limit, least in ((3, 0.0), (100, 0.4)):
        settings = PredictSettings(most=limit, least_score=least, candidates=200)
        for entry, predictions in zip(
            batch.entries,
            predict(model, batch, categories=list(val.names), settings=settings),
            strict=True,
        ):
            scores = [prediction["score"] for prediction in predictions]
            assert scores == sorted(scores, reverse=True)
            assert len(predictions) <= limit
            assert min(scores, default=1) >= least
            for prediction in predictions:
                x, y, width, height = prediction["bbox"]
                assert min(x, y, width, height) >= 0
                assert x + width <= entry["width"] + 1e-3
                assert y + height <= entry["height"] + 1e-3
                assert prediction["segmentation"]["size"] == [entry["height"], entry["width"]]


def test_full_masks_are_cut_and_resized():
    logits = torch.full((4, 6), -1.0)
    logits[:2, :3] = 1.0
    mask = full_mask(logits, stride=2, size=(7, 9), original=(14, 18))
    assert mask.shape == (14, 18)
    assert mask[:7, :11].all()
    assert not mask[9:].any()
    assert not mask[:, 13:].any()


# The picture


def test_the_picture_shows_what_was_found(val):
    images = [val.read(index) for index in range(len(val))]
    names = val.names
    truth = truth_of(val)
    drawn = picture(images, truth, names)
    plain = picture(images, [[] for _ in images], names)
    assert drawn.dtype == np.uint8
    assert drawn.shape == plain.shape
    assert drawn.shape[2] == 3
    assert (drawn != plain).any()
    faint = [[{**prediction, "score": 0.1} for prediction in predictions] for predictions in truth]
    assert np.array_equal(picture(images, faint, names), plain)
