"""A variational autoencoder whose weight of the KL divergence grows."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss

EPOCHS = 2
BATCH_SIZE = 64
WARMUP = 20


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance


def losses(images, outputs):
    decoded, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.mse_loss(decoded, images, reduction="sum") / len(images), divergence


def make_data(size=1024):
    waves = torch.arange(64.0) * torch.rand(size, 1, generator=torch.Generator().manual_seed(0))
    return TensorDataset(waves.sin())


def main(run):
    train_set = make_data()
    model = run.replicate(VAE())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS):
        for (images,) in batch.lanes(model):
            reconstruction, divergence = losses(images, model(images))
            loss = reconstruction + min(1, run.step / WARMUP) * divergence
            batch.backward(loss, reconstruction=reconstruction, divergence=divergence)
        optimizer.step()
        optimizer.zero_grad()
        run.log(batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/vae") as run:
        main(run)
