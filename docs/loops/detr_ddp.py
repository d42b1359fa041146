"""A detector with a dictionary of losses, divided by the number of boxes of the batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 2
BATCH_SIZE = 32
WEIGHTS = {"class": 1.0, "box": 5.0, "objectness": 2.0}


class Detector(nn.Module):
    def __init__(self, queries=4, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Flatten())
        self.queries = nn.Linear(16 * 49, queries * 32)
        self.heads = nn.Linear(32, classes + 5)

    def forward(self, images):
        queries = self.queries(self.backbone(images)).unflatten(1, (-1, 32)).relu()
        outputs = self.heads(queries)
        return {"box": outputs[..., :4], "object": outputs[..., 4], "class": outputs[..., 5:]}


def criterion(outputs, targets):
    """Return sums over boxes; the first query is matched with the first box, and so on."""
    is_object = torch.zeros_like(outputs["object"])
    for row, target in zip(is_object, targets):
        row[: len(target["labels"])] = 1
    matched, boxes = is_object.bool(), torch.cat([target["boxes"] for target in targets])
    labels = torch.cat([target["labels"] for target in targets])
    objectness = F.binary_cross_entropy_with_logits(outputs["object"], is_object, reduction="sum")
    return {
        "class": F.cross_entropy(outputs["class"][matched], labels, reduction="sum"),
        "box": F.l1_loss(outputs["box"][matched], boxes, reduction="sum"),
        "objectness": objectness,
    }


def boxes_of(batch):
    return sum(len(target["labels"]) for target in batch[1])


def collate(samples):
    return torch.stack([image for image, _ in samples]), [target for _, target in samples]


def make_data(size=256):
    generator, samples = torch.Generator().manual_seed(0), []
    for index in range(size):
        image, boxes = torch.zeros(1, 16, 16), torch.rand(index % 4, 4, generator=generator)
        for left, top, *_ in (boxes * 12).int().tolist():
            image[0, top : top + 4, left : left + 4] += 1
        samples.append((image, {"boxes": boxes, "labels": torch.arange(len(boxes)) % 3}))
    return samples


def main():
    torch.manual_seed(0)
    train_set = make_data()
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    size = dist.get_world_size()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, BATCH_SIZE // size, sampler=sampler, collate_fn=collate)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            losses = criterion(model(images), targets)
            boxes = torch.tensor(float(boxes_of((images, targets))))
            dist.all_reduce(boxes)
            boxes = boxes.clamp(min=1) / size
            loss = sum(WEIGHTS[name] * losses[name] for name in losses)
            (loss / boxes).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        means = torch.stack(list(losses.values())).detach() / boxes / size
        dist.all_reduce(means)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}:", dict(zip(losses, means.tolist())))
            torch.save(model.module.state_dict(), "detr.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
