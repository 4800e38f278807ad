"""The table of vision transformers: its arms, its claims, and a run of it on toy images from pictures to the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.pictures import striped
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.data.image_files import prepare_images
from skipless.paper.claims import Results, made_at
from skipless.paper.experiments import Setting
from skipless.paper.recipes import recipe
from skipless.paper.records import ImageSet, Record, ResultsFolder, Text, facts_of
from skipless.paper.runs import H200, make_run, missing, outcomes, run_key, run_seconds, total
from skipless.paper.tables import TABLES, gather, markdown
from skipless.theory.schemes import ExponentialSPA
from skipless.training.config import Experiment

CIFAR = ImageSet("cifar10", 32, 3, (125.3, 122.9, 113.9), (62.5, 61.9, 66.5), 10, 0.148, 2.3026, 50_000, "ab12")
TABLE = TABLES["vision"]


@pytest.fixture
def setting() -> Setting:
    return Setting.of(TABLE.scales["small"], CIFAR)


def test_arms_are_equal_but_for_what_they_compare(setting: Setting) -> None:
    """One schedule, one embedding's rate, three rates for each, three seeds where something is claimed."""
    runs = {arm.name: arm.experiment(setting.scale, CIFAR, 1e-3) for arm in TABLE.arms}
    assert {way for name in runs for way in [name.partition("/")[2]]} == {
        f"{way}{depth}" for way in ("adam", "muon", "soap") for depth in ("", "-24")
    }
    schedules = {run.train for run in runs.values()}
    assert len(schedules) == 1
    train = schedules.pop()
    assert (train.steps, train.batch_size, train.length, train.label_smoothing) == (9766, 256, 64, 0.1)
    assert train.steps * train.batch_size == pytest.approx(50 * CIFAR.images, rel=1e-4)
    assert {run.optimizer.embedding_rate for run in runs.values()} == {2e-3}
    assert {run.model.depth for run in runs.values()} == {12, 24}
    assert {run.model.width for run in runs.values()} == {256}
    assert len({run_key(run, CIFAR) for run in runs.values()}) == len(TABLE.arms)
    for name, run in runs.items():
        assert run.model.vanilla == (not name.startswith("pre-ln"))
        assert Experiment.from_json(run.to_json()) == run
        arm = TABLE.arm(name)
        assert len(arm.rates(setting.scale, CIFAR, 3)) == 3
        assert setting.seeds_of(arm) == (1 if "u-spa" in name or "line" in name else 3)
    assert total(TABLE, setting) == 13 * 3 + 9 * 2
    schemes = {name: runs[name].model.scheme for name in ("mirrored/muon", "mirrored-line/muon")}
    assert [(each.gamma_final, each.grid, each.repeat_rate) for each in schemes.values()] == [
        (0.5, "square", 0.148),
        (0.2, None, 0.148),
    ]
    seconds = {arm.name: run_seconds(runs[arm.name].model, train, H200) for arm in TABLE.chosen(setting.scale)}
    assert 40 < seconds["pre-ln/muon"] < seconds["pre-ln/muon-24"] < 240


def test_keys_are_of_smoothing_and_moves_too(setting: Setting) -> None:
    run = TABLE.arms[0].experiment(setting.scale, CIFAR, 1e-3)
    others = [
        replace(run, train=replace(run.train, label_smoothing=0.0)),
        replace(run, data=replace(run.data, crop=2)),
        replace(run, data=replace(run.data, flip=False)),
    ]
    assert len({run_key(each, CIFAR) for each in (run, *others)}) == 4
    assert run_key(run, replace(CIFAR, folder="/elsewhere")) == run_key(run, CIFAR)
    assert run_key(run, replace(CIFAR, fingerprint="other")) != run_key(run, CIFAR)


def test_grids_are_set_from_text_and_follow_patches() -> None:
    run = recipe("vit/mirrored")
    assert run.override("model.images.patch=8").model.scheme.grid == run.model.scheme.grid == "square"
    assert run.override("model.scheme.grid=4,16").model.scheme.grid == (4, 16)
    line = run.override("model.scheme.grid=none", "model.scheme.gamma_final=0.2")
    assert line.model.scheme == ExponentialSPA(0.2, run.model.scheme.repeat_rate)
    assert Experiment.from_json(line.to_json()) == line
    with pytest.raises(ValueError, match=r"model.scheme.grid is 'round'; it must be one of 'square'"):
        run.override("model.scheme.grid=round")
    with pytest.raises(ValueError, match="is for 32 locations, and length=64"):
        run.override("model.scheme.grid=4,8")


