"""Classify handwritten digits with a small convolutional network."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE, LR = 8, 64, 0.01


def loss_fn(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of a batch, and whether each sample is right."""
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels), {"accuracy": logits.argmax(1) == labels}


def main() -> None:
    """Train and evaluate."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    train_set, test_set = (
        TensorDataset(images[:1500], labels[:1500]),
        TensorDataset(images[1500:], labels[1500:]),
    )

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = (
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(288, 10),
    )
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for _ in range(EPOCHS):
        for batch in DataLoader(train_set, BATCH_SIZE, shuffle=True):
            loss, _ = loss_fn(model, [part.to(device) for part in batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), "digits.pt")

    model.eval()
    right = 0
    with torch.no_grad():
        for batch in DataLoader(test_set, BATCH_SIZE):
            _, scores = loss_fn(model, [part.to(device) for part in batch])
            right += scores["accuracy"].sum().item()
    print(f"accuracy {right / len(test_set):.2%}")


if __name__ == "__main__":
    main()
