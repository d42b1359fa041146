"""The check at the start: faults, what is left out, what is said, and what is kept for the next."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

import recipes.detect.data  # imported here, as it sets an environment variable
import recipes.file_check
import samestep as ss
from recipes import check
from recipes.file_check import CACHE_FILE, LEFT_OUT_FILE, FileCheck
from recipes.image_files import ImageError, ImageFileSettings, inspect
from recipes.settings import SettingsError
from tests.workers import run_workers


def paint(path, seed=0, size=(40, 40)):
    pixels = np.random.default_rng(seed).integers(255, size=(*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def files(tmp_path):
    return {
        part: [paint(tmp_path / part / f"{number}.png", 10 * at + number) for number in range(3)]
        for at, part in enumerate(("train", "val"))
    }


def tear(path):
    path.write_bytes(path.read_bytes()[:-900])


def test_all_files_are_left_if_none_is_broken(files):
    lines = []
    usable = FileCheck(ImageFileSettings(), say=lines.append).usable(files)
    assert usable == {"train": [0, 1, 2], "val": [0, 1, 2]}
    assert lines == []


def test_faults_are_errors_that_say_what_to_do(files):
    files["train"][1].write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"1\.png cannot be read .*; data\.broken=skip trains"):
        FileCheck(ImageFileSettings()).usable(files)
    files["val"][2].unlink()
    with pytest.raises(ImageError) as caught:
        FileCheck(ImageFileSettings()).usable(files)
    lines = str(caught.value).split("\n")
    assert lines[0] == "2 of 6 image files cannot be used:"
    assert lines[2] == f"  {files['val'][2]} does not exist"
    assert lines[3].startswith("recipes/check.py lists all of them")
    FileCheck(ImageFileSettings(check="none")).usable(files)


def test_only_the_full_check_reads_pixels(files):
    tear(files["val"][0])
    FileCheck(ImageFileSettings()).usable(files)
    with pytest.raises(ImageError, match=r"val/0\.png cannot be read as an image"):
        FileCheck(ImageFileSettings(check="full")).usable(files)


def skip(files, directory, **changes):
    settings = ImageFileSettings(**{"broken": "skip", "broken_limit": 0.4, **changes})
    lines = []
    return FileCheck(settings, directory, say=lines.append).usable(files), lines


def test_broken_files_are_left_out_up_to_a_limit_and_recorded(files, tmp_path):
    files["train"][1].write_bytes(b"no image")
    usable, (line,) = skip(files, tmp_path)
    assert usable == {"train": [0, 2], "val": [0, 1, 2]}
    assert line.startswith(f"train: left out 1 of 3 files, first: {files['train'][1]} cannot")
    listed = (tmp_path / LEFT_OUT_FILE).read_text()
    reason, path = listed.splitlines()
    assert (reason[:2], path) == ("# ", str(files["train"][1]))

    with pytest.raises(
        ImageError, match=r"train: 1 of 3 files are broken, more than data\.broken_l"
    ):
        skip(files, tmp_path, broken_limit=0.3)

    listed = f"\ufeff# known\n\n{files['train'][1]}\r\nother.png\n"
    (tmp_path / "list").write_text(listed, encoding="utf-8")
    usable, lines = skip(files, tmp_path, leave_out=tmp_path / "list")
    assert usable["train"] == [0, 2]
    assert lines == [
        "train: data.leave_out lists 1 of 3 files",
        "data.leave_out: 1 of 2 names are not found in ., first: other.png",
    ]
    assert not (tmp_path / LEFT_OUT_FILE).exists()  # nothing more


def test_what_the_system_cannot_read_is_never_skipped(files, tmp_path):
    files["val"][1].unlink()
    files["val"][1].mkdir()
    with pytest.raises(ImageError, match="Is a directory"):
        skip(files, tmp_path)


def test_the_next_start_reads_only_what_changed(files, tmp_path, monkeypatch):
    read = []

    def counted(path, *arguments, **options):
        read.append(path)
        return inspect(path, *arguments, **options)

    monkeypatch.setattr(recipes.file_check, "inspect", counted)

    def reads(**changes):
        read.clear()
        FileCheck(ImageFileSettings(**changes), tmp_path).usable(files)
        return len(read)

    assert (reads(), reads(), reads(check="full"), reads(), reads(check="full")) == (6, 0, 6, 0, 0)
    paint(files["train"][0], size=(7, 7))
    os.utime(files["train"][2], ns=(0, 0))
    assert (reads(), reads(most_pixels=10**6)) == (2, 6)
    before = files["val"][1].stat()
    other = paint(tmp_path / "other.png", seed=1)  # of the same size
    other.write_bytes(other.read_bytes().ljust(before.st_size, b"\0")[: before.st_size])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(files["val"][1])
    after = files["val"][1].stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    assert reads(most_pixels=10**6) == 1
    for content in ("", "[]", json.dumps({"key": FileCheck(ImageFileSettings())._key()})):
        (tmp_path / CACHE_FILE).write_text(content)
        assert (reads(), reads()) == (6, 0)


def test_an_interrupted_check_keeps_what_it_has_read(files, tmp_path, monkeypatch):
    read = []

    def interrupted(path, **options):
        read.append(path)
        if len(read) == 6:
            raise KeyboardInterrupt
        return inspect(path, **options)

    monkeypatch.setattr(recipes.file_check, "CHUNK", 2)
    monkeypatch.setattr(recipes.file_check, "inspect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        skip(files, tmp_path / "run")
    assert len(read) == 6
    skip(files, tmp_path / "run")
    assert read[6:] == files["val"][1:]  # the chunk that was not complete


def test_copies_are_reported_within_a_part_and_between_parts(files):
    shutil.copy(files["train"][0], files["train"][2])
    shutil.copy(files["train"][1], files["val"][1])
    lines = []
    FileCheck(ImageFileSettings(check="full"), say=lines.append).usable(files)
    within = f"{files['train'][0]} and {files['train'][2]}"
    between = f"{files['train'][1]} and {files['val'][1]}"
    assert lines == [
        f"train: files with the content of another: 1, first: {within}",
        f"train and val: files with the content of another: 1, first: {between}",
    ]


def test_conversions_are_said(files):
    wide = np.linspace(0, 4095, 1600).astype(np.uint16).reshape(40, 40)
    Image.fromarray(wide).save(files["train"][0])
    Image.new("RGBA", (9, 50)).save(files["train"][1])
    lines = []
    check = FileCheck(ImageFileSettings(), say=lines.append)
    check.usable(files, least_side=("size", 40))
    first, second = files["train"][:2]
    transparency = "laid on white, as they have transparency (data.background)"
    bits = "pixels of at most 12 bits and would be dark; set data.bits=12 if all have"
    assert lines == [
        f"train: 1 of 3 images are {transparency}, first: {second}",
        f"train: 1 of 3 images are smaller than size=40 and enlarged, first: {second}",
        f"train: 1 of 3 images are 16-bit and divided by 65535 (data.bits=16), first: {first}",
        f"train: the first 1 of the 16-bit images have {bits}",
    ]


def test_workers_share_the_files_and_agree(files, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes.file_check, "FULL_CHUNK", 2)
    files["train"][1].write_bytes(b"no image")
    settings = ImageFileSettings(broken="skip", broken_limit=0.5, check="full")

    def usable(directory):
        lines = []
        with ss.init(lanes=2) as run:
            check = FileCheck(settings, directory, run)
            check.say = lines.append
            return [check.usable(files) for _ in range(2)], check.faults, lines

    (alone,) = run_workers(usable, 1, tmp_path / "1")
    first, second = run_workers(usable, 2, tmp_path / "2")
    assert alone == first
    assert first[:2] == second[:2]
    assert first[0] == [{"train": [0, 2], "val": [0, 1, 2]}] * 2
    kept = [(tmp_path / workers / CACHE_FILE).read_bytes() for workers in "12"]
    assert kept[0] == kept[1]


def test_what_cannot_be_kept_is_said(files, tmp_path):
    (tmp_path / "taken").write_text("a file")
    lines = []
    FileCheck(ImageFileSettings(), tmp_path / "taken", say=lines.append).usable(files)
    assert lines[0].startswith(f"{CACHE_FILE} was not written: ")


# The command


def test_the_command_prints_all_faults_and_writes_them(tmp_path, capsys):
    for part in ("train", "val"):
        for number in range(3):
            paint(tmp_path / part / "cat" / f"{number}.png", number)
    tear(tmp_path / "train" / "cat" / "0.png")
    (tmp_path / "val" / "cat" / "1.png").write_bytes(b"no image")
    arguments = ["vit", f"data.path={tmp_path}", "model.classes=1", "model.image_size=32"]
    with pytest.raises(SystemExit):
        check.main([*arguments, "--write", str(tmp_path / "list"), "--dir", str(tmp_path / "run")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train and val: files with the content of another: 1, first: ")
    assert lines[1:3] == [f"{part}: 2 images: cat 2" for part in ("train", "val")]
    assert [line.partition(" cannot")[0] for line in lines[3:]] == [
        f"train: {tmp_path}/train/cat/0.png",
        f"val: {tmp_path}/val/cat/1.png",
        "files that",
    ]
    listed = (tmp_path / "list").read_text().splitlines()
    assert listed[1::2] == ["train/cat/0.png", "val/cat/1.png"]
    with pytest.raises(SystemExit):
        check.main([*arguments, "--write", str(tmp_path / "nowhere" / "list")])
    assert "--write: [Errno 2] No such file" in capsys.readouterr().err
    check.main([*arguments, f"data.leave_out={tmp_path / 'list'}"])
    assert capsys.readouterr().out.splitlines()[-1] == "files that cannot be used: 0"


def test_the_command_reads_all_files_of_a_data_set_that_does_not_fit_its_settings(tmp_path, capsys):
    for part in ("train", "val"):
        paint(tmp_path / part / "cat" / "0.png")
    with pytest.raises(SettingsError, match=r"model\.classes must be 1 for folder, got 1000"):
        check.main(["vit", f"data.path={tmp_path}"])
    assert capsys.readouterr().out.splitlines()[-1] == "files that cannot be used: 0"


def test_the_command_reads_the_data_of_each_recipe(tmp_path):
    for recipe in check.RECIPES:
        with pytest.raises(SettingsError, match=r"data\.path"):
            check.main([recipe])
