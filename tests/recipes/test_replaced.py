"""Commands of the replaced programs' guides, and what each is told."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

import recipes.atari.config
import recipes.detect.config
import recipes.stain.config
import recipes.vit.config
from recipes.replaced import PROGRAMS, replacement
from recipes.settings import SettingsError, read, read_arguments
from recipes.stain.config import read_arguments as stain_arguments

ROOT = Path(recipes.vit.config.__file__).parents[2]
GUIDES = {  # arguments after the script, and what the error says
    "vit": {
        "-cfg=./configs/vit_base_patch16_224.yaml -dataset=imagenet2012": "-cfg is of PaddleViT",
        "-dataset imagenet2012 -batch_size 16 -data_path /data -eval": "-dataset is of PaddleViT",
        "-eval -pretrained=model.pdparams -ngpus=4": "-eval is of PaddleViT; here it is --eval",
        "DATA.IMAGE_SIZE=384": "here it is model.image_size",
        "DATA.IMAGE_SIZE 384": "here it is model.image_size",
        "TRAIN.SOMETHING=1": "here it is none of the settings",
    },
    "detect": {
        "--config-file configs/e2e_mask_rcnn_R_50_FPN_1x.yaml": "--config-file is of maskrcnn",
        "SOLVER.IMS_PER_BATCH 2 SOLVER.BASE_LR 0.0025": "here it is batch_size, over all workers",
        "MODEL.WEIGHT=R-50.pkl": "here it is pretrained",
        "MODEL.RPN.FPN_POST_NMS_TOP_N_TRAIN 2000": "there are no anchors and no proposals",
        "--local_rank=0": "--local-rank is for launchers, which also set LOCAL_RANK",
        "--local-rank=0": "--local-rank is for launchers, which also set LOCAL_RANK",
    },
    "stain": {
        "--dataroot ./data --name Test_Model": "DeepLIIF; here it is data.path=DIR",
        "--batch_size 2": "--batch-size is of DeepLIIF; here it is batch_size=",
        "--gpu-ids 0 --gpu-ids 1": "here it is --gpus 0,1 before the script",
        "--net-gs unet_512": "here it is model.unet_depth=9 for unet_512",
        "--continue-train": "here it is --continue",
    },
    "atari": {
        "-m serial -c spaceinvaders_dqn_config.py -s 0": "-m is of DI-engine",
        "-c spaceinvaders_dqn_config.py": "-c is of DI-engine; here it is FILE.yaml",
        "spaceinvaders_dqn_config.py": "here it is FILE.yaml, such as recipes/atari/space_invaders",
        "policy.learn.batch_size=32": "here it is batch_size, of an update",
        "policy.other.unknown=1": "policy.other.unknown is of DI-engine; here it is none",
    },
}


@pytest.mark.parametrize(
    ("recipe", "command"),
    [(recipe, command) for recipe, guide in GUIDES.items() for command in guide],
)
def test_a_command_of_a_guide_is_answered(recipe, command, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    kind = getattr(recipes, recipe).config.Settings
    read_both = stain_arguments if recipe == "stain" else partial(read_arguments, kind, "A recipe.")
    with pytest.raises((SystemExit, SettingsError)) as caught:
        read_both(command.split())
    said = str(caught.value) + capsys.readouterr().err
    assert GUIDES[recipe][command] in said
    if "local" not in command:
        assert re.search(r"\(see docs/recipes/\w+\.md#moving-from-[\w-]+\)", said)


def test_a_file_of_a_replaced_program_is_answered(tmp_path):
    file = tmp_path / "vit.yaml"
    file.write_text("DATA: {IMAGE_SIZE: 384}\nMODEL: {TYPE: vit}\n")
    with pytest.raises(SettingsError) as caught:
        read(recipes.vit.config.Settings, [str(file)])
    expected = "DATA.IMAGE_SIZE=384: DATA.IMAGE_SIZE is of PaddleViT; here it is model.image_size"
    assert f"{file}: {expected}" in str(caught.value)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_s_page_has_the_section_that_is_named(program):
    page, _, anchor = program.page.partition("#")
    headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_settings_and_flags_of_the_recipes_are_never_taken_for_others():
    names = ("data.path", "model.width", "batch_size", "seed", "--dir", "--eval", "--pretrained")
    assert not any(map(replacement, names))
