"""Real runs of the recipe on the digits, small enough for seconds."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sklearn.datasets  # noqa: F401  imported here once, not in each forked worker
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import recipes.vit
import samestep as ss
from recipes.file_check import LEFT_OUT_FILE
from recipes.scores import SCORES_FILE
from recipes.settings import SETTINGS_FILE, SettingsError, read
from recipes.vit import demo, training
from recipes.vit.config import Settings
from recipes.vit.data import open_images
from recipes.vit.train import evaluate, main
from recipes.vit.training import score, training_loss
from samestep.cli import main as samestep
from samestep.record.source import open_source
from samestep.snapshot.read import export, list_snapshots, load
from samestep.watch.view import View
from tests.jobs import events, fingerprint, logged
from tests.python import fork_what_tools_start
from tests.recipes.pictures import pictures
from tests.workers import WorkerFailedError, run_workers

RECIPE = Path(recipes.vit.__file__).parent
SMALL = [
    str(RECIPE / "digits.yaml"),
    *("epochs=2", "batch_size=400", "lanes=4", "evaluate_every=1"),
    *(
        "model.depth=2",
        "model.width=16",
        "model.dropout=0.1",
        "model.attention_dropout=0.1",
        "model.drop_path=0.1",
    ),
    *("mixup=0.2", "ema_decay=0.5", "optimizer.learning_rate=0.01", "optimizer.warmup_epochs=0.5"),
]
# tests/run has the laws of each
RARE = {"sgd without clipping", "float16", "bfloat16, loader processes"}
VARIANTS = {
    "whole": [],
    "sgd without clipping": [
        "optimizer.name=sgd",
        "optimizer.clip_norm=none",
        "optimizer.shard=true",
        "ema_decay=none",
    ],
    "float16": ["precision=float16", "optimizer.shard=true"],
    "bfloat16, loader processes": ["precision=bfloat16", "data.loader_workers=1", "mixup=0"],
}


def train(workers, directory, *changes):
    """Return the scores of a run and all that it left, by name."""
    scores = run_workers(main, workers, [*SMALL, "--dir", str(directory), *changes])
    assert all(others == scores[0] for others in scores)
    return {
        **scores[0],
        **fingerprint(load(list_snapshots(directory)[-1]).state),
        **logged(directory),
        **pictures(directory),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "trained"
    return directory, train(1, directory)


@pytest.mark.long
@pytest.mark.parametrize(
    "variant",
    [pytest.param(variant, marks=[pytest.mark.long] * (variant in RARE)) for variant in VARIANTS],
)
def test_the_number_of_workers_changes_nothing(variant, trained, tmp_path):
    changes = VARIANTS[variant]
    expected = train(1, tmp_path / "1", *changes) if changes else trained[1]
    assert train(3, tmp_path / "3", *changes) == expected


def test_the_record_has_the_settings_of_the_run(trained):
    (start,) = events(trained[0], "started")
    written = json.loads(json.dumps(read(Settings, SMALL).recorded(), default=str))
    assert start["settings"] == written


def test_the_page_shows_the_score_of_the_evaluation_first(trained):
    view = View(open_source(trained[0]))
    view.refresh()
    assert view.row()["principal"]["name"] == "model_top1"


def test_a_run_that_stopped_goes_on_as_if_it_had_not(trained, tmp_path):
    environment = {"SAMESTEP_STOP_AFTER": "5"}  # in the middle of the second epoch
    run_workers(main, 2, [*SMALL, "--dir", str(tmp_path)], environment=environment)
    assert [event["step"] for event in events(tmp_path, "stopped")] == [5]

    assert train(3, tmp_path) == trained[1]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_evaluation_as_a_command_gives_the_same_numbers(trained, workers):
    directory, left = trained
    for scores in run_workers(main, workers, ["--eval", "--dir", str(directory)]):
        assert scores.keys() == {
            f"{model}_{name}" for model in ("model", "ema") for name in ("loss", "top1", "top5")
        }
        assert scores.items() <= left.items()
    written = json.loads((directory / SCORES_FILE).read_text())
    assert written == {"step": 8, "scores": scores}


def make_images(directory, classes=("cat", "dog")):
    """Write three images per class to train on and three held-out ones; return the arguments."""
    torch.manual_seed(0)
    for part in ("train", "val"):
        for name in classes:
            for number in range(3):
                path = directory / part / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = torch.randint(0, 255, (8, 8), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(path)
    folder = ["data.source=folder", f"data.path={directory}", f"model.classes={len(classes)}"]
    return [*SMALL, *folder]


@pytest.mark.long
def test_a_folder_of_held_out_images_is_enough_for_evaluation(tmp_path):
    arguments = make_images(tmp_path / "images")
    (trained,) = run_workers(main, 1, [*arguments, "--dir", str(tmp_path / "run")])
    shutil.rmtree(tmp_path / "images" / "train")
    (scores,) = run_workers(main, 1, ["--eval", "--dir", str(tmp_path / "run")])
    assert scores == trained

    model = str(tmp_path / "model.safetensors")
    export(list_snapshots(tmp_path / "run")[-1], Path(model), "model")
    settings = str(tmp_path / "run" / SETTINGS_FILE)  # has the names of the classes
    out = tmp_path / "scores"
    arguments = [settings, "--eval", "--pretrained", model, "--out", str(out)]
    (scores,) = run_workers(main, 1, arguments)
    assert scores.items() <= trained.items()
    assert json.loads((out / SCORES_FILE).read_text()) == {"step": 0, "scores": scores}


@pytest.mark.parametrize("loader_workers", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_torn_image_is_one_line_on_the_terminal(loader_workers, tmp_path, capfd):
    arguments = make_images(tmp_path / "images")
    torn = tmp_path / "images" / "train" / "dog" / "1.png"
    torn.write_bytes(torn.read_bytes()[:60])
    loading = f"data.loader_workers={loader_workers}"
    script, directory = str(RECIPE / "train.py"), str(tmp_path / "run")
    assert samestep(["run", "-n", "2", script, *arguments, loading, "--dir", directory]) == 1

    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"samestep: error: worker \d failed first: {torn} cannot be read as an image: [^\n]+",
        lines[-1],
    )
    assert not any("Traceback" in line for line in lines)
    traces = [event.get("traceback", "") for event in events(tmp_path / "run", "failed")]
    assert any("in read_image" in trace for trace in traces)


@pytest.mark.long
def test_broken_images_are_left_out_before_the_order_is_drawn(tmp_path):
    images = make_images(tmp_path / "images")
    (tmp_path / "images" / "train" / "cat" / "1.png").write_bytes(b"no image")
    changes = ["data.broken=skip", "data.broken_limit=0.2", "data.check=full"]
    results = []
    for workers in (1, 2):
        directory = tmp_path / str(workers)
        arguments = [*images, *changes, "--dir", str(directory)]
        scores, *_ = run_workers(main, workers, arguments)
        left = fingerprint(load(list_snapshots(directory)[-1]).state)
        results.append((scores, left, (directory / LEFT_OUT_FILE).read_text()))
    assert results[0] == results[1]
    assert results[0][2].splitlines()[1:] == ["train/cat/1.png"]


@pytest.mark.long
def test_a_broken_held_out_image_loses_no_training(tmp_path):
    arguments = [*make_images(tmp_path / "images"), "--dir", str(tmp_path / "run")]
    torn = tmp_path / "images" / "val" / "dog" / "1.png"
    content = torn.read_bytes()
    torn.write_bytes(content[:60])
    with pytest.raises(WorkerFailedError, match=r"val/dog/1\.png cannot be read as an image"):
        run_workers(main, 2, arguments)
    assert [path.name for path in list_snapshots(tmp_path / "run")] == ["step-00000001"]
    torn.write_bytes(content)
    (scores,) = run_workers(main, 1, arguments)
    whole = [*make_images(tmp_path / "images"), "--dir", str(tmp_path / "whole")]
    assert run_workers(main, 2, whole) == [scores] * 2


def test_a_worker_evaluates_as_many_images_at_once_as_is_set(monkeypatch):
    sizes = {}

    def score(model, batch):
        sizes[len(sizes)] = len(batch[1])
        return {}

    monkeypatch.setattr(training, "score", score)
    settings = read(Settings, [*SMALL, "evaluate_batch_size=100", "ema_decay=none"])
    images = open_images(settings.data, settings.model)
    with ss.init(lanes=4) as run:
        evaluate(run, settings, {"model": Linear(64, 10)}, images)
    assert [*sizes.values()] == [100, 100, 100, 55]


def test_an_exported_model_gives_the_same_numbers(trained, tmp_path):
    directory, left = trained
    for name in ("model", "ema"):
        export(list_snapshots(directory)[-1], tmp_path / f"{name}.safetensors", name)
        (scores,) = run_workers(
            main, 1, [*SMALL, "--eval", "--pretrained", str(tmp_path / f"{name}.safetensors")]
        )
        assert scores == {f"model_{key}": left[f"{name}_{key}"] for key in ("loss", "top1", "top5")}


@pytest.mark.long
def test_a_written_settings_file_gives_the_same_run(trained, tmp_path):
    directory, left = trained
    assert read(Settings, [str(directory / SETTINGS_FILE)]) == read(Settings, SMALL)
    (scores,) = run_workers(main, 1, [str(directory / SETTINGS_FILE), "--dir", str(tmp_path)])
    assert scores.items() <= left.items()


@pytest.mark.long
def test_what_the_run_decided_is_written(tmp_path):
    run_workers(
        main,
        2,
        [*SMALL, "lanes=none", "epochs=1", "--dir", str(tmp_path)],
        environment={"SAMESTEP_SEED": "7"},
    )
    written = read(Settings, [str(tmp_path / SETTINGS_FILE)])
    assert (written.lanes, written.seed, written.precision) == (2, 7, "float32")


@pytest.mark.long
def test_the_means_of_an_epoch_are_those_of_its_images(trained, tmp_path, capfd):
    recorded = [event["values"] for event in events(trained[0], "scalars")]
    sizes = [400, 400, 400, 242]  # of 1,442 images
    for name in ("loss", "top1"):
        steps = [values[name] for values in recorded if name in values]
        means = [values[f"train/{name}"] for values in recorded if f"train/{name}" in values]
        assert means == [
            sum(size * value for size, value in zip(sizes, epoch, strict=True)) / sum(sizes)
            for epoch in (steps[:4], steps[4:])
        ]

    run_workers(main, 2, [*SMALL, "epochs=1", "--dir", str(tmp_path)])
    output = capfd.readouterr().out
    assert "batch size 400 over all workers: 200 per worker, 100 per lane\n" in output
    assert re.search(r"^epoch 1, training means: loss \d\.\d{4}  top1 0\.", output, re.MULTILINE)


@pytest.mark.long
def test_a_precision_of_the_run_scales_the_loss_like_the_setting(tmp_path):
    directories = [tmp_path / "setting", tmp_path / "flag"]
    for directory, changes, environment in (
        (directories[0], ["precision=float16"], {}),
        (directories[1], [], {"SAMESTEP_PRECISION": "float16"}),
    ):
        arguments = [*SMALL, *changes, "epochs=1", "--dir", str(directory)]
        run_workers(main, 1, arguments, environment=environment)
    by_setting, by_flag = (load(list_snapshots(directory)[-1]).state for directory in directories)
    assert by_setting["scaler"]["scale"] > 1
    assert fingerprint(by_flag) == fingerprint(by_setting)


@pytest.mark.long
def test_fine_tuning_starts_from_a_file_and_goes_on_from_its_own_snapshots(trained, tmp_path):
    export(list_snapshots(trained[0])[-1], tmp_path / "model.safetensors")
    arguments = [
        *SMALL,
        "--pretrained",
        str(tmp_path / "model.safetensors"),
        "--dir",
        str(tmp_path / "run"),
    ]
    (first,) = run_workers(main, 1, [*arguments, "epochs=3"])
    (again,) = run_workers(main, 1, [*arguments, "epochs=3"])
    assert first["model_loss"] < trained[1]["model_loss"]
    assert again == first


def test_evaluation_without_parameters_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--eval"])
    assert "--eval needs --dir, the directory of a run, or --pretrained" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=f"{SETTINGS_FILE} does not exist"):
        main([*SMALL, "--eval", "--dir", str(tmp_path)])
    (tmp_path / SETTINGS_FILE).write_text("")
    with pytest.raises(WorkerFailedError, match="--eval needs the --dir of a run with a snapshot"):
        run_workers(main, 1, [*SMALL, "--eval", "--dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--eval --dir a --pretrained b.pth", "--eval takes --dir or --pretrained, not both"),
        ("--dir a --out b", "--out is for --eval"),
    ],
)
def test_flags_that_contradict_each_other_are_an_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, *arguments.split()])
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_the_demonstration_ends_well(tmp_path, monkeypatch, capfd):
    def run_here(command, *, check):
        """Run a samestep command without another import of torch."""
        assert (command[:3], check) == ([sys.executable, "-m", "samestep"], True)
        assert samestep(command[3:]) == 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run_here))
    fork_what_tools_start(monkeypatch)
    demo.main([change for change in SMALL if "=" in change])
    printed = capfd.readouterr().out
    for line in (
        "the same numbers, to the last bit",
        "predicted",
        "the same at every step: n=1, n=2",
    ):
        assert line in printed


# The loss


class Linear(nn.Linear):
    def forward(self, images):
        return super().forward(images.flatten(1))


@given(size=st.integers(1, 9), mixup=st.floats(0.1, 3), seed=st.integers(0, 2**32))
def test_mixup_mixes_targets_as_images(size, mixup, seed):
    torch.manual_seed(seed)
    model, images, labels = Linear(4, 3), torch.randn(size, 1, 2, 2), torch.arange(size) % 3
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))

    loss, _ = training_loss(model, (images, labels), mixup=mixup, cutmix=0.0, label_smoothing=0.1)

    # Mixing is linear, so the share of each image is found by least squares, and the loss is that
    # of the targets so mixed.
    torch.testing.assert_close(seen[0].mean(0), images.mean(0))
    shares = (
        torch.linalg.lstsq(images.flatten(1).T.double(), seen[0].flatten(1).T.double()).solution.T
        if size <= 4
        else None
    )
    if shares is not None:
        targets = shares.float() @ (nn.functional.one_hot(labels, 3).float() * 0.9 + 0.1 / 3)
        torch.testing.assert_close(
            loss, nn.functional.cross_entropy(model(seen[0]), targets), rtol=1e-3, atol=1e-3
        )


@given(seed=st.integers(0, 2**32), alpha=st.floats(0.1, 3))
def test_cutmix_weighs_targets_by_pixels(seed, alpha):
    torch.manual_seed(seed)
    images = torch.arange(6.0)[:, None, None, None].expand(6, 1, 8, 5)  # each has its number
    labels, seen = torch.arange(6) % 3, []

    def model(mixed):
        seen.append(mixed)
        return mixed.flatten(1)[:, :3]

    loss, _ = training_loss(model, (images, labels), mixup=0.0, cutmix=alpha, label_smoothing=0.0)

    targets = torch.stack(
        [
            nn.functional.one_hot(labels, 3)[image.long().flatten()].float().mean(0)
            for image in seen[0]
        ]
    )  # each pixel counts for the class of the image that it is from
    expected = nn.functional.cross_entropy(model(seen[0]), targets)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert all(len(image.unique()) <= 2 for image in seen[0])


def test_both_mixups_share_the_batches():
    images, labels, pasted = torch.rand(4, 1, 8, 8), torch.arange(4) % 3, 0
    for seed in range(40):
        torch.manual_seed(seed)
        seen = []
        training_loss(
            lambda mixed, seen=seen: (seen.append(mixed), mixed.flatten(1)[:, :3])[1],
            (images, labels),
            mixup=1.0,
            cutmix=1.0,
            label_smoothing=0.0,
        )
        pasted += bool(torch.isin(seen[0], images).all())  # CutMix makes no new values
    assert 10 <= pasted <= 30


def test_without_mixup_nothing_is_drawn():
    model, images, labels = Linear(4, 3), torch.randn(5, 1, 2, 2), torch.arange(5) % 3
    state = torch.get_rng_state()
    loss, means = training_loss(model, (images, labels), mixup=0.0, cutmix=0.0, label_smoothing=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert loss.item() == pytest.approx(score(model, (images, labels))["loss"].item())
    assert means["top1"].equal(score(model, (images, labels))["top1"])


@pytest.mark.parametrize(("classes", "top5"), [(3, 1.0), (7, 0.5)])
def test_top5_counts_a_label_among_the_five_likeliest(classes, top5):
    logits = torch.arange(float(classes)).repeat(2, 1)
    means = score(lambda _: logits, (None, torch.tensor([0, classes - 1])))
    assert [means[name].double().mean().item() for name in ("top1", "top5")] == [0.5, top5]


# The files


@pytest.mark.parametrize("file", sorted(RECIPE.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_settings_file_can_be_read(file):
    settings = read(Settings, [str(file)])
    if settings.lanes is not None:
        assert settings.batch_size % settings.lanes == 0


@pytest.mark.long
def test_recipes_launch_from_python(tmp_path):
    scores = ss.launch(main, [*SMALL, "epochs=1", "--dir", str(tmp_path)], workers=2)
    assert scores.keys() >= {"model_top1", "ema_top1"}
