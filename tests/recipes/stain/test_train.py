"""Real runs of the recipe on real tissue, small enough for seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import samestep as ss
from recipes.file_check import CACHE_FILE
from recipes.settings import SETTINGS_FILE, SettingsError, read
from recipes.stain import test, train
from recipes.stain.config import Settings, read_arguments
from recipes.stain.data import open_strips
from recipes.stain.model import Networks, TileNorm
from recipes.stain.training import Losses, make_optimizers, make_schedulers
from recipes.stain.validation import evaluate, shown
from samestep.cli import main
from samestep.snapshot.read import export, list_snapshots, load
from tests.jobs import events, fingerprint, logged
from tests.recipes.pictures import pictures
from tests.recipes.stain.strips import RECIPE, SMALL, make_strips
from tests.terminal import run_samestep
from tests.workers import WorkerFailedError, run_workers

VARIANTS = {
    "linear": [],
    "step": ["optimizer.policy=step", "optimizer.step_epochs=1"],
    "sharded, plateau, bfloat16, loader processes": [
        "optimizer.shard=true",
        "optimizer.policy=plateau",
        "optimizer.patience=0",
        "precision=bfloat16",
        "data.loader_workers=1",
        "model.norm=instance",
    ],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_strips(tmp_path_factory.mktemp("strips"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "trained"
    return directory, run_to_end(1, directory, data)


def run_to_end(workers, directory, *changes, **environment):
    """Return the scores of a run and all that it left, by name."""
    scores = run_workers(
        train.main, workers, [*SMALL, "--dir", str(directory), *changes], environment=environment
    )
    assert all(others == scores[0] for others in scores)
    return {
        **scores[0],
        **fingerprint(load(list_snapshots(directory)[-1]).state),
        **logged(directory),
        **pictures(directory),
    }


# The same at any number of workers


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "devices"),
    [(2, "1"), pytest.param(4, "1", marks=pytest.mark.long), (1, "cpu,cpu")],
)
def test_the_number_of_workers_and_devices_changes_nothing(
    workers, devices, trained, data, tmp_path
):
    assert run_to_end(workers, tmp_path, data, SAMESTEP_DEVICES=devices) == trained[1]


@pytest.mark.long
def test_samestep_verify_finds_every_step_the_same(data, capsys):
    script = str(Path(train.__file__))
    assert main(["verify", "-n", "2,1x2", "--steps", "2", script, *SMALL, data]) == 0
    assert "the same at every step: n=2, n=1x2" in capsys.readouterr().out


def test_what_is_compared_holds_every_network_and_both_optimizers_after_updates(trained, data):
    settings = read(Settings, [*SMALL, "modalities=[hematoxylin, dab]"])
    with ss.init(lanes=settings.lanes, seed=settings.seed):
        networks = Networks(settings)
    for kind in ("generators", "discriminators"):
        blank = fingerprint(getattr(networks, kind).state_dict(), f"/{kind}")
        assert {"/".join(name.split("/")[2].split(".")[:2]) for name in blank} == {
            *(f"translation/{number}" for number in range(2)),
            *(f"segmentation/{number}" for number in range(3)),
        }
        assert all(trained[1][name] != value for name, value in blank.items())
        for number, _ in enumerate(getattr(networks, kind).parameters()):
            assert f"/{kind}_optimizer/state/{number}/exp_avg_sq" in trained[1]
        assert f"/{kind}_scheduler/last_epoch" in trained[1]


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=[pytest.mark.long] * (variant in {"linear", "step"}))
        for variant in VARIANTS
    ],
)
def test_a_run_that_stopped_goes_on_as_if_it_had_not_at_another_number_of_workers(
    variant, data, trained, tmp_path
):
    changes = [data, *VARIANTS[variant]]
    expected = run_to_end(1, tmp_path / "whole", *changes) if VARIANTS[variant] else trained[1]
    stopped = [*SMALL, *changes, "--dir", str(tmp_path / "stopped")]
    # in the middle of the second epoch
    run_workers(train.main, 2, stopped, environment={"SAMESTEP_STOP_AFTER": "3"})
    assert [event["step"] for event in events(tmp_path / "stopped", "stopped")] == [3]

    assert run_to_end(3, tmp_path / "stopped", *changes, "--continue") == expected


@pytest.mark.long
def test_a_run_is_continued_with_its_own_settings(data, tmp_path):
    run_workers(
        train.main,
        1,
        [*SMALL, data, "--dir", str(tmp_path)],
        environment={"SAMESTEP_STOP_AFTER": "1"},
    )
    before = read(Settings, [str(tmp_path / SETTINGS_FILE)])
    run_workers(train.main, 1, ["--continue", "--dir", str(tmp_path), "epochs=1"])
    after = read(Settings, [str(tmp_path / SETTINGS_FILE), "epochs=2"])
    assert (
        before
        == after
        == read(Settings, [str(Path(train.__file__).with_name("tissue.yaml")), *SMALL, data])
    )
    assert [event["step"] for event in events(tmp_path, "finished")] == [2]
    (changed,) = events(tmp_path, "environment_changed")
    assert changed["differences"] == "  setting epochs: 2 -> 1"


def test_float16_is_refused_before_training_because_losses_are_not_scaled(data, tmp_path):
    message = "precision must be float32 or bfloat16 in this recipe, .* got float16"
    with pytest.raises(WorkerFailedError, match=message):
        run_workers(
            train.main,
            1,
            [*SMALL, data, "--dir", str(tmp_path)],
            environment={"SAMESTEP_PRECISION": "float16"},
        )
    assert not (tmp_path / SETTINGS_FILE).exists()
    assert list_snapshots(tmp_path) == []


def test_there_must_be_a_run_to_continue(data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main(["--continue", "--dir", str(tmp_path)])
    assert (
        f"--continue: expected the --dir of a run, and {tmp_path / SETTINGS_FILE} does not exist"
        in capsys.readouterr().err
    )
    (tmp_path / SETTINGS_FILE).write_text(f"data: {{path: {data.partition('=')[2]}}}\n")
    for command, message in (
        (train.main, "--continue needs a snapshot, and .* has none"),
        (test.main, "has no snapshot"),
    ):
        with pytest.raises(SettingsError, match=message):
            command(
                ["--continue", "--dir", str(tmp_path)]
                if command is train.main
                else ["--dir", str(tmp_path)]
            )


# Options of the run before the script, and its own arguments after it

SEND = """
from pathlib import Path

