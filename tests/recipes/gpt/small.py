"""A small model and two folders of made-up texts, for tests of a second."""

from __future__ import annotations

import json
import random

SMALL = [
    *("steps=4", "batch_size=6", "double_at=[2]", "lanes=3", "evaluate_every=2"),
    *("evaluate_batch_size=2", "sample_tokens=3", "prompts=[a,'']"),
    *("model.width=16", "model.depth=1", "model.heads=2", "model.key_heads=1"),
    *("data.length=16", "data.vocabulary=280", "data.held_out=5"),
    *("optimizer.learning_rate=0.01", "optimizer.warmup_steps=1"),
]


def words(seed, count=60):
    """Return a text of random words."""
    draw = random.Random(seed)
    letters = "etaoinshrdlu"
    known = ["".join(draw.choices(letters, k=draw.randint(1, 6))) for _ in range(12)]
    return " ".join(draw.choices(known, k=count)) + ".\n"


def make_texts(root):
    """Write a folder of files and one with lines of JSON; return the settings of both sources."""
    for number in range(8):
        path = root / "code" / f"part{number % 2}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words(number, 10 + 9 * number))
    (root / "prose").mkdir()
    lines = [json.dumps({"text": words(100 + number), "id": number}) for number in range(6)]
    (root / "prose" / "all.jsonl").write_text("\n".join(lines) + "\n")
    return [f"data.sources={{code: {root / 'code'}, prose: {root / 'prose'}}}"]
