"""Pretrain a decoder language model, or evaluate it.

samestep run -n 2 recipes/gpt/train.py recipes/gpt/small.yaml --dir runs/gpt
samestep run -n 2 recipes/gpt/train.py --eval --dir runs/gpt
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import nn

import samestep as ss
from recipes.gpt import checkpoint, training
from recipes.gpt.config import Settings
from recipes.gpt.data import Text, TextError, open_text, weights_of
from recipes.gpt.model import Layer
from recipes.gpt.page import picture
from recipes.progress import Progress
from recipes.resume import settings_applied
from recipes.scores import write_scores
from recipes.settings import SettingsError, read_arguments, run_script, write_run_settings


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train or evaluate; return the bits per byte of held-out texts."""
    flags, settings = read_arguments(Settings, __doc__, arguments)
    with (
        ss.init(
            dir=flags.dir,
            read_only=flags.eval,
            lanes=settings.lanes,
            seed=settings.seed,
            precision=settings.precision,
            settings=settings.recorded(),
        ) as run,
        folder_of_tokens(run, settings) as folder,
    ):
        if flags.eval and flags.dir and run.step == 0:  # no snapshot was found
            raise SettingsError("--eval needs the --dir of a run with a snapshot")
        text = open_text(settings.data, folder, run.once, say=partial(print, flush=True))
        model = training.make_model(settings, text)
        if settings.pretrained is not None and run.step == 0:  # a resumed run has its parameters
            run.print(checkpoint.load(model, settings.model, settings.pretrained))
        sharded = {"shard": "full", "units": (Layer,)} if settings.model.shard else {}
        model = run.replicate(model, **sharded)
        if flags.eval:
            if flags.dir:
                track_text(run, text)
                run.track(model=model)
            scores = evaluate(run, settings, model, text)
            run.print(f"step {run.step}: {training.shown(scores)}")
            sample(run, settings, model, text)
            write_scores(run, flags.out, scores)
        else:
            scores = train(run, settings, model, text)
        if settings.export is not None:
            with run.full_parameters(model):
                if run.is_main:
                    checkpoint.save(model, settings.model, text, settings.export)
        return scores


def train(run: ss.Run, settings: Settings, model: nn.Module, text: Text) -> dict[str, float]:
    """Train from the current step to the last one."""
    track_text(run, text)
    loop = run.batches(
        {name: source.train for name, source in text.sources.items()},
        partial(training.batch_size_at, settings=settings),
        weights=weights_of(settings.data, text),
        steps=settings.steps,
        loader_workers=settings.data.loader_workers,
    )
    optimizers = training.make_optimizers(model, settings.optimizer)
    if settings.optimizer.shard:
        optimizers = {name: run.shard(optimizer) for name, optimizer in optimizers.items()}
    with settings_applied(run, *optimizers.values()):  # not those of the snapshot
        run.track(model=model, **optimizers)  # restores them if resumed
    write_run_settings(run, settings)
    loss_fn = partial(training.training_loss, sources=tuple(text.sources))
    progress = Progress(run, loop, unit="tokens")
    scores: dict[str, float] = {}

    model.train()
    for batch in loop:
        rate = training.set_rate(optimizers, loop.step - 1, settings)
        means = run.backward(loss_fn, model, batch, count=training.count_targets, reduction="sum")
        if settings.optimizer.clip_norm is not None:
            run.clip_grad_norm(model, settings.optimizer.clip_norm)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        tokens = training.tokens_until(loop.step, settings)
        run.log(means, learning_rate=rate, tokens=tokens)
        progress.update(means, tokens - training.tokens_until(loop.step - 1, settings))

        if progress.is_due(settings.evaluate_every):
            run.snapshot(now=True)  # before the evaluation, which may fail
            scores = evaluate(run, settings, model, text)
            run.log(bits_per_byte=scores)
            sample(run, settings, model, text)
            run.snapshot(score=-scores["all"])
            progress.print(f"step {loop.step}: {training.shown(scores)}")
    return scores or evaluate(run, settings, model, text)  # a finished run has no steps left


def track_text(run: ss.Run, text: Text) -> None:
    """Note in snapshots which tokens the run has. Raises `TextError` if one has others."""
    trained_on = {"digest": text.digest}
    run.track(text=trained_on)  # restores it if resumed
    if trained_on["digest"] != text.digest:
        raise TextError(
            f"the tokens are not those that the snapshot of step {run.step} was trained on; their "
            "texts have changed: start a new run with another --dir"
        )


def evaluate(run: ss.Run, settings: Settings, model: nn.Module, text: Text) -> dict[str, float]:
    """Return the bits per byte of the held-out texts of each source, and of all."""
    means = {}
    for name, source in text.sources.items():
        rows = settings.evaluate_batch_size
        means[name] = run.evaluate(training.score, model, source.held_out, rows)["nats"]
    return training.bits_per_byte(text, means)


def sample(run: ss.Run, settings: Settings, model: nn.Module, text: Text) -> None:
    """Print texts that the model writes after each prompt, and put them on the run's page."""
    if not settings.prompts or settings.sample_tokens == 0:
        return
    tokens = run.evaluate(
        partial(
            training.generate,
            count=settings.sample_tokens,
            temperature=settings.temperature,
            length=settings.data.length,
        ),
        model,
        training.prompts_of(text, settings),
        1,  # prompts have different lengths
        gather=True,
    )
    if tokens is not None:  # only rank 0 gets them
        texts = list(training.sampled(text, settings, tokens))
        run.print("\n".join(f"> {sampled!r}" for sampled in texts))
        run.log_image("samples", picture(texts))


@contextmanager
def folder_of_tokens(run: ss.Run, settings: Settings) -> Iterator[Path]:
    """Yield the folder for tokens: the one that is set, the run's, or a temporary one."""
    if settings.data.tokens is not None or run.dir is not None:
        yield settings.data.tokens or run.dir / "text"
        return
    folder = Path(run.once(lambda: tempfile.mkdtemp(prefix="samestep-gpt-")))
    try:
        yield folder / "text"
    finally:
        if run.is_main:  # the others have it mapped
            shutil.rmtree(folder)


if __name__ == "__main__":
    run_script(main)
