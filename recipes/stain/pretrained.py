"""Initialize the networks with the generators of another run, or with those of DeepLIIF.

DeepLIIF writes a file per network into a folder: `EPOCH_net_G1.pth` and so on for the modalities,
`EPOCH_net_GS0.pth` and so on for the segmentations of IHC and of each modality, which older
versions call `G51`, `G52`, … for four modalities. Discriminators have a D in place of the G; models
that are published for inference lack them. The layers are in the same order here and there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from recipes.pretrained import PretrainedError, check_fit, read_parameters
from recipes.stain.config import Settings
from recipes.stain.model import Networks

EPOCH = "latest"
FILE = re.compile(r"(.+)_net_[GD][0-9S]\d*\.pth")
# of a residual block's first convolution, which follows a layer of padding unless that is zeros
REFLECTED = re.compile(r"model\.\d+\.conv_block\.1\.weight")


def load_pretrained(networks: Networks, settings: Settings) -> str:
    """Load the file or folder `pretrained` into networks; return a one-line description.

    It is an export of `generators`, or DeepLIIF's folder, for the latest epoch, or one of its
    files. Raises `PretrainedError` if a file is missing or does not fit.
    """
    path = settings.pretrained
    file = FILE.fullmatch(path.name)
    if not path.is_dir() and not file:
        saved = read_parameters(path)
        check_fit(path, saved, networks.generators.state_dict())
        networks.generators.load_state_dict(saved)
        return f"loaded {path}"
    folder, epoch = (path.parent, file[1]) if file else (path, EPOCH)
    names = _names(folder, epoch, len(settings.modalities))
    has_discriminators = (folder / f"{epoch}_net_D1.pth").exists()
    groups = {"G": networks.generators, "D": networks.discriminators}
    for letter in "GD" if has_discriminators else "G":
        ours = [*groups[letter].translation, *groups[letter].segmentation]
        for name, network in zip(names, ours, strict=True):
            _load_in_order(network, folder / f"{epoch}_net_{letter}{name}.pth", settings)
    both = "generators and discriminators" if has_discriminators else "generators"
    random = "" if has_discriminators else "; discriminators: random"
    return f"loaded {len(names)} {both} of DeepLIIF in {folder}{random}"


def _names(folder: Path, epoch: str, modalities: int) -> list[str]:
    """Return the names of the generators without their G: 1, 2, …, S0, S1, …."""
    if not (folder / f"{epoch}_net_G1.pth").exists():
        others = sorted(path.name for path in folder.glob("*_net_G1.pth"))
        hint = f"; another epoch is chosen by its file, such as {others[0]}" if others else ""
        expected = f"{epoch}_net_G1.pth and so on; serialized models (G1.pt) are not read"
        raise PretrainedError(f"{folder} must have {expected}{hint}")
    forms = [(kind, first) for kind in ("S", modalities + 1) for first in (0, 1)]
    kind, first = next(
        (form for form in forms if (folder / "{}_net_G{}{}.pth".format(epoch, *form)).exists()),
        forms[0],
    )
    translation = [str(number) for number in range(1, modalities + 1)]
    return translation + [f"{kind}{number}" for number in range(first, first + modalities + 1)]


def _load_in_order(network: nn.Module, path: Path, settings: Settings) -> None:
    """Load the n-th parameter or buffer of a file as the n-th of a network."""
    saved, state = read_parameters(path), network.state_dict()
    _check_padding(path, saved, settings.model.padding)
    kinds = [[name.rpartition(".")[2] for name in names] for names in (state, saved)]
    if kinds[0] != kinds[1]:
        sizes = "blocks, unet_depth, discriminator_layers and norm"
        raise PretrainedError(
            f"{path} does not fit the model: expected {len(state)} tensors in the order that "
            f"{sizes} of model give, got {len(saved)}"
        )
    renamed = dict(zip(state, saved.values(), strict=True))
    check_fit(path, renamed, state)
    network.load_state_dict(renamed)


def _check_padding(path: Path, saved: Mapping[str, Tensor], padding: str) -> None:
    """Raise `PretrainedError` if a generator with residual blocks had other padding."""
    blocks = [name for name in saved if ".conv_block." in name]
    reflects = any(REFLECTED.fullmatch(name) and saved[name].ndim == 4 for name in blocks)
    if blocks and reflects != (padding == "reflect"):
        trained = "reflect" if reflects else "zeros"
        raise PretrainedError(f"{path} was trained with padding: set model.padding={trained}")
