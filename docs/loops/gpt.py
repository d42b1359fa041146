"""Pretraining of a small GPT with gradient accumulation, clipping and a warmup."""

import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss

STEPS = 12
BATCH_SIZE = 16
CONTEXT = 32


class GPT(nn.Module):
    def __init__(self, vocabulary=64, width=64):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.tokens(tokens) + self.positions
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


class Text(torch.utils.data.Dataset):
    def __init__(self, tokens=8192):
        steps = torch.randint(3, (tokens,), generator=torch.Generator().manual_seed(0))
        self.tokens = steps.cumsum(0) % 64

    def __len__(self):
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index):
        tokens = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return tokens[:-1], tokens[1:]


def main(run):
    text = Text()
    model = run.replicate(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for batch in run.batches(text, BATCH_SIZE, steps=STEPS):
        for tokens, targets in batch.lanes(model):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            batch.backward(loss)
        run.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.log(batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/gpt") as run:
        main(run)
