# %% [markdown]
# # Handwritten digits on one, two and three workers
#
# A small network is trained on two workers, interrupted, and resumed on three. Its parameters are,
# bit for bit, those that one worker leaves. This takes less than two minutes on two CPU cores.
#
# The packages are those of `pip install 'samestep[vit]' ipykernel`.

# %%
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.record import read_history

# %% [markdown]
# `train` is a complete script. `ss.launch` runs it in new processes, each of which is a worker.
# They see what the notebook has defined, and rank 0's result comes back. The data set is made in
# the workers: the process of the notebook should not compute with torch before it launches.


# %%
def accuracy(model, batch):
    images, labels = batch
    return {"accuracy": model(images).argmax(1) == labels}


def train(directory):
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    train_set = TensorDataset(images[:1500], labels[:1500])
    test_set = TensorDataset(images[1500:], labels[1500:])
    with ss.init(lanes=6, dir=directory) as run:
        layers = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10)
        model = run.replicate(nn.Sequential(*layers))
        optimizer = run.shard(torch.optim.Adam(model.parameters(), lr=0.01))
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(train_set, batch_size=120, epochs=8):
            for images, labels in batch.lanes(model):
                batch.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            run.log(batch.means)
        score = run.evaluate(accuracy, model, test_set, batch_size=100)["accuracy"]
        bits = b"".join(values.numpy().tobytes() for values in model.state_dict().values())
        return score, hashlib.sha256(bits).hexdigest()[:16]


# %% [markdown]
# One worker trains to the end.

# %%
score, bits_of_one = ss.launch(train, "runs/one", workers=1)
print(f"accuracy {score:.1%}, parameters {bits_of_one}")

# %% [markdown]
# Two workers train 50 steps and stop with a snapshot, as a run does that is preempted.

# %%
ss.launch(train, "runs/several", workers=2, stop_after=50)

# %% [markdown]
# Three workers go on from there.

# %%
score, bits_of_several = ss.launch(train, "runs/several", workers=3)
print(f"accuracy {score:.1%}, parameters {bits_of_several}")
print("the same bits" if bits_of_several == bits_of_one else "OTHER BITS")

# %% [markdown]
# The record of a run is in its directory. `samestep watch runs/` shows it as a live page.

# %%
losses = [event for event in read_history("runs/several") if event["event"] == "scalars"]
for event in losses[::20]:
    print(f"step {event['step']:3}  loss {event['values']['loss']:.3f}")
