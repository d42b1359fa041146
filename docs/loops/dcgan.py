"""A DCGAN: a generator and a discriminator with an optimizer each."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 64


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4),
        nn.Flatten(0),
    )


def make_data(size=512):
    waves = torch.arange(8.0) + torch.rand(size, 1, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(waves.sin()[:, None].expand(-1, 1, 8, 8).contiguous())


def main(run):
    train_set = make_data()
    generator = run.replicate(make_generator())
    discriminator = run.replicate(make_discriminator())
    optimizer_g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999))
    run.track(g=generator, d=discriminator, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        for (real,) in batch.lanes(discriminator):
            fake = generator(torch.randn(len(real), 16, 1, 1))
            logits = discriminator(torch.cat([real, fake.detach()]))
            loss_d = (
                F.softplus(-logits[: len(real)]).mean() + F.softplus(logits[len(real) :]).mean()
            )
            batch.backward(loss_d)
        optimizer_d.step()
        optimizer_d.zero_grad()
        run.log(discriminator=batch.means)
        for (real,) in batch.lanes(generator):
            fake = generator(torch.randn(len(real), 16, 1, 1))
            loss_g = F.softplus(-discriminator(fake)).mean()
            batch.backward(loss_g)
        optimizer_g.step()
        optimizer_g.zero_grad()
        run.log(generator=batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/dcgan") as run:
        main(run)
