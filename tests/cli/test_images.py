"""Images from the outside: prepare, train, resume, evaluate, export; what is for text alone says so."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.pictures import striped
from transformers import AutoConfig, AutoModelForImageClassification
from typer.testing import CliRunner

from skipless.cli.app import app
from skipless.data.image_loader import ImageLoader
from skipless.data.image_store import ImageStore, read_images
from skipless.model.config import Images
from skipless.model.transformer import Transformer
from skipless.paper.recipes import by_images
from skipless.paper.recipes import plan as plan_of
from skipless.training.checkpoint import save_weights
from skipless.training.config import DataConfig, Experiment, TrainConfig
from skipless.training.load import load, load_model

SIZES = (
    "model.depth=2",
    "model.width=16",
    "model.heads=2",
    "train.steps=6",
    "train.batch_size=4",
    "train.eval_every=3",
)
PLAIN = ("train.precision=fp32", "train.compile=false", "train.log_every=1", "train.checkpoint_every=3")
CORPUS = ("--corpus", "data/pictures-images")


def skipless(*words: str):
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    striped(tmp_path / "pictures", train=6, test=4)
    return tmp_path


def test_from_pictures_to_a_trained_network(here: Path, one_thread) -> None:
    prepared = skipless("prepare", "pictures", "--images")
    assert (prepared.exit_code, prepared.stdout) == (0, "data/pictures-images\n")
    settings = [word for field in (*SIZES, *PLAIN) for word in ("--set", field)]
    words = ["train", "vit/mirrored", "--data", "data/pictures-images", "--out", "run", "--device", "cpu", *settings]
    shown = json.loads(skipless(*words, "--show").stdout)
    assert (shown["model"]["classes"], shown["model"]["images"]["side"], shown["train"]["length"]) == (2, 16, 16)
    trained = skipless(*words)
    assert trained.exit_code == 0, trained.output
    assert "of 8 images" in trained.stdout
    assert "images/s" in trained.output
    finished = skipless(*words, "--resume")
    assert isinstance(finished.exception, ValueError)
    assert "is finished" in str(finished.exception)
    judged = skipless("eval", "run", "--device", "cpu")
    assert judged.exit_code == 0, judged.output
    assert judged.stdout.startswith("data/pictures-images: validation loss ")
    accuracy = json.loads((here / "run" / "finished.json").read_text())["valid"]["accuracy"]
    assert f"accuracy {accuracy:.2%} of 8 images" in judged.stdout
    for more in ([], ["--corpus", "data/pictures-images"]):
        looked = skipless("inspect", "run", *more)
        assert looked.exit_code == 0, looked.output
        assert "all 2 blocks" in " ".join(looked.output.split())
    refused = skipless("generate", "run", "--prompt", "x")
    assert isinstance(refused.exception, ValueError)
    assert "run holds a network of images, and this is for text" in str(refused.exception)
    for given in (["--tasks", "all"], ["--limit", "3"], ["--backend", "lm-eval"], ["--download"], ["--length", "0"]):
        other = skipless("eval", "run", *given)
        assert f"{given[0]} is not for a network of images" in str(other.exception)


def test_a_patch_divides_the_side_of_the_images_at_hand(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    striped(tmp_path / "pictures", side=28, train=2, test=1)
    assert skipless("prepare", "pictures", "--images", "--out", "data").exit_code == 0
    words = ("train", "vit/mirrored", "--data", "data", "--show", "--set")
    images = json.loads(skipless(*words, "model.images.patch=7").stdout)["model"]["images"]
    assert (images["side"], images["patch"]) == (28, 7)
    assert "images.patch=5 does not divide images.side=28" in str(skipless(*words, "model.images.patch=5").exception)
    plan = plan_of("vit/mirrored", data="data")[0]
    assert by_images(plan, {"model.images.patch": 7}) == {"model.images.side": 28}
    assert by_images(plan, {"model.images.side": 14}) == {}


@pytest.fixture
def run(here: Path) -> Path:
    """A run of images whose weights are there, as if it had been trained."""
    assert skipless("prepare", "pictures", "--images").exit_code == 0
    torch.manual_seed(0)
    manifest = read_images("data/pictures-images")
    images = Images(16, 4, 3, manifest.mean, manifest.std)
    model = Transformer("vit/mirrored", width=16, depth=3, heads=2, images=images, classes=2)
    train = TrainConfig(steps=9, warmup=1, length=16, batch_size=4)
    save_weights(model, here / "run" / "model.safetensors")
    experiment = Experiment("tiny", model.config, DataConfig(folder="data/pictures-images"), train=train)
    (here / "run" / "experiment.json").write_text(experiment.to_json())
    lines = [
        {"step": 9, "loss": 0.6, "ema": 0.7},
        {"step": 9, "valid_loss": 0.5, "valid_accuracy": 0.75, "valid_images": 8},
    ]
    (here / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return here / "run"


def test_an_export_is_the_run_for_transformers_and_for_us(run: Path) -> None:
    done = skipless("export", "run")
    assert done.exit_code == 0, done.output
    assert "run/export: AutoModelForImageClassification.from_pretrained loads it" in done.stdout
    files = {"README.md", "config.json", "hashes.json", "model.safetensors", "modeling_skipless.py"}
    assert {file.name for file in (run / "export").iterdir()} == files | {"preprocessor_config.json"}
    native = load(run)
    pixels = ImageLoader(ImageStore("data/pictures-images", "valid"), 8).batch(0).pixels
    with torch.no_grad():
        assert torch.equal(load(run / "export")(pixels), native(pixels))
        loaded = AutoModelForImageClassification.from_pretrained(run / "export")
        assert torch.equal(loaded(native.embedding.normalised(pixels)).logits, native(pixels))
    assert loaded.config.id2label == {0: "across", 1: "along"}
    said = [skipless("eval", *words, "--device", "cpu") for words in (["run"], ["run/export", *CORPUS])]
    assert said[0].exit_code == said[1].exit_code == 0, said[1].output
    assert said[0].stdout == said[1].stdout
    looked = [
        skipless("inspect", folder, *CORPUS).stdout.replace("run/export", "run") for folder in ("run", "run/export")
    ]
    assert looked[0] == looked[1]
    assert "give --corpus" in str(skipless("eval", "run/export").exception)
    assert "this is for text" in str(skipless("generate", "run/export", "--prompt", "x").exception)
    assert skipless("export", "run/export", "--out", "again").exit_code == 0
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        assert (run.parent / "again" / name).read_bytes() == (run / "export" / name).read_bytes()


def test_accuracy_by_class_is_printed_and_written_and_reported(run: Path) -> None:
    """The data may lie elsewhere: the run knows its classes."""
    (run / "classes.json").write_text('["across", "along"]')
    done = skipless("eval", "run", "--device", "cpu", "--json", "judged.json")
    assert done.exit_code == 0, done.output
    judged = json.loads(Path("judged.json").read_text())["images"]["data/pictures-images"]
    assert (judged["images"], [each["name"] for each in judged["classes"]]) == (8, ["across", "along"])
    store = ImageStore("data/pictures-images", "valid")
    batch = ImageLoader(store, 8).batch(0)
    with torch.no_grad():
        likeliest = load(run)(batch.pixels).argmax(1)
    counts = [int((likeliest[batch.targets == number] == number).sum()) for number in range(2)]
    assert [each["right"] for each in judged["classes"]] == counts
    right = sum(counts)
    assert judged["accuracy"] == right / 8
    for each in judged["classes"]:
        assert each["images"] == 4 == each["right"] + sum(each["taken_for"].values())
        assert f"{each['name']:6}  {4:6}  {each['right'] / 4:8.1%}" in done.stdout
    first = max(judged["classes"], key=lambda each: sum(each["taken_for"].values()))
    other, count = next(iter(first["taken_for"].items()))
    assert f"most often taken: {first['name']} for {other} ({count})" in done.stdout
    assert json.loads(skipless("eval", "run", "--device", "cpu", "--json", "-").stdout)["images"]
    assert skipless("report", "run", "judged.json").exit_code == 0
    page = Path("report.html").read_text()
    assert f"run/model.safetensors on pictures-images: {right / 8:.2%} of 8 images" in page
    assert "<td>75.0%</td>" in page  # the run's own, in the table of runs
    assert "perplexity" not in page[page.index("<table>") : page.index("</table>")]
    assert skipless("report", "judged.json", "--out", "alone.html").exit_code == 0
    assert "<h1>Classes of images</h1>" in Path("alone.html").read_text()
    broken = json.loads(Path("judged.json").read_text())
    broken["images"]["data/pictures-images"]["classes"][0]["right"] = "many"
    Path("judged.json").write_text(json.dumps(broken))
    refused = skipless("report", "judged.json", "--out", "broken.html")
    assert "judged.json is damaged" in str(refused.exception)
    assert not Path("broken.html").exists()


def test_the_card_of_images_runs_and_says_what_a_reader_looks_for(run: Path, capsys) -> None:
    assert skipless("export", "run").exit_code == 0
    card = (run / "export" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-classification\n")
    assert "| images | 16 × 16 of 3 channels, in 16 patches of 4 × 4 |\n| classes | 2 |" in card
    assert "| names of classes | across, along |" in card
    assert "| steps | 9 of 4 images |" in card
    assert "| validation accuracy | 0.7500 at step 9 |" in card
    assert "validation images" not in card
    assert "tokenizer" not in card
    assert "vocabulary" not in card
    code = card[card.index("```python\n") + 10 :].partition("```")[0]
    picture = run.parent / "pictures" / "test" / "along" / "000.png"
    capsys.readouterr()
    exec(code.replace('"."', repr(str(run / "export"))).replace("picture.png", str(picture)), {})
    assert capsys.readouterr().out.strip() in ("across", "along")


def test_classes_are_named_by_the_data_or_said_to_be_unnamed(run: Path) -> None:
    (run.parent / "data").rename(run.parent / "moved")
    unnamed = skipless("export", "run", "--out", "unnamed")
    assert unnamed.exit_code == 0
    assert "LABEL_0 … LABEL_1" in unnamed.output
    assert "data/pictures-images is not there; --classes FOLDER names them" in " ".join(unnamed.output.split())
    assert skipless("export", "run", "--out", "named", "--classes", "moved/pictures-images").exit_code == 0
    names = [AutoConfig.from_pretrained(folder).id2label for folder in ("unnamed", "named")]
    assert names == [{0: "LABEL_0", 1: "LABEL_1"}, {0: "across", 1: "along"}]
    for name, accepted in (("unnamed", True), ("named", False)):  # where names are known, others are refused
        manifest = Path("moved/pictures-images/manifest.json")
        manifest.write_text(manifest.read_text().replace('"across"', '"above"'))
        done = skipless("eval", name, "--corpus", "moved/pictures-images", "--device", "cpu")
        assert (done.exit_code == 0) == accepted, done.output
        assert accepted or "is 'above', and of named 'across'" in str(done.exception)
    assert "not a folder of prepared images" in str(skipless("export", "run", "--classes", "nowhere").exception)
    with pytest.raises(ValueError, match="holds a network of images, and this is for text"):
        load_model("named")


def test_images_of_another_kind_are_refused_with_what_would_do(run: Path) -> None:
    assert skipless("export", "run").exit_code == 0
    striped(run.parent / "larger", train=2, test=1, side=32)
    assert skipless("prepare", "larger", "--images", "--out", "larger-images").exit_code == 0
    for folder in ("run", "run/export"):
        done = skipless("eval", folder, "--corpus", "larger-images", "--device", "cpu")
        assert "model.images.side=16, and the images of larger-images have 32; give --corpus" in str(done.exception)
    assert "--tokenizer is not for a network of images" in str(
        skipless("export", "run", "--tokenizer", "bytes").exception
    )
    shutil.copytree("pictures/train/along", "pictures/train/third")
    assert skipless("prepare", "pictures", "--images", "--out", "three").exit_code == 0
    done = skipless("export", "run", "--classes", "three")
    assert "the 3 classes of three are not the 2 of run/model.safetensors" in str(done.exception)


def test_a_run_of_two_minds_and_one_without_its_images_say_so(run: Path) -> None:
    experiment = json.loads((run / "experiment.json").read_text())
    experiment["model"]["depth"] = 4
    (run / "experiment.json").write_text(json.dumps(experiment))
    for command in ("eval", "export", "inspect"):
        words = (
            "run/model.safetensors and run/experiment.json are not of one run: in the first depth is 3, 4 in the second"
        )
        assert words in str(skipless(command, "run").exception)
    experiment["model"]["depth"] = 3
    experiment["data"]["folder"] = "gone"
    (run / "experiment.json").write_text(json.dumps(experiment))
    refused = skipless("eval", "run", "--device", "cpu")
    assert "run was judged by the images of gone, which are not there; give --corpus" in str(refused.exception)
    assert skipless("eval", "run", "--device", "cpu", *CORPUS).exit_code == 0


def test_every_file_of_an_export_of_images_is_verified(run: Path) -> None:
    assert skipless("export", "run").exit_code == 0
    for file in sorted((run / "export").iterdir()):
        whole = file.read_bytes()
        for damaged in (whole[:40] + bytes([whole[40] ^ 4]) + whole[41:], whole[:-9]):
            file.write_bytes(damaged)
            for command in (["eval", "run/export", *CORPUS], ["inspect", "run/export"]):
                assert f"{file.name} is damaged" in str(skipless(*command).exception), command
            with pytest.raises((ValueError, OSError)):  # of config.json transformers may complain first
                AutoModelForImageClassification.from_pretrained(run / "export")
        file.write_bytes(whole)
    assert skipless("eval", "run/export", *CORPUS, "--device", "cpu").exit_code == 0


def test_pictures_are_to_be_named_and_stay_in_sight(run: Path) -> None:
    assert "--images needs pictures: name a folder" in str(skipless("prepare", "--images").exception)
    words = ["train", "vit/mirrored", "--data", "data/pictures-images", "--out", "dark", "--device", "cpu"]
    refused = skipless(*words, "--set", "data.crop=16")
    assert "data.crop=16 may shift images of 16 × 16 out of sight; use --set data.crop=2" in str(refused.exception)


def test_the_list_has_the_family_and_its_table(here: Path) -> None:
    assert "vit/mirrored-u-spa" in skipless("train", "--list").stdout.splitlines()
    line = next(line for line in skipless("reproduce", "--list").stdout.splitlines() if line.startswith("vision"))
    assert "57" in line


def test_theory_and_inspection_of_the_family(here: Path) -> None:
    certified = skipless("kernels", "vit/mirrored", "--no-figure")
    assert certified.exit_code == 0, certified.output
    assert "survives all 12 blocks" in certified.output
    looked = skipless("inspect", "vit/mirrored", "--depth", "3", "--width", "64")
    assert looked.exit_code == 0, looked.output
    assert "theory" in looked.output
    for option in (["--length", "16"], ["--text", str(here / "pictures" / "train" / "along" / "000.png")]):
        refused = skipless("inspect", "vit/mirrored", *option)
        assert "is a network of images, which have one size" in str(refused.exception)
