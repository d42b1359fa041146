import torch

import samestep as ss
from samestep.record.events import read_events
from tests.jobs import classify, images


def test_batches_that_are_left_out_have_no_norm(tmp_path, caplog):
    options = {"system_every": None, "snapshot_every": None}
    skipped = range(2, 6)
    with ss.init(lanes=2, dir=tmp_path, skip_batches=f"2:{skipped.stop}", **options) as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
        for batch in run.batches(images(16), 4, steps=skipped.stop):
            run.backward(classify, model, batch)
            run.clip_grad_norm(model, 1.0)
            model.zero_grad()
        assert run._progress.skipped.steps == [*skipped]
    events = [event for event in read_events(tmp_path) if event["event"] == "timing"]
    assert ["norms" in event for event in events] == [True, True, *[False] * len(skipped)]
    assert caplog.text.count("skipped a batch") == 1  # one line for the range


def test_a_run_records_rates_and_norms(tmp_path):
    with ss.init(lanes=2, dir=tmp_path, system_every=None, snapshot_every=None) as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factors = [0.5, 0.25, 0.25, 0.125]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: dict(enumerate(factors)).get(step, 0)
        )
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(16), 4, steps=8):
            run.backward(classify, model, batch)
            run.clip_grad_norm(model, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    events = [event for event in read_events(tmp_path) if event["event"] == "timing"]
    rates = [event.get("rates", {}).get("optimizer") for event in events]
    assert rates == [0.05, 0.025, None, 0.0125, 0.0, None, None, None]
    ((norm, limit),) = events[5]["norms"]
    assert norm > limit == 1e-3
