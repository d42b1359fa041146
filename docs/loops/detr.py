"""A detector with a dictionary of losses, divided by the number of boxes of the batch."""

import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss

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


def main(run):
    train_set = make_data()
    model = run.replicate(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(train_set, BATCH_SIZE, epochs=EPOCHS, collate_fn=collate):
        for images, targets in batch.lanes(model, count=boxes_of, reduction="sum"):
            losses = criterion(model(images), targets)
            loss = sum(WEIGHTS[name] * losses[name] for name in losses)
            batch.backward(loss, **losses)
        run.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, dir="runs/detr") as run:
        main(run)
