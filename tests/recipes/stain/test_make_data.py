from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from skimage.data import immunohistochemistry

from recipes.stain.config import DataSettings, Settings
from recipes.stain.data import open_strips
from recipes.stain.make_data import main, segmented

BLACK, RED, GREEN, BLUE = (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.mark.parametrize(
    ("size", "train", "val"),
    [
        pytest.param(128, 12, 4, marks=pytest.mark.long),
        (100, 15, 10),
        pytest.param(64, 48, 16, marks=pytest.mark.long),
    ],
)
def test_the_image_is_cut_without_overlap_and_its_lowest_quarter_is_held_out(
    size, train, val, tmp_path, capsys
):
    main([str(tmp_path), "--size", str(size)])

    assert (
        f"{train} strips in train/, {val} in val/; modalities='[hematoxylin, dab]'"
        in capsys.readouterr().out
    )
    counted = np.zeros((512, 512), int)
    for path in tmp_path.glob("*/*.png"):
        top, left = int(path.stem[3:6]), int(path.stem[13:])
        tile = np.asarray(Image.open(path))[:, :size]
        assert np.array_equal(tile, immunohistochemistry()[top : top + size, left : left + size])
        assert (path.parent.name == "val") == (top + size > 384)
        counted[top : top + size, left : left + size] += 1
    assert counted.max() == 1
    assert counted.sum() == (train + val) * size**2


def test_the_recipe_reads_what_was_made(tmp_path):
    main([str(tmp_path)])
    data = DataSettings(path=tmp_path, load_size=128, crop_size=128)
    strips = open_strips(Settings(modalities=("hematoxylin", "dab"), data=data))
    assert (len(strips.train), len(strips.val)) == (12, 4)
    seg = (strips.val[1][3].movedim(0, -1).reshape(-1, 3) + 1) * 127.5
    assert set(map(tuple, seg.int().tolist())) == {BLACK, RED, GREEN, BLUE}


def test_nuclei_are_red_in_positive_tissue_and_blue_elsewhere():
    rows, columns = np.mgrid[:60, :120]
    nuclei = np.hypot(rows - 30, columns - 30) < 8, np.hypot(rows - 30, columns - 90) < 8
    seg = segmented(
        hematoxylin=(nuclei[0] | nuclei[1]).astype(float), dab=(columns < 60).astype(float)
    )

    assert tuple(seg[30, 30]) == RED
    assert tuple(seg[30, 90]) == BLUE
    assert tuple(seg[30, 60]) == tuple(seg[0, 0]) == BLACK
    for middle in (30, 90):
        along = [tuple(pixel) for pixel in seg[30, middle : middle + 15]]
        assert along.count(GREEN) == 1
        assert all(pixel == BLACK for pixel in along[along.index(GREEN) + 1 :])


def test_wrong_arguments_are_told(tmp_path, capsys):
    (tmp_path / "old" / "train").mkdir(parents=True)
    (tmp_path / "old" / "train" / "a.png").touch()
    for arguments, message in (
        ([str(tmp_path / "old")], "old has strips already; expected a new folder"),
        ([str(tmp_path), "--size", "200"], "--size must be 1 to 128, got 200"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
