"""Real runs of the recipe on a few digits, small enough for seconds."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import recipes.detect
from recipes.detect import train as script
from recipes.detect.config import Settings
from recipes.detect.data import open_images
from recipes.detect.picture import PREDICTIONS_FILE
from recipes.detect.train import main
from recipes.scores import SCORES_FILE
from recipes.settings import SETTINGS_FILE, SettingsError, read
from samestep.cli import main as samestep
from samestep.data.plan import GroupedPlan
from samestep.snapshot.read import export, list_snapshots, load
from tests.jobs import events, fingerprint, logged
from tests.recipes.detect.small import SMALL
from tests.recipes.pictures import pictures
from tests.workers import WorkerFailedError, run_workers

RECIPE = Path(recipes.detect.__file__).parent
OTHERWISE = [
    *(
        "optimizer.name=sgd",
        "optimizer.shard=true",
        "optimizer.clip_norm=none",
        "precision=bfloat16",
    ),
    *("data.short_sides=[48, 64]", "data.longest_side=80", "data.loader_workers=1"),
]


def train(workers, directory, data, *changes, **environment):
    """Return the scores of a run and all that it left, by name."""
    arguments = [*SMALL, f"data.path={data}", "--dir", str(directory), *changes]
    scores = run_workers(main, workers, arguments, environment=environment)
    assert all(others == scores[0] for others in scores)
    predictions = (
        (directory / PREDICTIONS_FILE).read_text()
        if (directory / PREDICTIONS_FILE).exists()
        else ""
    )
    state = fingerprint(load(list_snapshots(directory)[-1]).state)
    return {
        **scores[0],
        **state,
        **logged(directory),
        **pictures(directory),
        "predictions": predictions,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits):
    directory = tmp_path_factory.mktemp("runs") / "trained"
    return directory, train(1, directory, digits)


@pytest.mark.long
def test_samestep_verify_finds_every_step_the_same(digits, capsys):
    assert (
        samestep(
            [
                "verify",
                "-n",
                "2,1x2",
                "--steps",
                "2",
                str(RECIPE / "train.py"),
                *SMALL,
                f"data.path={digits}",
            ]
        )
        == 0
    )
    assert "the same at every step: n=2, n=1x2" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_number_of_workers_changes_nothing(workers, trained, digits, tmp_path):
    left = train(workers, tmp_path, digits)
    assert left == trained[1]
    assert json.loads(left["predictions"])


@pytest.mark.long
def test_nor_does_it_with_sharded_sgd_bfloat16_loader_processes_and_sizes_that_are_drawn(
    digits, tmp_path
):
    assert train(3, tmp_path / "3", digits, *OTHERWISE) == train(
        1, tmp_path / "1", digits, *OTHERWISE
    )


@pytest.mark.long
@pytest.mark.long
def test_nor_do_several_devices_of_one_worker(trained, digits, tmp_path):
    assert train(1, tmp_path, digits, SAMESTEP_DEVICES="cpu,cpu") == trained[1]


def test_a_run_that_stopped_in_an_epoch_goes_on_as_if_it_had_not(trained, digits, tmp_path):
    stopped_at, steps_per_epoch = 2, steps_of(digits)
    assert 0 < stopped_at < steps_per_epoch
    arguments = [*SMALL, f"data.path={digits}", "--dir", str(tmp_path)]
    run_workers(main, 2, arguments, environment={"SAMESTEP_STOP_AFTER": str(stopped_at)})
    assert [event["step"] for event in events(tmp_path, "stopped")] == [stopped_at]

    assert train(3, tmp_path, digits) == trained[1]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_evaluation_as_a_command_gives_the_same_predictions(workers, trained, tmp_path):
    directory, left = tmp_path / "run", trained[1]
    shutil.copytree(trained[0], directory)
    (directory / PREDICTIONS_FILE).unlink()
    for scores in run_workers(main, workers, ["--eval", "--dir", str(directory)]):
        assert scores.items() <= left.items()
    assert (directory / PREDICTIONS_FILE).read_text() == left["predictions"]
    written = json.loads((directory / SCORES_FILE).read_text())
    assert written["scores"] == scores


def test_predictions_are_by_image_in_coco_format(trained, digits):
    predictions = json.loads(trained[1]["predictions"])
    entries = open_images(read(Settings, [f"data.path={digits}"]).data).val.entries
    numbers = [prediction["image_id"] for prediction in predictions]
    assert numbers == sorted(numbers)
    sizes = {entry["id"]: [entry["height"], entry["width"]] for entry in entries}
    for prediction in predictions:
        assert prediction.keys() == {"image_id", "category_id", "bbox", "score", "segmentation"}
        assert prediction["segmentation"]["size"] == sizes[prediction["image_id"]]
    assert max(Counter(numbers).values()) <= 5


def test_the_record_has_each_loss_and_a_picture(trained):
    scalars = events(trained[0], "scalars")
    assert {"loss", "class", "box", "centerness", "mask", "learning_rate"} <= scalars[0][
        "values"
    ].keys()
    assert {event["step"] for event in events(trained[0], "image")} == {2, 5}


# Every image once


def steps_of(data):
    train_images = open_images(read(Settings, [f"data.path={data}"]).data).train
    return GroupedPlan(
        len(train_images), 4, 4, seed=0, groups=train_images.groups()
    ).steps_per_epoch


def seen_by(arguments):
    """Train, and return the ids of the images that this worker computed losses of."""
    seen, loss = [], script.detection_loss

    def spy(model, batch, *, settings):
        seen.extend(entry["id"] for entry in batch.entries)
        return loss(model, batch, settings=settings)

    script.detection_loss = spy  # in this forked worker alone
    main(arguments)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(("workers", "epochs"), [(1, 1), (3, 2)])
def test_every_image_is_used_once_an_epoch(workers, epochs, digits):
    steps = epochs * steps_of(digits)
    seen = run_workers(
        seen_by, workers, [*SMALL, f"data.path={digits}", f"optimizer.steps={steps}"]
    )
    assert Counter(number for numbers in seen for number in numbers) == dict.fromkeys(
        range(1, 14), epochs
    )


# Few images and no boxes


def keep(data, directory, part, numbers, with_boxes):
    """Copy some images of a set, with the annotations of some of them."""
    content = json.loads((data / f"{part}.json").read_text())
    content["images"] = [image for image in content["images"] if image["id"] in numbers]
    content["annotations"] = [
        entry for entry in content["annotations"] if entry["image_id"] in with_boxes
    ]
    directory.mkdir(exist_ok=True)
    (directory / f"{part}.json").write_text(json.dumps(content))
    (directory / part).symlink_to(data / part)


@pytest.mark.long
def test_more_workers_than_images_and_images_without_boxes_are_no_trouble(digits, tmp_path):
    data = tmp_path / "data"
    keep(digits, data, "train", {1, 2, 3}, with_boxes={1})
    keep(digits, data, "val", {1}, with_boxes={1})

    left = train(4, tmp_path / "4", data, "optimizer.steps=3")
    assert left == train(1, tmp_path / "1", data, "optimizer.steps=3")
    losses = {
        name: float(value)
        for name, value in left.items()
        if name.startswith(("class at", "mask at"))
    }
    assert losses
    assert all(value > 0 for value in losses.values()), losses


def test_a_file_without_any_box_is_an_error_before_the_first_step(digits, tmp_path):
    keep(digits, tmp_path, "train", {1, 2, 3}, with_boxes=set())
    keep(digits, tmp_path, "val", {1}, with_boxes={1})
    with pytest.raises(SettingsError, match=r"train\.json has no box to learn"):
        main([*SMALL, f"data.path={tmp_path}"])


# Boxes alone, and held-out images alone


@pytest.mark.long
def test_boxes_train_without_masks_and_val_is_evaluated_without_train(digits, tmp_path):
    for part in ("train", "val"):
        content = json.loads((digits / f"{part}.json").read_text())
        for entry in content["annotations"]:
            entry["segmentation"] = []
        (tmp_path / f"{part}.json").write_text(json.dumps(content))
        (tmp_path / part).symlink_to(digits / part)
    with pytest.raises(SettingsError, match=r"got none; model\.masks=false learns boxes alone"):
        main([*SMALL, f"data.path={tmp_path}"])
    run = tmp_path / "run"
    left = train(2, run, tmp_path, "model.masks=false", "optimizer.steps=2")
    assert left == train(1, tmp_path / "1", tmp_path, "model.masks=false", "optimizer.steps=2")
    assert "box_ap" in left
    assert not [name for name in left if "mask" in name and "mask AP" not in name]
    assert "segmentation" not in left["predictions"]

    (tmp_path / "train.json").unlink()
    (tmp_path / "train").unlink()
    scores = main(["--eval", "--dir", str(run)])
    assert scores.items() <= left.items()
    export(list_snapshots(run)[-1], tmp_path / "model.safetensors")
    pretrained = ["--eval", "--pretrained", str(tmp_path / "model.safetensors")]
    changes = [*SMALL, "model.masks=false", f"data.path={tmp_path}", "--out", str(tmp_path / "out")]
    assert main([*changes, *pretrained]) == scores
    assert json.loads((tmp_path / "out" / SCORES_FILE).read_text())["scores"] == scores
    with pytest.raises(SettingsError, match=r"expected the categories data\.class_names=\['a'\]"):
        main(["--eval", "--dir", str(run), "data.class_names=[a]"])


# Settings


def test_a_written_settings_file_gives_the_same_run(trained, digits):
    expected = [*SMALL, f"data.path={digits}", f"data.class_names={list(map(str, range(10)))}"]
    assert read(Settings, [str(trained[0] / SETTINGS_FILE)]) == read(Settings, expected)


def test_evaluation_without_parameters_is_an_error(tmp_path, digits, capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--eval"])
    assert "--eval needs --dir" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=f"{SETTINGS_FILE} does not exist"):
        main(["--eval", "--dir", str(tmp_path)])
    (tmp_path / SETTINGS_FILE).write_text(f"data: {{path: {digits}}}")
    with pytest.raises(WorkerFailedError, match="--eval needs the --dir of a run with a snapshot"):
        run_workers(main, 1, [*SMALL, "--eval", "--dir", str(tmp_path)])


@pytest.mark.parametrize("file", sorted(RECIPE.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_settings_file_can_be_read(file):
    settings = read(Settings, [str(file)])
    assert settings.batch_size % (settings.lanes or 1) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.strides=[8, 16]", r"must start with one of \[2, 4\]"),
        ("model.strides=[4, 16]", "double at each level"),
        ("model.widths=[8]", "expected a positive number per stage"),
    ],
)
def test_levels_that_do_not_fit_are_refused(change, message):
    with pytest.raises(SettingsError, match=message):
        script.Detector(read(Settings, [*SMALL, change]).model, classes=2)


def test_one_image_gives_outputs_of_every_level():
    torch.manual_seed(0)
    settings = read(
        Settings,
        [
            *SMALL,
            "model.strides=[4, 8, 16, 32]",
            "model.widths=[8, 20]",
            "model.stem_pool=true",
            "model.bottleneck=4",
        ],
    )
    model = script.Detector(read(Settings, [*SMALL, "model.strides=[4, 8, 16]"]).model, classes=3)
    outputs = model(torch.rand(2, 3, 24, 40))
    cells = [6 * 10, 3 * 5, 2 * 3]
    assert outputs.strides.tolist() == [4.0] * cells[0] + [8.0] * cells[1] + [16.0] * cells[2]
    assert outputs.class_logits.shape == (2, sum(cells), 3)
    assert outputs.mask_features.shape == (2, 8, 6, 10)
    assert script.Detector(settings.model, classes=1).multiple == 8
