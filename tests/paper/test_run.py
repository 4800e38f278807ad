"""A run of `reproduce` that is stopped before it has begun, or that another version has left."""

from pathlib import Path

import pytest

from skipless.paper import execute as run_module
from skipless.paper.catalogue import ITEMS
from skipless.paper.execute import Order, run_one
from skipless.paper.experiments import SCALES, Setting, Text, make_job


def test_a_run_stopped_before_it_began_leaves_no_files_of_no_run(tmp_path: Path, monkeypatch) -> None:
    text, item = Text("none", 256, 0.05, 3.2, 0, ""), ITEMS["baselines"]
    job = make_job(item, item.arms[0], Setting.of(SCALES["tiny"], text), 1e-4)

    def stopped(experiment, folder: Path, **_) -> None:
        folder.mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_one(Order(job, text, "tiny", tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "run" / "spent.txt").write_text("1.0\n")  # as earlier versions left it
    with pytest.raises(KeyboardInterrupt):
        run_one(Order(job, text, "tiny", tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("left", ['{"name": "old", "train": {"gone": 1}}', "{"])
def test_what_another_version_left_of_a_run_is_begun_again(tmp_path: Path, monkeypatch, left: str) -> None:
    text, item, folder = Text("none", 256, 0.05, 3.2, 0, ""), ITEMS["baselines"], tmp_path / "run"
    job = make_job(item, item.arms[0], Setting.of(SCALES["tiny"], text), 1e-4)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "experiment.json").write_text(left)
    seen: list[bool] = []

    def stopped(*_, **__) -> None:
        seen.append(folder.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_one(Order(job, text, "tiny", folder))
    assert seen == [False]
