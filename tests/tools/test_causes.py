"""Each cause is blamed for the differences that it makes, and for no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.tools.causes import CAUSES, Difference, Observation, explain, starting_over
from samestep.tools.trace import RunTrace, StepTrace, kill_steps
from samestep.tools.verify import first_difference

STATE = ("metric loss", "model/0.weight", "model/0.running_mean", "model/tokens")
COUNTER = Observation(1, "attribute", "Net.calls")  # which may be harmless


def causes_of(*names, step=2, same=(), between="workers", observations=(), **found):
    difference = Difference(step, names, same, between)
    lines = explain(difference, observations, **found)
    return [
        cause
        for line in lines
        for cause, text in CAUSES.items()
        if line.partition(": ")[2].endswith(text.rpartition("{}")[2])
    ]


@pytest.mark.parametrize(
    ("cause", "names", "options"),
    [
        ("start", ["model/0.weight"], {"step": 0}),
        ("start", ["model/0.weight"], {"step": 0, "observations": [COUNTER]}),
        ("forward", ["metric loss", "model/0.weight"], {}),
        ("update", ["model/0.weight"], {"same": ["metric loss"]}),
        # a lane's counter would change the loss, too
        ("update", ["model/0.weight"], {"same": ["metric loss"], "observations": [COUNTER]}),
        ("update", ["model/0.weight", "logged norm"], {"same": ["metric loss"]}),
        ("attribute", ["metric loss"], {"observations": [COUNTER]}),
        ("attribute", ["model/0.weight"], {"observations": [COUNTER]}),  # nothing is logged
        ("forward", ["metric loss"], {"observations": [COUNTER._replace(step=3)]}),
        ("generator", ["metric loss"], {"observations": [Observation(1, "generator", "noise")]}),
        ("unseeded", ["metric loss"], {"observations": [Observation(0, "unseeded", "noise")]}),
        ("sample", ["metric loss"], {"observations": [Observation(0, "sample", "Lines")]}),
        (
            "tensors",
            ["model/0.weight"],
            {"same": ["metric loss"], "observations": [Observation(2, "tensors", "weight")]},
        ),
        ("statistics", ["model/0.running_mean"], {"same": ["metric loss"]}),
        ("buffer", ["model/tokens"], {"same": ["metric loss"], "buffers": {"tokens"}}),
        ("plain", ["plain state of counter"], {}),
        ("logged", ["logged accuracy"], {"same": STATE}),
        ("logged", ["logged accuracy"], {"same": STATE, "observations": [COUNTER]}),
        ("untracked", ["metric loss"], {"between": "resume", "observations": [COUNTER]}),
        ("variables", ["model/0.weight"], {"between": "resume", "variables": ["ema.shadow"]}),
        ("loaders", ["metric loss"], {"between": "loaders", "observations": [COUNTER]}),
        (
            "sample",
            ["metric loss"],
            {"between": "loaders", "observations": [Observation(0, "sample", "Lines")]},
        ),
    ],
)
def test_a_difference_is_explained_by_its_cause(cause, names, options):
    assert causes_of(*names, **options) == [cause]


def test_the_likeliest_causes_come_first():
    observations = [COUNTER, Observation(1, "generator", "a"), Observation(1, "generator", "a")]
    assert causes_of("metric loss", observations=observations) == ["generator", "attribute"]


def test_variables_that_start_over_are_named():
    start = {"count": "0", "ema.shadow[0]": "a", "ema.shadow[1]": "b", "size": "1", "lr": "3"}
    later = {"count": "2", "ema.shadow[0]": "c", "ema.shadow[1]": "d", "size": "1", "lr": "3"}
    runs = {"1": {0: start, 2: later}, "2": {0: start, 2: {**later, "size": "2"}}}
    assert starting_over(runs, "1", 2, start) == ["count", "ema.shadow[0]"]
    # made from what was restored: neither the value of the start nor that of the step
    copied = {**later, "ema.shadow[0]": "e", "another": "5", "size": "9"}
    assert starting_over(runs, "1", 2, copied) == ["ema.shadow[0]"]
    assert starting_over(runs, "1", 2, later) == []


def run_of(title, *digests, between="workers", lost=None):
    steps = [StepTrace(step, {"m/weight": value}) for step, value in enumerate(digests)]
    return RunTrace(title, steps, between, lost or {})


def test_the_kill_before_the_difference_explains_it():
    lost = {1: ["count"], 3: ["best"]}
    good, killed = run_of("n=1", *"abcde"), run_of("killed", *"abcdX", between="resume", lost=lost)
    text = first_difference([good, killed])
    assert text.startswith("step 4: 'm/weight' differs between n=1 and killed\nLikely cause: best:")
    # a run that differs at any number of workers is not blamed on the kill
    text = first_difference([good, killed, run_of("n=2", *"abcdX")])
    assert "differs between n=1 and n=2\nUsual cause: the gradient or the update" in text
    short = run_of("killed", *"abc", between="resume")
    assert "never reached it\nUsual cause: a variable that counts" in first_difference(
        [good, short]
    )
    assert "a number of steps that" in first_difference([good, run_of("n=2", *"abc")])
    assert first_difference([good, good]) is None


def test_variables_that_differ_at_the_end_explain_only_the_last_step():
    good = run_of("n=1", *"abcd")
    killed = run_of("killed", *"abcX", between="resume", lost={1: [], 2: []})
    assert "Usual cause: state that is not" in first_difference([good, killed])
    text = first_difference([good, replace(killed, lost_at_end=["best"])])
    assert "step 3: 'm/weight' differs between n=1 and killed\nLikely cause: best:" in text
    # rather those of a kill, even if it is not the newest
    text = first_difference([good, replace(killed, lost={1: ["count"], 2: []}, lost_at_end=["b"])])
    assert "Likely cause: count:" in text
    early = replace(run_of("killed", *"abXX", between="resume"), lost_at_end=["best"])
    assert "Usual cause: state that is not" in first_difference([good, early])


def test_a_worker_is_killed_in_each_loop_and_after_each_epoch():
    def trace(step, **loops):
        return StepTrace(step, {}, loops)

    traces = [
        trace(0),
        trace(1, train=(1, 1)),
        trace(2, train=(2, 2)),
        trace(3, train=(3, 0)),
        trace(4, train=(3, 0), tune=(1, 1)),
        trace(5, train=(3, 0), tune=(2, 2)),
        trace(6, train=(4, 1), tune=(2, 2)),
        trace(7, train=(5, 2), tune=(2, 2)),
    ]
    assert kill_steps(traces) == [1, 3, 4]
    assert kill_steps(traces[:2]) == []
