"""A small job for `samestep run` and `samestep verify` on a real GPU.

usage: job.py {vision,text,blocks} [--device DEVICE] [--muon] [--sharded] [--nccl]
              [--signal NAME STEP]

With `--muon`, that updates matrices, and AdamW all else. With `--sharded`, for blocks, parameters
are sharded, too. With `--nccl`, workers that share a GPU exchange over NCCL, as if each had a host
of its own. With `--signal`, worker 1 gets that signal once, in a step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep as ss
from samestep.record import read_events
from tests.sharded.jobs import Block, Words, loss_fn, texts

STEPS = 12
NCCL = {  # between processes on one GPU, over sockets of the loopback interface
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}


class Vision(nn.Module):
    """Segmentation and letters: convolutions, BatchNorm, dropout, and what torch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2)
        )
        self.masks = nn.Conv2d(16, 4, 3, padding=1, padding_mode="reflect")
        self.letters = nn.Linear(8, 6)
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.first(images)
        average, largest = F.adaptive_avg_pool2d(features, 7), F.adaptive_max_pool2d(features, 4)
        scaled = [
            F.interpolate(part, images.shape[2:], mode=mode)
            for part, mode in ((average, "bicubic"), (largest, "bilinear"))
        ]
        return self.masks(torch.cat(scaled, 1)), self.letters(average.flatten(2).permute(2, 0, 1))

    @staticmethod
    def samples(generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [
            (
                torch.randn(3, 24, 20, generator=generator),
                torch.randint(4, (24, 20), generator=generator),
                torch.randint(1, 6, (5,), generator=generator),
            )
            for _ in range(40)
        ]

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, masks, letters = batch
        logits, cells = model(images)
        lengths = [[number] * len(images) for number in (len(cells), letters.shape[1])]
        ctc = F.ctc_loss(cells.float().log_softmax(-1), letters, *lengths)
        return F.cross_entropy(logits, masks) + ctc


class Text(nn.Module):
    """A language model: an LSTM with tied weights; padding does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.lstm, self.dropout = nn.LSTM(32, 32, 2, batch_first=True, dropout=0.1), nn.Dropout(0.1)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.lstm(self.embedding(tokens))[0]))

    @staticmethod
    def samples(generator: torch.Generator) -> list[Tensor]:
        tokens = torch.randint(1, 50, (40, 17), generator=generator)
        lengths = torch.randint(3, 17, (40, 1), generator=generator)
        return list(tokens * (torch.arange(17) < lengths))

    @staticmethod
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0
        )


class Blocks(Words):
    """Blocks between an embedding and an output that are tied."""

    @staticmethod
    def samples(_: torch.Generator) -> torch.utils.data.TensorDataset:
        return texts()

    loss = staticmethod(loss_fn)


KINDS = {"vision": Vision, "text": Text, "blocks": Blocks}


def main() -> None:
    """Train, and print a hash of the model and the optimizer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=KINDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--muon", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--signal", nargs=2)
    options = parser.parse_args()
    if options.nccl:
        os.environ |= NCCL | {"NCCL_HOSTID": f"worker {os.environ.get('RANK', '0')}"}
    kind = KINDS[options.job]
    count = (lambda tokens: int((tokens[:, 1:] != 0).sum())) if kind is Text else None
    sharding = {"shard": "full", "units": (Block,)} if options.sharded else {}
    with ss.init(device=options.device, precision=options.precision, lanes=6, timeout=60) as run:
        torch.manual_seed(0)
        model = run.replicate(kind(), **sharding)
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.ndim == 2] if options.muon else []
        others = [p for p in parameters if all(p is not matrix for matrix in matrices)]
        optimizers = {"optimizer": run.shard(torch.optim.AdamW(others, 0.01, fused=True))}
        if matrices:
            optimizers["muon"] = run.shard(torch.optim.Muon(matrices, 0.01))
        run.track(model=model, **optimizers)
        if options.nccl and run.is_main and run.dir is not None and run.world_size > 1:
            [*_, started] = (e for e in read_events(run.dir) if e["event"] == "started")
            assert started["exchange"] == ("NCCL" if run.device.type == "cuda" else "shared memory")
        generator = torch.Generator().manual_seed(1)
        for batch in run.batches(kind.samples(generator), 12, steps=STEPS, loader_workers=1):
            run.backward(kind.loss, model, batch, count=count)
            run.clip_grad_norm(model, 1.0)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            if options.signal and run.rank == 1 and run.step == int(options.signal[1]):
                with suppress(FileExistsError):  # the worker that replaces this one goes on
                    (run.dir / "signaled").touch(exist_ok=False)
                    os.kill(os.getpid(), getattr(signal, options.signal[0]))
        with run.full_parameters(model):
            state = [value.cpu().numpy().tobytes() for value in model.state_dict().values()]
        run.print("hash", hashlib.sha256(b"".join(state)).hexdigest())


if __name__ == "__main__":
    main()
