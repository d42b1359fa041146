"""The Trainer of transformers: the same bits with 1 and 2 workers, and the results of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is missing: run `make integrations`")

import torch
import transformers

import samestep as ss
from samestep.cli import main
from samestep.integrations.huggingface import Trainer, TrainingArguments
from samestep.snapshot.read import list_snapshots
from tests.docs.blocks import ROOT, blocks_of
from tests.integrations import huggingface_job as job
from tests.jobs import fingerprint
from tests.workers import run_workers

# transformers and accelerate warn of options and of torch's own deprecations
pytestmark = pytest.mark.filterwarnings("default")
IN_ORDER = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
OFF = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def body(kind, out, settings=(), **options):
    """Train in a worker, with the options of a run from the environment of `samestep run`."""
    job.train(kind, {"output_dir": str(out), **dict(settings), **options})


@pytest.mark.parametrize(
    "arguments",
    [
        "bert",
        "gpt2",
        "padded",
        "masked",
        "masked dataloader_num_workers=1",
        "dropped",
        "dropped dataloader_num_workers=1",
    ],
)
def test_steps_are_the_same_with_2_workers_and_after_a_kill(
    arguments, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ["-n", "1,2", "--steps", "6", "--kill"]
    status = main(["verify", *flags, job.__file__, *arguments.split()])
    assert status == 0, "".join(capsys.readouterr())


def test_a_run_evaluates_logs_and_predicts_the_same_with_2_workers(tmp_path):
    reports = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        run_workers(body, workers, "bert", out, environment=OFF)
        reports.append(json.loads((out / "report.json").read_text()))
        for entry in reports[-1]["history"]:
            for name in [name for name in entry if name.endswith(("_runtime", "_per_second"))]:
                del entry[name]
    first, second = reports
    assert first["steps"] == 8
    # on_prediction_step is called by the worker that evaluates the block
    assert first["events"].pop("on_prediction_step") > second["events"].pop("on_prediction_step")
    assert first == second
    counts = {"step_begin": 8, "optimizer_step": 8, "step_end": 8, "epoch_begin": 2, "epoch_end": 2}
    assert counts.items() <= {name[3:]: count for name, count in first["events"].items()}.items()
    assert first["events"]["on_evaluate"] == 2
    assert first["events"]["on_log"] == 4 + 2 + 1  # every 2 steps, evaluations, the end

    evaluated = [entry for entry in second["history"] if "eval_loss" in entry][-1]
    run_workers(
        evaluate_again, 1, tmp_path / "2", second["predictions"], evaluated, environment=OFF
    )


def evaluate_again(folder, predictions, evaluated):
    """Compare predictions and metrics with those of the saved model, one sample at a time."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    samples = job.data("bert", 17, seed=2)
    with torch.no_grad():
        logits = torch.cat([model(**job.collate([sample])).logits for sample in samples])
    labels = torch.tensor([sample["labels"] for sample in samples])
    torch.testing.assert_close(torch.tensor(predictions), logits)
    assert evaluated["eval_samples"] == 17
    assert evaluated["eval_accuracy"] == int((logits.argmax(1) == labels).sum()) / 17
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert evaluated["eval_loss"] == pytest.approx(expected, rel=1e-5)


def compare_with_transformers(out):
    """Train GPT-2 on the same batches with both Trainers, and compare losses and weights."""
    results = []
    for lanes in (None, 4):
        torch.manual_seed(0)
        model = job.build("gpt2")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=12 // (lanes or 1),
            num_train_epochs=2,
            learning_rate=1e-2,
            weight_decay=0.1,
            max_grad_norm=0.5,
            warmup_steps=3,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        options = {"train_dataset": job.data("gpt2", 37, 1), "data_collator": job.collate}
        if lanes is None:
            trainer = transformers.Trainer(model, arguments, **options)
            trainer.train()
        else:
            with ss.init(lanes=lanes) as run:
                trainer = Trainer(model, arguments, run=run, **options)
                trainer.train()
        logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        results.append((logged, [parameter.detach().clone() for parameter in model.parameters()]))
    (theirs, their_weights), (ours, our_weights) = results
    assert len(theirs) == len(ours) == 8
    for their, our in zip(theirs, ours, strict=True):
        assert our == pytest.approx(their, rel=1e-4)
    torch.testing.assert_close(our_weights, their_weights, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not IN_ORDER, reason="this version of transformers always shuffles")
def test_losses_norms_rates_and_weights_are_those_of_transformers(tmp_path):
    environment = {**OFF, "OMP_NUM_THREADS": "1"}
    run_workers(compare_with_transformers, 1, str(tmp_path), environment=environment)


def stop_early(out, folder):
    """Train until early stopping, and start again: the run has ended."""
    steps = []
    for _ in range(2):
        with ss.init(lanes=4, dir=folder) as run:
            arguments = TrainingArguments(
                out, per_device_train_batch_size=3, num_train_epochs=9, eval_strategy="epoch",
                save_strategy="no", learning_rate=0.0, metric_for_best_model="loss",
                report_to="none", disable_tqdm=True, use_cpu=True,
            )  # fmt: skip
            stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
            trainer = Trainer(
                job.build("bert"), arguments, data_collator=job.collate, callbacks=[stopping],
                train_dataset=job.data("bert", 24, 1), eval_dataset=job.data("bert", 9, 2), run=run,
            )  # fmt: skip
            steps.append((trainer.train().global_step, stopping.early_stopping_patience_counter))
    assert steps == [(6, 2), (6, 2)]  # 2 steps in an epoch; the first one is the best


