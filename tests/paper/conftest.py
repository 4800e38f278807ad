"""A text without a folder, and records of runs that never happened."""

from collections.abc import Callable

import pytest

from skipless.paper.records import Record, Text
from skipless.paper.runs import Run

Fake = Callable[..., Record]


@pytest.fixture
def text() -> Text:
    return Text("wiki", 32_000, 0.008, 7.52, 28_000_000, "0123456789ab")


@pytest.fixture
def fake(text: Text) -> Fake:
    """The record of a run that ended with this loss; infinite means that it diverged."""

    def make(run: Run, loss: float, **values) -> Record:
        lost = loss == float("inf")
        known = {
            "steps": run.experiment.train.steps,
            "valid_loss": loss,
            "diverged_at": 7 if lost else None,
            "seconds": 20.0,
            "step_seconds": 0.01,
            "jobs": 1,
            "device": "H200",
            "torch": "2.11",
            "commit": "abc",
            "time": "",
            "curve": [[1, 10.0], [2, 9.5]],
        }
        named = (run.key, run.table, run.arm, "small", run.rate, run.seed, run.multiple, run.measure)
        return Record(*named, train_loss=loss, text=text.to_json(), **{**known, **values})

    return make
