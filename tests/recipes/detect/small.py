"""Settings of a model and a schedule that are small enough for seconds."""

from __future__ import annotations

SMALL = [
    *("batch_size=4", "lanes=4", "evaluate_every=3"),
    *(
        "model.blocks=[1, 1]",
        "model.widths=[8, 8]",
        "model.bottleneck=1",
        "model.stem_width=8",
        "model.stem_pool=false",
    ),
    *("model.strides=[4, 8]", "model.width=8", "model.tower=1", "model.mask_width=8"),
    *(
        "data.mean=[0.5, 0.5, 0.5]",
        "data.std=[0.3, 0.3, 0.3]",
        "predict.least_score=0.02",
        "predict.most=5",
    ),
    *(
        "optimizer.steps=6",
        "optimizer.reference_batch_size=4",
        "optimizer.warmup_steps=2",
        "optimizer.decay_steps=[4]",
    ),
    *("optimizer.name=adamw", "optimizer.learning_rate=0.01", "optimizer.clip_norm=5"),
]
