"""A small job that trains until it is stopped."""

from __future__ import annotations

import torch

import samestep as ss
from tests.jobs import Net, classify, images


def main() -> None:
    with ss.init() as run:
        model = run.replicate(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(512), 32, epochs=100_000):
            means = run.backward(classify, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means)


if __name__ == "__main__":
    main()
