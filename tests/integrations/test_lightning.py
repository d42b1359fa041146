"""A LightningModule in a run: the same bits with 1 and 2 workers, and the results of Lightning."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("lightning", reason="lightning is missing: run `make integrations`")

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import samestep as ss
from samestep.cli import main
from samestep.errors import LossError
from samestep.integrations.lightning import fit
from tests.docs.blocks import ROOT, blocks_of
from tests.integrations import lightning_job as job
from tests.jobs import fingerprint
from tests.workers import WorkerFailedError, run_workers

pytestmark = pytest.mark.filterwarnings("default")


def test_steps_are_the_same_with_2_workers_and_after_a_kill(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status = main(["verify", "-n", "1,2", "--steps", "6", "--kill", job.__file__])
    assert status == 0, "".join(capsys.readouterr())


def test_a_module_logs_and_validates_the_same_with_2_workers(tmp_path):
    for workers in (1, 2):
        run_workers(job.train, workers, 2, tmp_path / f"{workers}.json")
    first, second = (json.loads((tmp_path / f"{workers}.json").read_text()) for workers in (1, 2))
    assert first == second
    hooks = [text.split()[0] for text in first["hooks"]]
    assert hooks == ["start", "validated", "end"] * 2
    assert {"train_loss", "train_loss_epoch", "val_loss", "rate"} <= first["metrics"].keys()

    module, samples = job.Net(), job.images(17, seed=2)
    for parameter, values in zip(module.parameters(), first["weights"], strict=True):
        parameter.data = torch.tensor(values)
    logits, labels = module.eval().layers(samples.tensors[0]), samples.tensors[1]
    loss = F.cross_entropy(logits, labels).item()
    assert first["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-5)
    accuracy = int((logits.argmax(1) == labels).sum()) / 17
    assert first["metrics"]["val_accuracy"] == pytest.approx(accuracy)


class InOrder(job.Data):
    """The data in their own order, which both trainers use."""

    shuffle = False


def compare_with_lightning(folder):
    """Train on the same batches with Lightning's Trainer and with fit."""
    results = []
    for lanes in (None, 4):
        torch.manual_seed(0)
        module = job.Net(dropout=0.0)
        if lanes is None:
            trainer = lightning.Trainer(
                max_epochs=3, accelerator="cpu", devices=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                num_sanity_val_steps=0, gradient_clip_val=0.5, default_root_dir=folder,
            )  # fmt: skip
            trainer.fit(module, datamodule=InOrder())
            metrics = trainer.callback_metrics
        else:
            with ss.init(lanes=lanes) as run:
                metrics = fit(module, InOrder(), run=run, max_epochs=3, gradient_clip_val=0.5)
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        results.append(({name: float(value) for name, value in metrics.items()}, weights))
    (theirs, their_weights), (ours, our_weights) = results
    names = {"train_loss", "train_loss_epoch", "val_loss", "val_accuracy", "rate"}
    assert names <= theirs.keys()
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    torch.testing.assert_close(our_weights, their_weights, rtol=1e-3, atol=1e-5)


def test_weights_and_metrics_are_those_of_lightning(tmp_path):
    run_workers(compare_with_lightning, 1, str(tmp_path))


def leave_unclipped():
    """Check that a limit of 0 is none, as in Lightning."""
    left = []
    for limit in (None, 0, 0.0):
        torch.manual_seed(0)
        module = job.Net()
        with ss.init(lanes=2) as run:
            fit(module, job.Data(), run=run, max_epochs=1, gradient_clip_val=limit)
        left.append(fingerprint(module.state_dict()))
    assert left[0] == left[1] == left[2]


def test_a_largest_norm_of_0_is_no_limit():
    run_workers(leave_unclipped, 1)


class Plateau(job.Net):
    """Divides its learning rate by 10 when its constant validation loss does not fall."""

    def validation_step(self, batch, batch_idx):
        self.log("constant", 1.0)

    def on_validation_epoch_end(self):
        pass

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        return {"optimizer": self.optimizer, "lr_scheduler": scheduler, "monitor": "constant"}