def file(path):
    path = Path(path)
    with Path("sent.txt").open("a") as sent:
        sent.write(f"{path.parent.name}/{path.name}\\n")
"""


def run_command(folder, script, *arguments, options=()):
    """Run a script of the recipe by `samestep run` in a folder; return the output."""
    words = "run", "-n", "2", *options, str(RECIPE / script), *arguments
    status, output = run_samestep(*words, folder=folder, is_terminal=False)
    assert status == 0, output
    return output


@pytest.mark.long
def test_a_run_is_sent_elsewhere_by_options_before_the_script(data, tmp_path):
    (tmp_path / "send.py").write_text(SEND)
    options = [
        *("--remote", f"{(tmp_path / 'remote').as_uri()}"),
        *("--transfer", "send.file"),
        *("--sinks", f"{(tmp_path / 'sink').as_uri()}"),
    ]
    run_command(tmp_path, "train.py", *SMALL, data, "--dir", "run", options=options)

    newest = list_snapshots(tmp_path / "run")[-1]
    copied = list_snapshots(tmp_path / "remote")[-1]
    assert (newest.name, copied.name) == ("step-00000004", "step-00000004")
    assert fingerprint(load(copied).state) == fingerprint(load(newest).state)
    sent = (tmp_path / "sent.txt").read_text().split()
    assert {f"{newest.name}/{path.name}" for path in newest.iterdir()} <= set(sent)
    chunks = sorted((tmp_path / "sink" / "record").iterdir())
    copy = b"".join(chunk.read_bytes() for chunk in chunks)
    assert (tmp_path / "run" / "events.jsonl").read_bytes().startswith(copy)
    assert b'"event":"finished"' in copy


@pytest.mark.long
def test_a_directory_before_the_script_is_continued_and_tested_from_there(data, tmp_path):
    options = ["--dir", "run"]
    run_command(tmp_path, "train.py", *SMALL, data, options=[*options, "--stop-after", "1"])
    continued = run_command(tmp_path, "train.py", "--continue", options=options)
    tested = run_command(tmp_path, "test.py", options=options)

    assert "resumed at step 1" in continued
    assert [event["step"] for event in events(tmp_path / "run", "finished")][:1] == [4]
    (out,) = (tmp_path / "run").glob("test-*")
    scores = json.loads((out / "scores.json").read_text())
    assert scores["step"] == 4
    assert f"step 4: {shown(scores['scores'])}" in tested


# What a step does


@pytest.mark.long
def test_the_record_has_the_means_over_all_workers_as_a_plain_step_has_them(data, tmp_path):
    """A step of two workers beside one of plain PyTorch on all 12 strips at once.

    The five lanes have 3, 3, 2, 2 and 2 strips.
    """
    changes = [
        "lanes=5",
        "batch_size=12",
        "epochs=1",
        "model.norm=instance",
        "model.dropout=0",
        "data.crop_size=16",
        "data.flip=false",
    ]
    run_workers(train.main, 2, [*SMALL, data, *changes, "--dir", str(tmp_path)])
    (recorded,) = (
        event["values"]
        for event in events(tmp_path, "scalars")
        if "generators/loss" in event["values"]
    )

    settings = read(Settings, [str(tmp_path / SETTINGS_FILE)])
    with ss.init(lanes=5, seed=settings.seed):
        networks = Networks(settings)
    strips = torch.stack(list(open_strips(settings).train))
    expected = {
        "generators/learning_rate": settings.optimizer.generator_learning_rate,
        "discriminators/learning_rate": 2e-4,
    }
    for kind in ("discriminators", "generators"):
        optimizer = torch.optim.Adam(
            getattr(networks, kind).parameters(),
            lr=expected[f"{kind}/learning_rate"],
            betas=(0.5, 0.999),
        )
        loss, parts = getattr(Losses(settings), kind)(networks, strips)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected |= {
            f"{kind}/{name}": value.item()
            for name, value in {"loss": loss.detach(), **parts}.items()
        }

    assert recorded == pytest.approx(expected, rel=1e-4)
    of_one_worker, _ = Losses(settings).discriminators(Networks(settings), strips[:8])
    assert of_one_worker.item() != pytest.approx(expected["discriminators/loss"], rel=1e-4)


def test_each_call_updates_its_own_networks_alone(data):
    settings = read(Settings, [str(Path(train.__file__).with_name("tissue.yaml")), *SMALL, data])
    losses = Losses(settings)
    with ss.init(lanes=2, seed=0) as run:
        networks = run.replicate(Networks(settings))
        for batch in run.batches(open_strips(settings).train, 4, steps=1):
            for kind, other in (("discriminators", "generators"), ("generators", "discriminators")):
                run.backward(getattr(losses, kind), networks, batch, update=getattr(networks, kind))
                assert all(
                    parameter.grad is not None for parameter in getattr(networks, kind).parameters()
                )
                assert all(
                    parameter.grad is None for parameter in getattr(networks, other).parameters()
                )
                networks.zero_grad()


@pytest.mark.long
def test_training_improves_on_a_blank_start(data, tmp_path):
    changes = [
        data,
        "epochs=8",
        "evaluate_every=8",
        "optimizer.generator_learning_rate=0.01",
        "model.dropout=0",
    ]
    (scores,) = run_workers(train.main, 1, [*SMALL, *changes, "--dir", str(tmp_path)])
    settings = read(Settings, [str(tmp_path / SETTINGS_FILE)])
    with ss.init(lanes=settings.lanes, seed=settings.seed) as run:
        networks = run.replicate(Networks(settings))
        blank = evaluate(run, settings, networks.generators, open_strips(settings).val)
    assert scores["l1"] < 0.7 * blank["l1"]
    assert scores["hematoxylin_psnr"] > blank["hematoxylin_psnr"] + 1
    assert scores["dice_positive"] > blank["dice_positive"] + 0.2


# What is written, and by whom


def files_written(command, arguments, directory):
    """Run a command; return the files under `directory` that this process opened for writing."""
    written = set()

    def watch(event, details):
        if (
            event == "open"
            and isinstance(details[0], (str, os.PathLike))
            and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            path = Path(details[0])
            if path.is_relative_to(directory):
                written.add(str(path.relative_to(directory)))

    sys.addaudithook(watch)
    command(arguments)
    return written


@pytest.mark.long
def test_only_the_main_worker_writes(data, tmp_path):
    arguments = [*SMALL, data, "--dir", str(tmp_path)]
    first, second = run_workers(files_written, 2, train.main, arguments, tmp_path)
    images = {f"images/.val-row032-column000-{step:08}.png" for step in (1, 3)}
    names = {re.sub(r"\.\d+\.tmp$", "", name) for name in first}  # written atomically
    assert {name for name in names if not name.startswith("step-")} == {
        SETTINGS_FILE,
        f".{CACHE_FILE}",
        ".run.json",
        "events.jsonl",
        "run.lock",
        *images,
    }
    assert all(name.startswith("step-") for name in second)  # its part of a snapshot

    first, second = run_workers(
        files_written,
        2,
        test.main,
        ["--dir", str(tmp_path), "--out", str(tmp_path / "out")],
        tmp_path,
    )
    names = {
        f"out/row032-column{column:03}-{kind}.png"
        for column in range(0, 96, 16)
        for kind in ("hematoxylin", "dab", "seg", "sheet")
    }
    assert first - {"events.jsonl", "run.lock"} == {*names, "out/scores.json"}
    assert second == set()


@pytest.mark.long
def test_the_same_images_and_scores_come_from_any_number_of_workers(trained, tmp_path):
    directory, left = trained
    for workers in (1, 2):
        for scores in run_workers(
            test.main, workers, ["--dir", str(directory), "--out", str(tmp_path / str(workers))]
        ):
            assert scores.items() <= left.items()
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(files) == 6 * 4 + 1
    assert all(
        (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
        for name in files
    )


@pytest.mark.long
def test_a_sheet_has_the_truth_above_what_was_made(trained, data, tmp_path):
    run_workers(test.main, 1, ["--dir", str(trained[0]), "--out", str(tmp_path)])
    truth = np.asarray(
        Image.open(Path(data.partition("=")[2]) / "val" / "row032-column016.png")
    ).reshape(16, 4, 16, 3)
    sheet = np.asarray(Image.open(tmp_path / "row032-column016-sheet.png")).reshape(
        2, 20, 4, 20, 3
    )[:, 4:, :, 4:]
    assert np.array_equal(sheet[0], truth)
    assert (sheet[1, :, 0] == 255).all()
    for number, name in enumerate(("hematoxylin", "dab", "seg"), start=1):
        assert np.array_equal(
            sheet[1, :, number], np.asarray(Image.open(tmp_path / f"row032-column016-{name}.png"))
        )


def only_val(data, tmp_path):
    """Return a folder with a copy of the held-out strips, and its setting."""
    folder = tmp_path / "given"
    shutil.copytree(Path(data.partition("=")[2]) / "val", folder / "val")
    return folder / "val", f"data.path={folder}"


def run_test(directory, out, *changes):
    """Return the scores of the held-out strips and the files in `out`, by name."""
    (scores,) = run_workers(test.main, 1, ["--dir", str(directory), "--out", str(out), *changes])
    return scores, {path.name: path.read_bytes() for path in out.iterdir()}


def test_testing_needs_no_training_strips(trained, data, tmp_path):
    directory, left = trained
    _, setting = only_val(data, tmp_path)
    scores, files = run_test(directory, tmp_path / "out", setting)
    assert scores.items() <= left.items()
    written = json.loads(files["scores.json"])
    assert written["scores"] == scores
    assert written["strips"] == 6


@pytest.mark.long
def test_tiles_without_truth_are_translated_and_not_scored(trained, data, tmp_path, capfd):
    directory, _ = trained
    expected = run_test(directory, tmp_path / "whole")[1]
    folder, setting = only_val(data, tmp_path)
    for path in folder.iterdir():
        strip = Image.open(path)
        strip.crop((0, 0, strip.height, strip.height)).save(path)
    scores, files = run_test(directory, tmp_path / "alone", setting)
    assert scores == {}
    assert "not scored: they are IHC tiles without truth" in capfd.readouterr().out
    made = {name for name in expected if not name.endswith(("sheet.png", ".json"))}
    assert files.keys() == {name for name in expected if name != "scores.json"}
    assert all(files[name] == expected[name] for name in made)

    Image.new("RGB", (64, 16)).save(folder / "zzz.png")
    with pytest.raises(WorkerFailedError, match=r"zzz\.png: expected a square IHC tile"):
        run_test(directory, tmp_path / "mixed", setting)


def test_copies_of_the_input_are_not_taken_for_truth(trained, data, tmp_path, capfd):
    folder, setting = only_val(data, tmp_path)
    path = min(folder.iterdir())
    tile = np.asarray(Image.open(path))[:, :16]
    Image.fromarray(np.concatenate([tile] * 4, axis=1)).save(path)
    scores, files = run_test(trained[0], tmp_path / "out", setting)
    assert scores == {}
    assert "scores.json" not in files
    said = "not scored: all tiles of 1 strips are copies of their IHC tile"
    assert said in capfd.readouterr().out


@pytest.mark.long
def test_tiles_can_be_normalized_by_their_own_statistics(trained, tmp_path):
    scores, _ = run_test(trained[0], tmp_path / "tile", "model.evaluate_by=tile")
    running, _ = run_test(trained[0], tmp_path / "running")
    assert scores["l1"] != running["l1"]

    torch.manual_seed(0)
    norm, features = TileNorm(3), torch.randn(2, 3, 5, 4)
    norm.eval()
    alone = torch.cat([nn.BatchNorm2d(3)(tile[None]) for tile in features])
    torch.testing.assert_close(norm(features), alone)


@pytest.mark.long
def test_a_lost_directory_is_continued_from_the_remote_copy(data, tmp_path):
    environment = {"SAMESTEP_REMOTE": (tmp_path / "remote").as_uri()}
    arguments = [*SMALL, data, "--dir", str(tmp_path / "run")]
    stopped = {**environment, "SAMESTEP_STOP_AFTER": "1"}
    run_workers(train.main, 2, arguments, environment=stopped)
    shutil.rmtree(tmp_path / "run")
    again = ["--continue", "--dir", str(tmp_path / "run"), "epochs=1"]
    run_workers(train.main, 2, again, environment=environment)
    assert [event["step"] for event in events(tmp_path / "run", "finished")] == [2]
    # and the settings of the full size are those of any number of epochs
    _, settings = read_arguments(["--size", "full", "epochs=1"])
    with torch.device("meta"):
        optimizers = make_optimizers(settings.optimizer, Networks(settings), settings.batch_size)
    make_schedulers(settings, optimizers)


@pytest.mark.parametrize(("part", "workers"), [("train", 1), ("val", 2)])
def test_copies_of_the_input_are_neither_learned_nor_choose_a_snapshot(part, workers, tmp_path):
    setting = make_strips(tmp_path)
    paths = list((tmp_path / part).iterdir())
    for path in paths:
        tile = np.asarray(Image.open(path))[:, :16]
        Image.fromarray(np.concatenate([tile] * 4, axis=1)).save(path)
    message = rf"all tiles are copies of its IHC tile, in {len(paths)} of {len(paths)} strips"
    with pytest.raises(WorkerFailedError, match=message):
        run_workers(train.main, workers, [*SMALL, setting])


@pytest.mark.long
def test_a_run_starts_with_the_generators_of_another(trained, data, tmp_path, capfd):
    export(list_snapshots(trained[0])[-1], tmp_path / "a.safetensors", "generators")
    arguments = [*SMALL, data, "--pretrained", str(tmp_path / "a.safetensors")]
    changes = ["optimizer.reference_batch_size=14", "epochs=1", "lanes=2"]
    run_workers(train.main, 1, [*arguments, *changes, "--dir", str(tmp_path / "run")])
    output = capfd.readouterr().out
    assert f"loaded {tmp_path / 'a.safetensors'}\n" in output
    rates = "learning rate of generators 0.001, of discriminators 0.0001 at batch size 7"
    assert f"{rates}, scaled from 0.002, 0.0002 at batch size 14\n" in output
    recorded = events(tmp_path / "run", "scalars")[0]["values"]
    assert recorded["discriminators/learning_rate"] == 1e-4


def test_a_wrong_strip_stops_the_run_with_its_name(data, tmp_path):
    make_strips(tmp_path)
    Image.new("RGB", (50, 16)).save(tmp_path / "val" / "zzz.png")
    with pytest.raises(
        WorkerFailedError,
        match=r"val/zzz\.png: expected the 4 square tiles .*, got 50 x 16 pixels",
    ):
        run_workers(train.main, 2, [*SMALL, f"data.path={tmp_path}"])
