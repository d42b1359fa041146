from __future__ import annotations

import json
from dataclasses import replace

import pytest

from recipes.image_files import ImageError
from recipes.vit.classes import find_classes, read_classes
from recipes.vit.data import open_images
from tests.recipes.vit.test_data import FOLDER_MODEL, DataSettings, paint

WNIDS = ("n01440764", "n01443537", "n02012849")
NAMES = ("tench", "goldfish", "great white shark")
FILES = {
    "LOC_synset_mapping.txt": (
        "n01440764 tench, Tinca tinca\nn01443537 goldfish\nn02012849 great white shark, shark\n"
    ),
    "map_clsloc.txt": "n01440764 1 tench\nn01443537 2 goldfish\nn02012849 3 great white shark\n",
    "tabs.txt": "n01440764\ttench\r\nn01443537\tgoldfish\r\nn02012849\tgreat white shark\r\n",
    "wnids.txt": "\ufeffn01440764\nn01443537\nn02012849",
    "names.txt": "tench\ngoldfish\n\ngreat white shark\n",
    "class_index.json": json.dumps(
        {str(n): pair for n, pair in enumerate(zip(WNIDS, NAMES, strict=True))}
    ),
    "id2label.json": json.dumps({"2": NAMES[2], "0": NAMES[0], "1": NAMES[1]}),
    "class_to_idx.json": json.dumps({WNIDS[2]: 2, WNIDS[0]: 0, WNIDS[1]: 1}),
    "names.json": json.dumps(NAMES),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("folders", [WNIDS, NAMES])
def test_files_of_classes_give_folders_their_classes(name, folders, tmp_path):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    has_names, has_wnids = "tench" in FILES[name], "n0" in FILES[name]
    classes = find_classes([str(tmp_path / name)], folders)
    expected = [0, 1, 2] if folders == WNIDS or has_names else [None] * 3
    assert [classes.label(folder) for folder in folders] == expected
    if expected[0] == 0:
        assert classes.used(reversed(folders)) == folders
        both = (f"{one} ({two})" for one, two in zip(WNIDS, NAMES, strict=True))
        shown = dict(zip(WNIDS, both, strict=True)) if has_names and folders == WNIDS else {}
        if name == "LOC_synset_mapping.txt" and shown:
            assert classes.shown(folders)[0] == "n01440764 (tench, Tinca tinca)"
        elif shown:
            assert classes.shown(folders) == list(shown.values())
        elif not has_wnids:
            assert classes.shown(folders) == list(folders)


def test_a_part_of_the_classes_has_the_same_indices():
    classes = find_classes(NAMES, NAMES[1:])
    assert [classes.label(name) for name in NAMES[1:]] == [1, 2]
    assert find_classes(None, NAMES[1:]).used(()) == NAMES[1:]


def test_a_name_of_two_classes_is_refused_if_it_is_used(tmp_path):
    lines = "n02012849 crane, bird\nn03126707 crane\n"
    (tmp_path / "a.txt").write_text(lines)
    classes = find_classes([str(tmp_path / "a.txt")], ("bird", "n03126707"))
    assert classes.used(("bird", "n03126707")) == ("bird", "n03126707")
    with pytest.raises(ImageError, match="crane is the name of several classes, such as n02012849"):
        find_classes([str(tmp_path / "a.txt")], ("crane",)).used(("crane",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n \n", "expected a name per line"),
        ("a.json", "{", "or JSON of names by index: Expecting"),
        ("a.json", '{"0": "a", "2": "b"}', "indices must be 0 to 1, each once"),
        ("a.json", '{"a": 0, "b": 0}', "indices must be 0 to 1, each once"),
        ("a.json", '["a", 3]', "expected a name per line"),
        ("a.json", "3", "expected a name per line"),
        ("a.json", None, r"a\.json cannot be read as UTF-8 text: .* No such file"),
    ],
)
def test_a_file_without_classes_is_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ImageError, match=message):
        read_classes(tmp_path / name)


def test_a_folder_and_lists_are_read_with_a_file_of_classes(tmp_path):
    (tmp_path / "map.txt").write_text(FILES["LOC_synset_mapping.txt"])
    for part in ("train", "val"):
        for name in ("great white shark", "n01440764"):
            paint(tmp_path / part / name / "a.png", (1, 2, 3))
    data = DataSettings(path=tmp_path, class_names=(str(tmp_path / "map.txt"),), check="none")
    model = replace(FOLDER_MODEL, classes=3)
    split = open_images(data, model)
    assert [label for _, label in split.train.items] == [0, 2]
    assert split.class_names == ("n01440764", "n01443537", "great white shark")
    names = ("1", "n01440764", "tench, Tinca tinca", "2", "great white shark")
    lines = [f"train/n01440764/a,b.png\t{name}" for name in names]
    for part in ("train", "val"):
        (tmp_path / f"{part}_list.txt").write_text("\n".join(lines))
    split = open_images(data, model)
    assert [label for _, label in split.train.items] == [1, 0, 0, 2, 2]
    assert {path.name for path, _ in split.train.items} == {"a,b.png"}
    (tmp_path / "val_list.txt").write_text("a.png whale")
    with pytest.raises(ImageError, match=r"line 1: .* or a name of data\.class_names, got"):
        open_images(data, model)
