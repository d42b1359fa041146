"""Write what a run's generators make of its held-out strips, beside the truth.

samestep run -n 2 recipes/stain/test.py --dir runs/tissue

For each strip NAME.png there are NAME-MODALITY.png for each modality, NAME-seg.png, and
NAME-sheet.png: the strip above what was made of its IHC tile. The scores over all strips are
printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from torch.utils.data import Subset

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import samestep as ss
from recipes.settings import SETTINGS_FILE, SettingsError, parser, read, run_script
from recipes.stain.config import Settings
from recipes.stain.data import open_strips
from recipes.stain.model import Generators
from recipes.stain.validation import evaluate, lane_share, made_from, pixels, sheet, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from recipes.stain.data import Strips

GATHERED = 64  # strips that are in the main worker's memory at a time


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Test as `arguments` (default: the process's) say; return the scores on the held-out strips."""
    flags_parser = parser(Settings, __doc__)
    flags_parser.add_argument(
        "--dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="of the run, whose newest snapshot is tested",
    )
    flags_parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for the images; default: test-STEP in the run's directory",
    )
    flags = flags_parser.parse_intermixed_args(arguments)
    settings = read(Settings, [str(flags.dir / SETTINGS_FILE), *flags.settings])
    with ss.init(
        dir=flags.dir, lanes=settings.lanes, seed=settings.seed, precision=settings.precision
    ) as run:
        if run.step == 0:
            raise SettingsError(
                f"{flags.dir} has no snapshot to test; expected the --dir of a run that was trained"
            )
        strips = open_strips(settings).val
        generators = run.replicate(Generators(settings))
        run.track(generators=generators)
        out = flags.out or flags.dir / f"test-{run.step:08}"
        write_images(run, settings, generators, strips, out)
        scores = evaluate(run, settings, generators, strips)
        run.print(f"step {run.step}: {shown(scores)}\n{len(strips)} strips in {out}")
        return scores


def write_images(
    run: ss.Run, settings: Settings, generators: Generators, strips: Strips, out: Path
) -> None:
    """Write what is made of each strip, gathered on the main worker."""
    for start in range(0, len(strips), GATHERED):
        numbers = range(start, min(start + GATHERED, len(strips)))
        made = run.evaluate(
            made_from, generators, Subset(strips, numbers), lane_share(run, settings), gather=True
        )
        if made is None:  # on all workers but the main one
            continue
        out.mkdir(parents=True, exist_ok=True)
        for number, tiles in zip(numbers, made.numpy(), strict=True):
            write_strip(
                out,
                strips.paths[number].stem,
                settings.modalities,
                pixels(strips[number]).numpy(),
                tiles,
            )


def write_strip(
    out: Path,
    stem: str,
    modalities: Sequence[str],
    truth: NDArray[np.uint8],
    made: NDArray[np.uint8],
) -> None:
    """Write the tiles made for one strip [modalities + 1, height, width, 3], and the sheet."""
    images = {**dict(zip((*modalities, "seg"), made, strict=True)), "sheet": sheet(truth, made)}
    for name, image in images.items():
        Image.fromarray(image).save(out / f"{stem}-{name}.png")


if __name__ == "__main__":
    run_script(main)