def plateau():
    """Train for an epoch that sets the best loss, and for two that do not improve it."""
    with ss.init(lanes=2) as run:
        module = Plateau()
        fit(module, job.Data(), run=run, max_epochs=3)
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 / 10 / 10)


def test_a_scheduler_gets_the_metric_that_it_monitors():
    run_workers(plateau, 1)


class Manual(job.Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(job.Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Hooked(job.Net):
    def on_after_backward(self):
        pass


class Stepped(job.Net):
    def optimizer_step(self, *args, **kwargs):
        pass


class Summed(job.Net):
    def training_step(self, batch, batch_idx):
        self.log("sum", 1.0, reduce_fx="sum")


class Counted(job.Net):
    def training_step(self, batch, batch_idx):
        self.accuracy(self.layers(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Computed(job.Net):
    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self.layers(batch[0]), batch[1])
        self.log("nothing", 0.0)


class Sampled(job.Data):
    def train_dataloader(self):
        sampler = WeightedRandomSampler([1.0] * 37, 37)
        return DataLoader(self.sets[0], 12, sampler=sampler)


class LoggedMetric(job.Net):
    def training_step(self, batch, batch_idx):
        self.log("train_accuracy", self.accuracy)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(job.images(37, seed=1))


class Streamed(job.Data):
    def train_dataloader(self):
        return DataLoader(Stream(), 12)


class Initialized(job.Data):
    def val_dataloader(self):
        return DataLoader(self.sets[1], 5, num_workers=1, worker_init_fn=torch.manual_seed)


def refuse():
    """Check the errors of what would have no effect."""
    cases = [
        (Manual, job.Data, "manual optimization"),
        (TwoOptimizers, job.Data, "one optimizer and at most one scheduler, got 2 and 0"),
        (Hooked, job.Data, "Hooked.on_after_backward would have no effect"),
        (Stepped, job.Data, "Stepped.optimizer_step would have no effect"),
        (Summed, job.Data, "means over samples"),
        (Counted, job.Data, "the loss function updated model.accuracy, a MulticlassAccuracy"),
        (LoggedMetric, job.Data, "training_step got a metric.*on_epoch=True"),
        (Computed, job.Data, "validation_step updated a torchmetrics object"),
        (job.Net, Sampled, "got WeightedRandomSampler"),
        (job.Net, Streamed, "train_dataloader has an iterable data set, Stream.*run.streams"),
        (job.Net, Initialized, "worker_init_fn of val_dataloader would have no effect"),
    ]
    for net, data, message in cases:
        error = LossError if net is Counted else ss.ConfigError
        with pytest.raises(error, match=message), ss.init(lanes=2) as run:
            fit(net(), data(), run=run, max_epochs=1)


def test_what_would_have_no_effect_is_refused():
    run_workers(refuse, 1)


class Appending(job.Net):
    """Averages outputs of its own steps, as Lightning's guides do on one device."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(F.cross_entropy(self.layers(batch[0]), batch[1]))
        self.log("any", 1.0)

    def on_validation_epoch_end(self):
        self.log("own_mean", torch.stack(self.outputs).mean())


def append():
    """Check the error for a mean over the samples of one worker."""
    with ss.init(lanes=2) as run:
        fit(Appending(), job.Data(), run=run, max_epochs=1)


def test_means_over_the_samples_of_one_worker_are_refused():
    run_workers(append, 1)
    with pytest.raises(WorkerFailedError, match=r"'own_mean'.* got different values on workers"):
        run_workers(append, 2)


def test_the_guide_runs_with_2_workers(tmp_path):
    (script,) = [
        block.text
        for block in blocks_of(ROOT / "docs" / "lightning.md")
        if block.test == "not run: needs lightning"
    ]
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "val_loss" in done.stdout
