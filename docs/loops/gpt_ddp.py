"""Pretraining of a small GPT with gradient accumulation, clipping and a warmup."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

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


def main():
    torch.manual_seed(0)
    text = Text()
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    accumulation = 4 // dist.get_world_size()
    sampler = DistributedSampler(text)
    loader = DataLoader(text, BATCH_SIZE // 4, sampler=sampler, drop_last=True)
    batches, epoch = iter(loader), 0
    for step in range(STEPS):
        for micro_step in range(accumulation):
            tokens_and_targets = next(batches, None)
            if tokens_and_targets is None:
                epoch += 1
                sampler.set_epoch(epoch)
                batches = iter(loader)
                tokens_and_targets = next(batches)
            tokens, targets = tokens_and_targets
            model.require_backward_grad_sync = micro_step == accumulation - 1
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "gpt.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
