"""Average precision of boxes and masks, as COCO defines it (Lin et al. 2014, arXiv 1405.0312).

faster-coco-eval computes the same numbers as COCO's pycocotools, faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from faster_coco_eval import COCO, COCOeval_faster

from recipes.detect.predict import Predictions

SCORES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # the first six statistics
KINDS = {"box": ("bbox", "bbox"), "mask": ("segm", "segmentation")}  # COCO's kind, and the key


def average_precision(truth: COCO, predictions: Sequence[Predictions]) -> dict[str, float]:
    """Return `box_ap`, `box_ap50`, …, and `mask_ap`, … with masks, in [0, 1].

    A score over no object is left out: those of a size that no object has, or all of them.
    `predictions` has a list per image.
    """
    flat_predictions = [prediction for of_image in predictions for prediction in of_image]
    scores: dict[str, float] = {}
    objects = [entry for entry in truth.dataset["annotations"] if not entry["iscrowd"]]
    if not objects:
        return scores
    for prefix, (kind, key) in KINDS.items():
        if key not in objects[0]:
            continue
        # A prediction with a box has the size of the box, so each kind gets only its own key.
        names = ("image_id", "category_id", "score", key)
        results = [{name: prediction[name] for name in names} for prediction in flat_predictions]
        evaluation = COCOeval_faster(truth, truth.loadRes(results), kind, rle_iou_max_workers=1)
        evaluation.run()
        values = map(float, evaluation.stats)
        named = zip(SCORES, values, strict=False)
        scores |= {f"{prefix}_{name}": value for name, value in named if value >= 0}  # -1: none
    return scores


def best_by(scores: Mapping[str, float]) -> float | None:
    """Return the score that chooses the best snapshot: mask AP, else box AP, else None."""
    return scores.get("mask_ap", scores.get("box_ap"))


def shown(scores: Mapping[str, float]) -> str:
    """Format the main scores for people."""
    texts = [
        f"{kind} AP {scores[f'{kind}_ap']:.2%} (at 50% overlap {scores[f'{kind}_ap50']:.2%})"
        for kind in KINDS
        if f"{kind}_ap" in scores
    ]
    return "  ".join(texts) or "no AP: the held-out images have no objects"
