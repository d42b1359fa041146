"""Classify handwritten digits with a small convolutional network."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS, BATCH_SIZE, LR = 8, 64, 0.01


def loss_fn(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a batch, and whether each sample is right."""
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels), {"accuracy": logits.argmax(1) == labels}


def main(run: ss.Run) -> None:
    """Train and evaluate."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    train_set, test_set = (
        TensorDataset(images[:1500], labels[:1500]),
        TensorDataset(images[1500:], labels[1500:]),
    )

    layers = (
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(288, 10),
    )
    model = run.replicate(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), LR)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        means = run.backward(loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()
        run.log(means)

    scores = run.evaluate(loss_fn, model, test_set, BATCH_SIZE)
    run.log({"test_accuracy": scores["accuracy"]})
    run.print(f"accuracy {scores['accuracy']:.2%}")


if __name__ == "__main__":
    with ss.init(lanes=8, settings={"lr": LR, "batch_size": BATCH_SIZE}) as run:
        main(run)
