"""Initialize the generators with those of another run, or of DeepLIIF.

DeepLIIF writes a file per network into a folder: `EPOCH_net_G1.pth` and so on for the modalities,
`EPOCH_net_G51.pth` and so on for the segmentations of IHC and of each modality (GS1 in newer
versions). The layers of both are in the same order here and there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from recipes.pretrained import PretrainedError, check_fit, read_parameters
from recipes.stain.config import Settings
from recipes.stain.model import Generators

EPOCH = "latest"
FIRST_FILE = re.compile(r"(.+)_net_G1\.pth")
# of a residual block's first convolution, which follows a layer of padding unless that is zeros
REFLECTED = re.compile(r"model\.\d+\.conv_block\.1\.weight")


def load_pretrained(generators: Generators, settings: Settings) -> str:
    """Load the file or folder `pretrained` into generators; return a one-line description.

    It is an export of `generators`, or DeepLIIF's folder, for the latest epoch, or its file of
    `G1`. Raises `PretrainedError` if a file is missing or does not fit.
    """
    path = settings.pretrained
    first = FIRST_FILE.fullmatch(path.name)
    if not path.is_dir() and not first:
        saved = read_parameters(path)
        check_fit(path, saved, generators.state_dict())
        generators.load_state_dict(saved)
        return f"loaded {path}"
    folder, epoch = (path.parent, first[1]) if first else (path, EPOCH)
    modalities = len(generators.translation)
    for number, network in enumerate(generators.translation, start=1):
        file = folder / f"{epoch}_net_G{number}.pth"
        saved = read_parameters(file)
        _check_padding(file, saved, settings.model.padding)
        _load_in_order(network, saved, file)
    for number, network in enumerate(generators.segmentation, start=1):
        names = [f"{epoch}_net_G{kind}{number}.pth" for kind in (modalities + 1, "S")]
        name = next((name for name in names if (folder / name).exists()), names[0])
        file = folder / name
        _load_in_order(network, read_parameters(file), file)
    return f"loaded {modalities + len(generators.segmentation)} generators of DeepLIIF in {folder}"


def _load_in_order(network: nn.Module, saved: Mapping[str, Tensor], path: Path) -> None:
    """Load the n-th parameter or buffer of a file as the n-th of a network."""
    state = network.state_dict()
    kinds = [[name.rpartition(".")[2] for name in names] for names in (state, saved)]
    if kinds[0] != kinds[1]:
        raise PretrainedError(
            f"{path} does not fit the model: expected {len(state)} tensors in the order of "
            f"model.blocks, model.unet_depth and model.norm, got {len(saved)}"
        )
    renamed = dict(zip(state, saved.values(), strict=True))
    check_fit(path, renamed, state)
    network.load_state_dict(renamed)


def _check_padding(path: Path, saved: Mapping[str, Tensor], padding: str) -> None:
    reflects = any(REFLECTED.fullmatch(name) and tensor.ndim == 4 for name, tensor in saved.items())
    if saved and reflects != (padding == "reflect"):
        trained = "reflect" if reflects else "zeros"
        raise PretrainedError(f"{path} was trained with padding: set model.padding={trained}")
