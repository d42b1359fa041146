"""Train and evaluate a tiny model with the Trainer.

usage: huggingface_job.py KIND [ARGUMENT=VALUE ...]

The kinds bert, gpt2 and dropped have their own collators, padded and masked those of transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

import samestep as ss
from samestep.integrations.huggingface import Trainer, TrainingArguments

WORDS, SAMPLES = 64, 37


def data(kind: str, size: int, seed: int) -> list[dict[str, object]]:
    """Return samples of 4 to 12 words, with a class or with the words themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(size):
        length = int(torch.randint(4, 13, (), generator=generator))
        words = torch.randint(3, WORDS, (length,), generator=generator).tolist()
        sample = {"input_ids": words, "attention_mask": [1] * length}
        if kind != "masked":
            sample["labels"] = words if kind == "gpt2" else sum(words) % 3
        samples.append(sample)
    return samples


def collate(samples: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    """Pad the samples on the right, with labels that do not count."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor(
            [sample[name] + [value] * (longest - len(sample[name])) for sample in samples]
        )

    batch = {"input_ids": padded("input_ids", 0), "attention_mask": padded("attention_mask", 0)}
    if isinstance(samples[0]["labels"], list):
        return {**batch, "labels": padded("labels", -100)}
    return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}


class Drop:
    """Replaces words by the word 2, with an own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, samples: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        batch = collate(samples)
        is_dropped = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(is_dropped, 2)}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of numbers, with the special words 0 to 2."""
    words = ["[PAD]", "[MASK]", "[UNK]", *map(str, range(3, WORDS))]
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        pad_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[UNK]",
    )


def collator(kind: str, **options: object) -> object:
    """Return the collator of a kind."""
    if kind == "dropped":
        return Drop()
    if kind == "padded":
        return transformers.DataCollatorWithPadding(tokenizer())
    if kind == "masked":
        return transformers.DataCollatorForLanguageModeling(tokenizer(), **options)
    return collate


def build(kind: str) -> torch.nn.Module:
    """Return the model of a kind, with random weights."""
    if kind == "gpt2":
        sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    if kind == "masked":
        return transformers.BertForMaskedLM(config)
    return transformers.BertForSequenceClassification(config)


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    """Return the accuracy, and the number of predictions."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(np.mean(right)), "samples": len(right)}


class Seen(transformers.TrainerCallback):
    """Counts the events of one worker."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}

    def __getattribute__(self, name: str) -> object:
        if name.startswith("on_"):
            self.events[name] = self.events.get(name, 0) + 1
        return super().__getattribute__(name)


def train(kind: str, options: dict[str, object]) -> None:
    """Train with 3 samples per lane; write what the trainer returned to `output_dir`."""
    with ss.init(lanes=4) as run:
        out = Path(options.pop("output_dir", "out"))
        arguments = {
            "per_device_train_batch_size": 3,
            "per_device_eval_batch_size": 5,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 2,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
        seen = Seen()
        trainer = Trainer(
            build(kind),
            TrainingArguments(str(out), **arguments),
            data_collator=collator(kind),
            train_dataset=data(kind, SAMPLES, seed=1),
            eval_dataset=data(kind, 17, seed=2),
            compute_metrics=accuracy if kind == "bert" else None,
            callbacks=[seen],
            run=run,
        )
        result = trainer.train()
        trainer.save_model()
        predictions = trainer.predict(data(kind, 17, seed=2)).predictions
        if run.is_main:
            report = {
                "loss": result.training_loss,
                "steps": result.global_step,
                "history": trainer.state.log_history,
                "events": seen.events,
                "predictions": np.asarray(
                    predictions[0] if kind == "gpt2" else predictions
                ).tolist(),
            }
            (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    pairs = (text.split("=", 1) for text in sys.argv[2:])
    train(sys.argv[1], {name: json.loads(value) for name, value in pairs})