def test_facts_come_back_as_what_they_were(text: Text) -> None:
    assert facts_of(json.loads(json.dumps(CIFAR.to_json()))) == CIFAR
    assert facts_of(text.to_json()) == text
    with pytest.raises(ValueError, match="text lacks 'name'"):
        facts_of({"classes": 3})


def judged(setting: Setting, fake, accuracies: dict[str, float]) -> dict[str, str]:
    """Verdicts where arms end with these accuracies at every rate and seed."""
    records: dict[str, Record] = {}
    while left := missing([TABLE], setting, records):
        for run in left:
            way = accuracies.get(run.arm, 85.0)
            loss = 1.0 + abs(run.rate - TABLE.arm(run.arm).middle)
            record = fake(run, loss if way else float("inf"), measures={"accuracy": way} if way else {})
            records[run.key] = replace(record, text=CIFAR.to_json())
    known = outcomes(TABLE, setting, records)
    claims = made_at(TABLE.claims, setting.scale)
    return {claim.text(): claim.judge(Results(known, CIFAR.unigram)).mark for claim in claims}


def test_what_the_claims_say(setting: Setting, fake) -> None:
    assert set(judged(setting, fake, {}).values()) == {"pass"}
    found = judged(setting, fake, {"mirrored/adam": 83.9, "mirrored/muon-24": 84.5, "pre-ln/soap": 81.0})
    assert {claim for claim, mark in found.items() if mark == "fail"} == {
        "pre-ln/adam is at most 1 above mirrored/adam in accuracy",
        "mirrored/muon is at most 0.4 above mirrored/muon-24 in accuracy",
        "accuracy of pre-ln/soap is above 82",
    }
    on_a_cpu = {claim.text() for claim in made_at(TABLE.claims, TABLE.scales["cpu"])}
    assert {claim for claim in found if "is above 82" in claim} == set(found) - on_a_cpu
    assert made_at(TABLE.claims, TABLE.scales["tiny"]) == ()
    lost = judged(setting, fake, {"mirrored/soap": 0.0})
    assert lost["pre-ln/soap is at most 1 above mirrored/soap in accuracy"] == "fail"


@pytest.mark.slow
def test_from_pictures_to_a_page(tmp_path: Path, monkeypatch) -> None:
    """At the smallest scale on a CPU: two arms, then the page again from the log alone."""
    monkeypatch.chdir(tmp_path)
    prepare_images(striped(tmp_path / "pictures", train=8, test=4), tmp_path / "data")

    def skipless(*words: str):
        return CliRunner().invoke(app, ["reproduce", *words, "--out", "results"])

    arms = "mirrored/muon,pre-ln/adam"
    done = skipless("vision", "--data", "data", "--arms", arms, "--device", "cpu")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "results" / "vision-tiny.md").read_text()
    assert "Images: pictures, 16 images of 16 × 16 in 2 classes (entropy 0.69)" in page
    assert "## At a glance: accuracy" in page
    folder = ResultsFolder("results", "tiny")
    assert {record.arm for record in folder.records.values()} == set(arms.split(","))
    assert all(0.0 <= record.measures["accuracy"] <= 100.0 for record in folder.records.values())
    assert (folder.texts(), len(folder.texts(images=True))) == ([], 1)
    facts = ImageSet.read("data")
    assert replace(facts, folder=None) == folder.texts(images=True)[0]
    tiny = Setting.of(TABLE.scales["tiny"], facts)
    run = make_run(TABLE, TABLE.arm("mirrored/muon"), tiny, 3e-3, embedding_rate=2e-3)
    assert run.key in folder.records
    again = skipless("baselines", "vision", "--tables-only")
    assert again.exit_code == 0, again.output
    assert not (tmp_path / "results" / "baselines-tiny.md").exists()
    assert (tmp_path / "results" / "vision-tiny.md").read_text() == page
    assert page == markdown(gather(TABLE, tiny, folder.records), "vision-tiny.png")


def test_tables_and_data_that_do_not_go_together(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare_images(striped(tmp_path / "pictures", train=2, test=2), tmp_path / "data")
    for words, said in {
        ("vision",): "scale 'tiny' needs images: --data FOLDER, made by `skipless prepare SOURCE --images`",
        ("vision", "--scale", "medium", "--data", "data"): "at which vision is not run; use one of tiny, cpu, small",
        ("baselines", "--data", "data"): "baselines is left out: it needs text: --data FOLDER",
    }.items():
        found = CliRunner().invoke(app, ["reproduce", *words])
        assert isinstance(found.exception, ValueError)
        assert said in str(found.exception)