def test_a_run_that_a_callback_stopped_stays_stopped(tmp_path):
    run_workers(stop_early, 1, str(tmp_path / "out"), tmp_path / "run", environment=OFF)


def keep_the_best(out, folder):
    """Train with snapshots at the end of epochs, twice; the second start has no steps left."""
    starts = []
    for _ in range(2):
        with ss.init(lanes=4, dir=folder, keep_last=1, keep_best=1) as run:
            arguments = TrainingArguments(
                out, per_device_train_batch_size=3, num_train_epochs=5, eval_strategy="epoch",
                save_strategy="epoch", learning_rate=0.03, metric_for_best_model="loss",
                report_to="none", disable_tqdm=True, use_cpu=True,
            )  # fmt: skip
            trainer = Trainer(
                job.build("bert"), arguments, data_collator=job.collate, run=run,
                train_dataset=job.data("bert", 24, 1), eval_dataset=job.data("bert", 9, 2),
            )  # fmt: skip
            first_step = run.step
            trainer.train()
        snapshots = [path.name for path in list_snapshots(folder)]
        starts.append((first_step, snapshots, fingerprint(trainer.model.state_dict())))
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    best = min(losses, key=losses.get)
    assert [*losses] == [2, 4, 6, 8, 10]
    assert best < 10
    (_, snapshots, weights), again = starts
    assert snapshots == [f"step-{best:08}", "step-00000010"]
    assert again == (10, snapshots, weights)


def test_the_newest_and_the_best_snapshot_stay_and_the_newest_is_loaded(tmp_path):
    run_workers(keep_the_best, 1, str(tmp_path / "out"), tmp_path / "run", environment=OFF)


def refuse(out):
    """Check the errors of what has no meaning in a run."""

    def error(kind=Trainer, training=None, **options):
        arguments = TrainingArguments(out, use_cpu=True, report_to="none", **options)
        with ss.init(lanes=2) as run:
            try:
                trainer = kind(job.build("bert"), arguments, run=run)
                trainer.train(**training)
            except ss.ConfigError as caught:
                return str(caught)
        return None

    class Sampled(Trainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    assert "set lanes to" in error(gradient_accumulation_steps=2)
    assert 'precision="bfloat16"' in error(bf16=True)
    assert "keep_last" in error(save_total_limit=2)
    assert "samestep.init(seed=7)" in error(seed=7)
    assert "seed=..." in error(data_seed=0)
    assert "mean over the global batch" in error(average_tokens_across_devices=False)
    if IN_ORDER:
        assert "random or sequential" in error(train_sampling_strategy="group_by_length")
    else:
        assert "samestep orders the samples" in error(group_by_length=True)
    assert "keep_best" in error(load_best_model_at_end=True, eval_strategy="no", save_strategy="no")
    assert "get_train_dataloader would have no effect" in error(Sampled)
    assert "newest snapshot" in error(training={"resume_from_checkpoint": True})


def test_what_has_no_meaning_in_a_run_is_refused(tmp_path):
    run_workers(refuse, 1, str(tmp_path), environment=OFF)


def refuse_own_seed(out):
    """Check the error for masks that would depend on the process."""
    arguments = TrainingArguments(out, use_cpu=True)
    with ss.init(lanes=2) as run, pytest.raises(ss.ConfigError, match=r"\(seed=7\) has a gener"):
        Trainer(
            job.build("masked"), arguments, data_collator=job.collator("masked", seed=7), run=run
        )


def test_a_collator_with_a_seed_of_its_own_is_refused(tmp_path):
    run_workers(refuse_own_seed, 1, str(tmp_path), environment=OFF)


def test_arguments_of_transformers_are_refused(tmp_path):
    run_workers(refuse_arguments, 1, str(tmp_path), environment=OFF)


def refuse_arguments(out):
    """Check the error for arguments that would start communication of their own."""
    with ss.init(lanes=2) as run, pytest.raises(ss.ConfigError, match="change the import"):
        Trainer(job.build("bert"), transformers.TrainingArguments(out, use_cpu=True), run=run)


def test_the_guide_runs_with_2_workers(tmp_path):
    (script,) = [
        block.text
        for block in blocks_of(ROOT / "docs" / "huggingface.md")
        if block.test == "not run: needs transformers"
    ]
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **OFF},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'eval_loss'" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_requirements_include_those_of_the_extras():
    project = (ROOT / "pyproject.toml").read_text()
    lines = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    for extra in re.findall(r"^(?:lightning|transformers) = (.*)$", project, re.MULTILINE):
        # `make integrations` installs the extras of samestep itself with [dev]
        assert set(re.findall('"((?!samestep)[^"]+)"', extra)) <= {*lines}
