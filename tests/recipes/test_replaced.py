"""The commands in the guides of the replaced programs: what each is told, and what runs instead."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import recipes.atari.config
import recipes.detect.config
import recipes.stain.config
import recipes.vit.config
from recipes.replaced import PROGRAMS, replacement
from recipes.settings import SettingsError, _settings_of, read, read_arguments
from recipes.stain.config import read_arguments as stain_arguments
from recipes.vit.model import VisionTransformer
from samestep.cli import main as samestep
from tests.recipes.atari.test_train import SMALL as SMALL_ATARI
from tests.recipes.small_data import SETTINGS, make
from tests.recipes.stain.strips import SMALL as SMALL_STAIN
from tests.recipes.stain.test_pretrained import write_deepliif
from tests.recipes.vit.test_pretrained import paddle_state
from tests.recipes.vit.test_pretrained import save as save_paddle

ROOT = Path(recipes.vit.config.__file__).parents[2]


class Guide(NamedTuple):
    """A command of a guide, what the error of its arguments here says, and the command instead.

    In the latter, DATA, RUN and FILE are a data set, a run's directory and weights.
    """

    command: str
    says: str
    instead: str = ""


VIT = "samestep run -n 2 recipes/vit/train.py"
STAIN = "samestep run -n 2 recipes/stain/train.py"
STAIN_TEST = "samestep run -n 2 recipes/stain/test.py --dir RUN"
DETECT = "samestep run -n 2 recipes/detect/train.py"
ATARI = "samestep run -n 2 recipes/atari/train.py"
COCO = (
    f"{DETECT} recipes/detect/coco.yaml data.train_annotations=DATA/train.json "
    "data.train_images=DATA/train data.val_annotations=DATA/val.json data.val_images=DATA/val"
)
CONFIG = "./configs/vit_base_patch16_224.yaml"
WEIGHTS = "./vit_base_patch16_224.pdparams"
GUIDES = {
    "vit": [
        Guide(
            f"CUDA_VISIBLE_DEVICES=0,1 python main_multi_gpu.py -cfg='{CONFIG}' "
            "-dataset='imagenet2012' -batch_size=128 -data_path='/dataset/imagenet' -amp",
            "-cfg is of PaddleViT; here it is FILE.yaml, without a flag",
            f"{VIT} recipes/vit/imagenet-base.yaml data.path=DATA batch_size=256 precision=float16 "
            "--dir RUN",
        ),
        Guide(
            f"CUDA_VISIBLE_DEVICES=0 python main_multi_gpu.py -dataset='imagenet2012' -eval "
            f"-batch_size=256 -data_path='/dataset/imagenet' -pretrained='{WEIGHTS}' -amp",
            "-dataset is of PaddleViT; here it is data.source=folder",
            f"{VIT} recipes/vit/imagenet-base.yaml data.path=DATA evaluate_batch_size=256 "
            "precision=float16 --eval --pretrained FILE",
        ),
        Guide(
            f"python main_multi_gpu.py -batch_size=128 -cfg='{CONFIG}' -pretrained='{WEIGHTS}'",
            "-batch_size is of PaddleViT; here it is batch_size=…, of a step over all workers",
            f"{VIT} recipes/vit/imagenet-base-384.yaml data.path=DATA batch_size=256 "
            "--pretrained FILE",
        ),
        Guide(
            "python main_single_gpu.py -resume='./output/Epoch-45' -last_epoch=45",
            "-resume is of PaddleViT; here it is --dir DIR; the same command continues",
            f"{VIT} RUN/settings.yaml epochs=2 --dir RUN",
        ),
        Guide("python main_multi_gpu.py -ngpus=4 -image_size=384", "-ngpus is of PaddleViT"),
        Guide("python main_multi_gpu.py DATA.IMAGE_SIZE 384", "here it is model.image_size"),
        Guide("python main_multi_gpu.py TRAIN.SOMETHING=1", "here it is none of the settings"),
    ],
    "detect": [
        Guide(
            'python tools/train_net.py --config-file "configs/e2e_mask_rcnn_R_50_FPN_1x.yaml" '
            'SOLVER.IMS_PER_BATCH 2 SOLVER.BASE_LR 0.0025 SOLVER.STEPS "(480000, 640000)"',
            "--config-file is of maskrcnn-benchmark; here it is FILE.yaml, without a flag",
            f"{COCO} batch_size=2 --dir RUN",
        ),
        Guide(
            "python -m torch.distributed.launch --nproc_per_node=2 tools/train_net.py "
            "MODEL.RPN.FPN_POST_NMS_TOP_N_TRAIN 2000 DTYPE float16",
            "here it is nothing: there are no anchors and no proposals",
            f"{COCO} precision=bfloat16",
        ),
        Guide(
            "python -m torch.distributed.launch --nproc_per_node=2 tools/test_net.py "
            "TEST.IMS_PER_BATCH 16 --config-file configs/e2e_mask_rcnn_R_50_FPN_1x.yaml",
            "--config-file is of maskrcnn-benchmark",
            f"{DETECT} --eval --dir RUN",
        ),
        Guide("python tools/test_net.py --ckpt model_final.pth", "here it is --eval --dir DIR of"),
        Guide("python tools/train_net.py --skip-test", "here it is evaluate_every=…"),
        Guide("python tools/train_net.py MODEL.WEIGHT=R-50.pkl", "here it is pretrained"),
        Guide("python webcam.py --min-image-size 800", "there is no demo with a camera"),
        Guide("python tools/train_net.py --local_rank=0", "--local-rank is for launchers"),
        Guide("python tools/train_net.py --local-rank=0", "--local-rank is for launchers"),
    ],
    "stain": [
        Guide(
            "deepliif train --dataroot /path/to/input/images --name Model_Name",
            "--dataroot is of DeepLIIF; here it is data.path=DIR",
            f"{STAIN} data.path=DATA --dir RUN",
        ),
        Guide(
            "deepliif train --batch-size 6 --gpu-ids 0 --gpu-ids 1",
            "--batch-size is of DeepLIIF; here it is batch_size=…, of a step over all workers",
            f"{STAIN} data.path=DATA batch_size=6",
        ),
        Guide(
            'deepliif trainlaunch --gpu-ids 0 --gpu-ids 1 --use-torchrun "-t 3 --nproc_per_node 2"',
            "--gpu-ids is of DeepLIIF; here it is --gpus 0,1 before the script",
            "samestep run -n 2 --max-restarts 3 recipes/stain/train.py data.path=DATA",
        ),
        Guide(
            "deepliif train --continue-train --epoch-count 51",
            "--continue-train is of DeepLIIF; here it is --continue",
            f"{STAIN} --continue --dir RUN epochs=2",
        ),
        Guide(
            "deepliif test --input-dir /in --output-dir /out --model-dir /model --tile-size 512",
            "--input-dir is of DeepLIIF; here it is data.path=DIR of test.py",
            f"{STAIN_TEST} data.path=DATA --out RUN/out",
        ),
        Guide(
            "python test.py --results_dir /out --checkpoints_dir /model --name Model_Name",
            "--results-dir is of DeepLIIF; here it is --out DIR, of test.py",
            STAIN_TEST,
        ),
        Guide(
            "deepliif train --remote True --remote-transfer-cmd mysave.save_to_s3 --gpu-ids 0",
            "--remote is of DeepLIIF; here it is --remote URL before the script",
            "samestep run -n 2 --remote file://RUN-copy --transfer builtins.print "
            "recipes/stain/train.py data.path=DATA --dir RUN-other",
        ),
        Guide(
            "deepliif train --net-gs unet_512 --seg-gen true",
            "--net-gs is of DeepLIIF; here it is model.unet_depth=9 for unet_512",
            f"{STAIN} data.path=DATA --pretrained FILE",
        ),
        Guide("deepliif visualize --pickle_dir /pickles", "here it is samestep watch DIR"),
        Guide(
            "deepliif prepare-training-data --validation-ratio 0.2 --input-dir /in",
            "the strips of prepare-training-data are read",
        ),
        Guide(
            "deepliif test --seg-only", "--seg-only is of DeepLIIF; here it is none of the flags"
        ),
        Guide("deepliif test-wsi --filename a.svs", "test.py takes tiles, and no whole slides"),
        Guide(
            "deepliif serialize --model-dir /model --device gpu", "here it is --dir DIR of a run"
        ),
        Guide("deepliif train --BtoA", "--btoa is of DeepLIIF; here it is none of the flags"),
    ],
    "atari": [
        Guide(
            "ding -m serial -c spaceinvaders_dqn_config.py -s 0",
            "-m is of DI-engine; here it is samestep run -n N before the script",
            f"{ATARI} recipes/atari/space_invaders.yaml seed=0 --dir RUN",
        ),
        Guide(
            "ding -c spaceinvaders_dqn_config.py -s 0 --env-step 1e7",
            "-c is of DI-engine; here it is FILE.yaml, without a flag",
            f"{ATARI} recipes/atari/space_invaders.yaml updates=4",
        ),
        Guide(
            "python -m torch.distributed.launch --nproc_per_node=2 --master_port=29501 "
            "./dizoo/atari/config/serial/pong/pong_dqn_ddp_config.py",
            "here it is FILE.yaml, such as recipes/atari/space_invaders.yaml",
        ),
        Guide(
            "python -u spaceinvaders_dqn_config.py", "spaceinvaders_dqn_config.py is of DI-engine"
        ),
        Guide(
            "ding -p dqn -e PongNoFrameskip-v4",
            "-p is of DI-engine; here it is nothing: the recipe has one algorithm, DQN",
        ),
        Guide(
            "ding --load-path ckpt/ckpt_best.pth.tar --replay-path video",
            "--load-path is of DI-engine; here it is --pretrained FILE, also one of DI-engine",
            f"{ATARI} --eval --dir RUN",
        ),
        Guide("ding -M learner --module-name learner0", "-M is of DI-engine"),
        Guide("ding policy.learn.batch_size=32", "here it is batch_size, of an update"),
        Guide(
            "ding policy.other.unknown=1", "policy.other.unknown is of DI-engine; here it is none"
        ),
    ],
}


def arguments_of(command):
    """Return what follows the script in a command; a settings file in Python is an argument."""
    words = shlex.split(command)
    if words[0] == "deepliif":
        return words[2:]
    if words[0] == "ding":
        return words[1:]
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    return words[script + (not words[script].endswith("_config.py")) :]


@pytest.mark.parametrize(
    ("recipe", "guide"), [(recipe, guide) for recipe, guides in GUIDES.items() for guide in guides]
)
def test_a_command_of_a_guide_is_answered(recipe, guide, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    kind = getattr(recipes, recipe).config.Settings
    read_both = stain_arguments if recipe == "stain" else partial(read_arguments, kind, "A recipe.")
    with pytest.raises((SystemExit, SettingsError)) as caught:
        read_both(arguments_of(guide.command))
    said = str(caught.value) + capsys.readouterr().err
    assert guide.says in said
    if "local" not in guide.command:
        assert re.search(r"\(see docs/recipes/\w+\.md#moving-from-[\w-]+\)", said)


SMALLER = {  # what makes the settings of the guides small
    "vit": [
        *("model.width=16", "model.depth=1", "model.heads=2", "model.image_size=16"),
        *("model.patch_size=8", "model.classes=2", "epochs=1", "lanes=2", "data.loader_workers=0"),
    ],
    "detect": [
        *(word for word in SETTINGS["detect"] if not word.startswith("batch_size")),
        *("data.short_sides=[16]", "data.loader_workers=0"),
    ],
    "stain": [*(word for word in SMALL_STAIN if "batch" not in word), "epochs=1", "lanes=2"],
    "atari": SMALL_ATARI,
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", GUIDES)
def test_the_commands_instead_run(recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    if recipe != "atari":
        make(recipe, tmp_path / "data")
    smaller, file = SMALLER[recipe], ""
    if recipe == "vit":
        size = read(recipes.vit.config.Settings, smaller).model
        state = paddle_state(VisionTransformer(size))
        file = save_paddle(tmp_path / "a.pdparams", state)
    if recipe == "stain":
        deep = ["model.unet_depth=5", "data.load_size=32", "data.crop_size=32"]
        smaller = [*smaller, *deep]
        small = read(recipes.stain.config.Settings, [*smaller, "modalities=[a, b]"])
        file = tmp_path
        write_deepliif(file, small)
    places = {"DATA": tmp_path / "data", "RUN": tmp_path / "run", "FILE": file}
    for guide in GUIDES[recipe]:
        if not guide.instead:
            continue
        command = re.sub("DATA|RUN|FILE", lambda match: str(places[match[0]]), guide.instead)
        _, *words = command.split()
        own = {word.partition("=")[0] for word in words}
        if not {"--continue", "--eval"} & own or "--pretrained" in own:
            words += [word for word in smaller if word.partition("=")[0] not in own]
        assert samestep(words) == 0, capfd.readouterr().err


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


@pytest.mark.parametrize("recipe", GUIDES)
def test_settings_and_flags_of_the_recipes_are_never_taken_for_others(recipe):
    kind = getattr(recipes, recipe).config.Settings
    names = [key for key, _, _ in _settings_of(kind)]
    flags = ("--dir", "--eval", "--pretrained", "--out", "--continue", "--size", "--help", "-h")
    own = [*names, *flags, f"{recipe}.yaml"]
    assert [name for name in own if replacement(name, recipe)] == []
