from __future__ import annotations

import pytest
from torch.utils.data import TensorDataset

from benchmarks import evaluation
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("default")  # warnings of peers are not ours


def task():
    model, dataset = evaluation.small()
    return evaluation.Task(model, TensorDataset(*dataset[:512]))


@pytest.mark.long
@pytest.mark.parametrize("way", evaluation.WAYS)
def test_every_contender_computes_the_accuracy_of_the_complete_data_set(way):
    _, scores = evaluation.score(task().model, task().dataset[:])
    for figures in run_workers(lambda: evaluation.WAYS[way](task()), 2):
        assert figures["accuracy"] == pytest.approx(float(scores["accuracy"]))
        assert figures["samples_a_second"] > 0
