"""Write the tiles that a run's generators make from held-out strips, and the scores.

samestep run -n 2 recipes/stain/test.py --dir runs/tissue
samestep run -n 2 recipes/stain/test.py --dir runs/tissue data.path=OTHER

Only `val/` of `data.path` is read: strips, or square IHC tiles alone, which are not scored. Each
NAME.png gives NAME-MODALITY.png for each modality, NAME-seg.png, and NAME-sheet.png: the strip
above the tiles made from its IHC tile. The scores are printed and written to scores.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Subset

import samestep as ss
from recipes.file_check import FileCheck
from recipes.scores import write_scores
from recipes.settings import SettingsError, parser, read, run_script, run_settings
from recipes.stain.config import Settings
from recipes.stain.data import Strips, open_held_out
from recipes.stain.model import Generators
from recipes.stain.validation import evaluate, lane_share, made_from, pixels, sheet, shown

GATHERED = 64  # strips in the memory of rank 0 at a time


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Test; return the scores on the held-out strips, none without truth."""
    flags_parser = parser(Settings, __doc__)
    out = "directory for the images; default: test-STEP in the run's directory"
    flags_parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    flags = flags_parser.parse_intermixed_args(arguments)
    if flags.dir is None:
        flags_parser.error("--dir is required: the directory of a run")
    settings = read(Settings, [run_settings(flags.dir), *flags.settings])
    flags_parser.check_output(flags.out or flags.dir)
    with ss.init(
        dir=flags.dir,
        read_only=True,
        lanes=settings.lanes,
        seed=settings.seed,
        precision=settings.precision,
    ) as run:
        if run.step == 0:
            raise SettingsError(f"{flags.dir} has no snapshot; expected the --dir of a trained run")
        strips = open_held_out(settings, FileCheck(settings.data, flags.dir, run))
        generators = run.replicate(Generators(settings))
        run.track(generators=generators)
        out = flags.out or flags.dir / f"test-{run.step:08}"
        unscored = write_images(run, settings, generators, strips, out)
        if unscored:
            run.print(f"{len(strips)} files in {out}, not scored: {unscored}")
            return {}
        scores = evaluate(run, settings, generators, strips)
        run.print(f"step {run.step}: {shown(scores)}\n{len(strips)} strips in {out}")
        write_scores(run, out, scores, strips=len(strips))
        return scores


def write_images(
    run: ss.Run, settings: Settings, generators: Generators, strips: Strips, out: Path
) -> str | None:
    """Write the tiles made from each strip, on rank 0; return why they cannot be scored, if so."""
    copies = 0
    for start in range(0, len(strips), GATHERED):
        numbers = range(start, min(start + GATHERED, len(strips)))
        made = run.evaluate(
            made_from, generators, Subset(strips, numbers), lane_share(run, settings), gather=True
        )
        if made is None:  # only rank 0 gets them
            continue
        out.mkdir(parents=True, exist_ok=True)
        for number, tiles in zip(numbers, made.numpy(), strict=True):
            stem, truth = strips.paths[number].stem, pixels(strips[number]).numpy()
            write_strip(out, stem, settings.modalities, truth, tiles)
            copies += bool((truth[1:] == truth[0]).all())
    if not strips.has_truth:
        return "they are IHC tiles without truth"
    copies = run.broadcast(copies)
    return f"all tiles of {copies} strips are copies of their IHC tile" if copies else None


def write_strip(
    out: Path,
    stem: str,
    modalities: Sequence[str],
    truth: NDArray[np.uint8],
    made: NDArray[np.uint8],
) -> None:
    """Write the tiles made from one strip [modalities + 1, height, width, 3], and the sheet."""
    images = {**dict(zip((*modalities, "seg"), made, strict=True)), "sheet": sheet(truth, made)}
    for name, image in images.items():
        Image.fromarray(image).save(out / f"{stem}-{name}.png")


if __name__ == "__main__":
    run_script(main)
