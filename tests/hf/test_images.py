"""Networks of images behind transformers' interface, held to the native network's numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf.conftest import build
from tests.hf.test_saving import fresh, rewrite
from tests.pictures import striped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    pipeline,
)

import skipless
from skipless.data.image_files import Picture, decode
from skipless.hf.configuration import SkiplessConfig
from skipless.hf.modeling import (
    SkiplessForCausalLM,
    SkiplessForImageClassification,
    SkiplessForSequenceClassification,
    images_as_pretrained,
)
from skipless.model.config import Images
from skipless.model.fold import fold
from skipless.model.transformer import Transformer

PRESETS = ("mirrored", "pre-ln", "mirrored-u-spa", "e-spa", "u-spa")
LABELS = ("across", "along", "neither")
IMAGES = Images(side=16, patch=4, mean=(127.3396, 120.1, 90.5), std=(46.6546, 47.1524, 60.25))


def network(name: str = "mirrored", **changes) -> Transformer:
    """A small one away from its initialisation."""
    torch.manual_seed(0)
    fields = {"width": 16, "depth": 4, "heads": 2, "classes": 3, "images": IMAGES}
    model = Transformer(f"vit/{name}", **{**fields, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def native() -> Transformer:
    return network()


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def values(native, pixels) -> Tensor:
    """The pixels as training normalises them."""
    return native.embedding.normalised(pixels)


@pytest.fixture
def saved(native, tmp_path) -> Path:
    for part in images_as_pretrained(native, LABELS):
        part.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@torch.no_grad()
@pytest.mark.parametrize("name", PRESETS)
def test_a_round_trip_through_disk_is_exact(name, pixels, tmp_path):
    """Bias tables are in no file: they are made again from the config, and nothing else is."""
    native = network(name)
    wrapped, _ = images_as_pretrained(native, LABELS)
    values = native.embedding.normalised(pixels)
    assert torch.equal(wrapped(values).logits, native(pixels))
    wrapped.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {f"model.{name}" for name in native.state_dict()}
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(loaded, SkiplessForImageClassification)
    assert loaded.model.config == native.config
    assert torch.equal(loaded(values).logits, native(pixels))
    assert not list(loaded.buffers())
    loaded.save_pretrained(tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()


def test_the_config_has_transformers_names_and_nothing_of_text(saved):
    config = json.loads((saved / "config.json").read_text())
    assert [config[name] for name in ("image_size", "patch_size", "num_channels")] == [16, 4, 3]
    assert config["id2label"] == {"0": "across", "1": "along", "2": "neither"}
    assert config["label2id"] == {"across": 0, "along": 1, "neither": 2}
    assert config["auto_map"].keys() == {"AutoConfig", "AutoModel", "AutoModelForImageClassification"}
    of_text = {"use_cache", "tie_word_embeddings", "packed", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert not of_text & set(config)
    loaded = AutoConfig.from_pretrained(saved)
    assert (loaded.image_size, loaded.num_labels, loaded.hidden_size, loaded.use_cache) == (16, 3, 16, False)
    assert not hasattr(SkiplessConfig(), "image_size")  # of text
    assert not (saved / "generation_config.json").exists()


@torch.no_grad()
def test_the_processor_makes_of_a_file_what_training_makes_of_it(saved, native, tmp_path):
    """Every kind of picture that `skipless prepare` takes, to float32's rounding; and no code of ours is asked for."""
    image = pytest.importorskip("PIL.Image")
    stored = json.loads((saved / "preprocessor_config.json").read_text())
    assert stored["image_processor_type"] == "ViTImageProcessor"
    assert stored["image_mean"] == [mean / 255 for mean in IMAGES.mean]
    assert stored["image_std"] == [std / 255 for std in IMAGES.std]
    assert stored["size"] == {"height": 16, "width": 16}
    processor = AutoImageProcessor.from_pretrained(saved)
    plain = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    loaded = AutoModelForImageClassification.from_pretrained(saved)
    for mode in ("RGB", "L", "P", "1", "CMYK", "RGBA", "LA"):
        file = tmp_path / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}"
        image.fromarray(plain).convert("RGB" if mode in ("P", "CMYK") else "RGBA").convert(mode).save(file)
        trained = torch.tensor(decode(Picture("train", "across", str(file), file.read_bytes())))[None]
        with image.open(file) as picture:
            assert picture.mode == mode
            # transformers lays what is transparent on white, and training leaves its colours as they are
            made = processor(picture.convert("RGB") if "A" in mode else picture, return_tensors="pt").pixel_values
        torch.testing.assert_close(made, native.embedding.normalised(trained), rtol=0, atol=1e-6)
        torch.testing.assert_close(loaded(made).logits, native(trained), rtol=0, atol=1e-5)
    assert processor(image.new("RGB", (50, 30)), return_tensors="pt").pixel_values.shape == (1, 3, 16, 16)


@torch.no_grad()
def test_a_pipeline_names_the_classes_of_pictures(saved, native, tmp_path):
    striped(tmp_path / "pictures", train=2, test=1)
    files = sorted((tmp_path / "pictures" / "train").rglob("*.png"))
    said = pipeline("image-classification", model=str(saved))([str(file) for file in files], batch_size=2)
    for file, answers in zip(files, said, strict=True):
        pixels = torch.tensor(decode(Picture("train", "across", str(file), file.read_bytes())))[None]
        shares = dict(zip(LABELS, native(pixels)[0].softmax(0).tolist(), strict=True))
        assert [each["label"] for each in answers] == sorted(shares, key=shares.__getitem__, reverse=True)
        assert {each["label"]: each["score"] for each in answers} == pytest.approx(shares, abs=1e-5)


@torch.no_grad()
def test_a_network_of_one_channel_has_a_processor_of_one(tmp_path):
    image = pytest.importorskip("PIL.Image")
    grey = network(images=Images(16, 4, 1, (100.0,), (50.0,)))
    for part in images_as_pretrained(grey, None):
        part.save_pretrained(tmp_path)
    processor, loaded = (
        AutoImageProcessor.from_pretrained(tmp_path),
        AutoModelForImageClassification.from_pretrained(tmp_path),
    )
    plain = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    made = processor(image.fromarray(plain), return_tensors="pt")
    torch.testing.assert_close(loaded(**made).logits, grey(torch.tensor(plain)[None, None]), rtol=0, atol=1e-5)
    assert loaded.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    coloured = processor(image.new("RGB", (16, 16)), return_tensors="pt", image_mean=[0.4] * 3, image_std=[0.2] * 3)
    with pytest.raises(ValueError, match="reads 1 channel, not 3"):
        loaded(**coloured)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_the_native_ones(native, pixels, values, checkpointing):
    labels = torch.tensor([0, 2, 1, 1, -100])
    native.label_smoothing = 0.1  # as a run trains, and transformers does not
    wrapped = SkiplessForImageClassification.from_native(native, labels=LABELS).train()
    if checkpointing:
        wrapped.gradient_checkpointing_enable()
    found = wrapped(pixel_values=values, labels=labels)
    found.loss.backward()
    gradients = [parameter.grad.clone() for parameter in native.parameters()]
    native.zero_grad()
    native.recompute = None
    expected = cross_entropy(native(pixels)[:4], labels[:4])
    expected.backward()
    torch.testing.assert_close(found.loss, expected)
    for name, gradient in zip(dict(native.named_parameters()), gradients, strict=True):
        torch.testing.assert_close(gradient, native.get_parameter(name).grad, msg=name)


@torch.no_grad()
def test_hidden_states_and_attentions(native, pixels, values):
    wrapped = SkiplessForImageClassification.from_native(native)
    found = wrapped(values, output_hidden_states=True, output_attentions=True)
    assert [len(found.hidden_states), len(found.attentions)] == [5, 4]
    assert found.attentions[0].shape == (5, 2, 16, 16)
    torch.testing.assert_close(found.attentions[0].sum(-1), torch.ones(5, 2, 16))
    torch.testing.assert_close(found.hidden_states[0], native.embed(pixels))
    torch.testing.assert_close(found.logits, native(pixels), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_bare_network_and_its_pipeline(saved, native, pixels, values):
    image = pytest.importorskip("PIL.Image")
    bare = AutoModel.from_pretrained(saved)
    assert torch.equal(bare(pixel_values=values).last_hidden_state, native.hidden(pixels))
    with pytest.raises(ValueError, match="by name"):
        bare(values)
    picture = image.fromarray(pixels[0].permute(1, 2, 0).numpy())
    states = torch.tensor(pipeline("image-feature-extraction", model=str(saved))(picture))
    torch.testing.assert_close(states, native.hidden(pixels[:1]), rtol=0, atol=1e-5)


@torch.no_grad()
def test_half_precision_takes_the_same_values(saved, values, native, pixels):
    loaded = AutoModelForImageClassification.from_pretrained(saved, dtype=torch.bfloat16)
    assert loaded(values).logits.dtype == torch.bfloat16
    torch.testing.assert_close(loaded(values).logits.float(), native(pixels), rtol=0, atol=0.1)


def test_new_classes_draw_a_new_head_and_keep_the_rest(saved, native, values):
    with pytest.raises(ValueError, match=r"number of classes add ignore_mismatched_sizes=True to num_labels"):
        AutoModelForImageClassification.from_pretrained(saved, num_labels=7)
    other = AutoModelForImageClassification.from_pretrained(saved, num_labels=7, ignore_mismatched_sizes=True)
    assert (other(values).logits.shape, other.config.classes, len(other.config.id2label)) == ((5, 7), 7, 7)
    for name, value in native.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(other.model.state_dict()[name], value), name
    assert 0.05 < other.model.head.weight.std() < 0.5


def test_trainer_fine_tunes_it_alike_in_one_batch_or_in_parts(saved, tmp_path):
    """Real pictures, through the processor; with the batch accumulated the steps are the same, and the loss falls."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    image = pytest.importorskip("PIL.Image")
    from transformers import Trainer, TrainingArguments

    striped(tmp_path / "pictures", train=8, test=1)
    files = sorted((tmp_path / "pictures" / "train").rglob("*.png"))
    processor = AutoImageProcessor.from_pretrained(saved)
    rows = [
        {
            "pixel_values": processor(image.open(f), return_tensors="pt").pixel_values[0],
            "labels": LABELS.index(f.parent.name),
        }
        for f in files
    ]
    ends = {}
    for parts in (1, 4):
        model = AutoModelForImageClassification.from_pretrained(saved)
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=12, per_device_train_batch_size=16 // parts, learning_rate=3e-3,
            gradient_accumulation_steps=parts, report_to=[], logging_steps=1, save_strategy="no", use_cpu=True,
            gradient_checkpointing=parts == 4, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < 0.8 * losses[0]
        assert trainer.evaluate(rows)["eval_loss"] < losses[0]
        ends[parts] = losses
    assert ends[4] == pytest.approx(ends[1], rel=1e-3)


GOOD = torch.zeros(2, 3, 16, 16)
BAD_PIXELS = {
    "missing": (None, r"pixel_values are missing; they must be floats \(batch, 3, 16, 16\)"),
    "a list": ([[0.0]], 'of type list.*return_tensors="pt"'),
    "an array": (np.zeros((2, 3, 16, 16)), "of type ndarray"),
    "one image": (GOOD[0], r"shaped \(3, 16, 16\).*pixel_values\[None\] for one image"),
    "channels last": (GOOD.permute(0, 2, 3, 1), r"permute\(0, 3, 1, 2\)"),
    "one channel": (GOOD[:, :1], "reads 3 channels, not 1"),
    "four channels": (torch.zeros(2, 4, 16, 16), "reads 3 channels, not 4"),
    "larger": (torch.zeros(2, 3, 32, 32), r"shaped \(2, 3, 32, 32\); they must be floats \(batch, 3, 16, 16\), as"),
    "no square": (torch.zeros(2, 3, 16, 12), r"shaped \(2, 3, 16, 12\)"),
    "none": (GOOD[:0], r"shaped \(0, 3, 16, 16\)"),
    "bytes": (GOOD.to(torch.uint8), "are torch.uint8: raw pixels"),
    "integers": (GOOD.long(), "are torch.int64: raw pixels"),
    "booleans": (GOOD.bool(), "are torch.bool"),
    "complex": (GOOD.cfloat(), "are torch.complex64"),
    "not normalised": (
        GOOD + 200.0,
        "run from 200 to 200, and an image normalised for this network from .* raw pixels",
    ),
    "NaN": (GOOD.index_fill(0, torch.tensor([1]), torch.nan), "hold NaN or infinity"),
    "infinity": (GOOD.index_fill(0, torch.tensor([1]), torch.inf), "hold NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD_PIXELS)
def test_what_is_no_batch_of_its_images_is_refused(native, case):
    given, words = BAD_PIXELS[case]
    with pytest.raises(ValueError, match=words):
        SkiplessForImageClassification.from_native(native)(pixel_values=given)


@torch.no_grad()
def test_noise_is_taken(native):
    """An inspection begins with it, and it reaches further than any picture."""
    wrapped = SkiplessForImageClassification.from_native(native)
    assert wrapped(2 * torch.randn(2, 3, 16, 16)).logits.isfinite().all()


def test_labels_positions_and_tokens_that_mean_nothing_are_refused(native, tokens):
    wrapped = SkiplessForImageClassification.from_native(native)
    for labels in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"labels run from .* classes 0 … 2; .*num_labels"):
            wrapped(GOOD, labels=torch.tensor(labels))
    with pytest.raises(ValueError, match="resize the images"):
        wrapped(GOOD, interpolate_pos_encoding=True)
    with pytest.raises(ValueError, match="no table of tokens"):
        wrapped.resize_token_embeddings(9)
    for names in (("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d")):
        with pytest.raises(ValueError, match="names for 3 classes"):
            SkiplessForImageClassification.from_native(native, labels=names)
    with pytest.raises(ValueError, match="given to a network of text"):
        AutoModel.from_config(SkiplessConfig.from_native(build().config))(tokens, pixel_values=GOOD)


def test_a_network_is_opened_as_what_it_is(saved, native, tmp_path):
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match="not for a network of images: AutoModelForImageClassification opens"):
            auto.from_pretrained(saved)
    with pytest.raises(ValueError, match="not for a network of images"):
        SkiplessForSequenceClassification.from_native(native)
    SkiplessForCausalLM.from_native(build()).save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="not for a network of text: AutoModelForCausalLM opens"):
        AutoModelForImageClassification.from_pretrained(tmp_path / "text")
    patches = network(head="token")
    with pytest.raises(ValueError, match="head is 'token'"):
        SkiplessForImageClassification.from_native(patches)


HOSTILE = {
    "side": ({"images.side": -1}, r"images\.side is -1; it must lie in 1"),
    "side beyond": ({"images.side": 10**9}, "must lie in 1 … 65,536"),
    "side of text": ({"images.side": "16"}, "must be a whole number"),
    "patch": ({"images.patch": -4}, r"images\.patch is -4"),
    "no patch": ({"images.patch": 0}, r"images\.patch is 0"),
    "patch beside": ({"images.patch": 5}, "does not divide images.side=16; the nearest is 4"),
    "other length": ({"images.side": 32, "image_size": 32}, "use length=64"),
    "channels": ({"images.channels": 1}, "for each of 1 channels"),
    "mean": ({"images.mean": [0.0, float("nan"), 0.0]}, "must be a finite number"),
    "std": ({"images.std": [1.0, 0.0, 1.0]}, "must be above 0"),
    "extra": ({"images.size": 16}, "Images has no field 'size'"),
    "no images": ({"images": "x"}, r"must be Images\("),
    "two sizes": ({"image_size": 32}, "image_size is 32, and images.side 16"),
    "two patches": ({"patch_size": -4}, "patch_size is -4, and images.patch 4"),
    "text": ({"images": None}, "image_size is 16, but this is a network of text"),
    "classes": ({"classes": -3}, "classes is -3"),
    "many classes": ({"classes": 10**12, "id2label": None}, "must be at most"),
    "no names": ({"id2label": "abc"}, "id2label is 'abc'; it must have a name for each class"),
    "gaps": ({"id2label": {"0": "a", "1": "b", "7": "c"}}, "a name for each class 0, 1, …, none left out"),
    "words": ({"id2label": {"x": "a", "1": "b", "2": "c"}}, "a name for each class"),
    "too few names": ({"id2label": {"0": "a"}}, "names 1 classes in id2label, and classes is 3"),
    "none at all": ({"id2label": {}}, "names 0 classes in id2label, and classes is 3"),
    "names for minutes": (
        {"id2label": None, "num_labels": 10**8},
        "num_labels is 100000000; it must lie in 0 … 1,048,576",
    ),
    "bright": ({"images.mean": [1e308, 0.0, 0.0]}, "pixels are numbers of 0 … 255"),
    "flat": ({"images.std": [1e-320, 1.0, 1.0]}, "pixels are numbers of 0 … 255"),
    "lm": ({"head": "lm"}, "use head='token' or 'pooled'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_config_that_cannot_be_is_refused_in_words(saved, case):
    changes, words = HOSTILE[case]
    config = json.loads((saved / "config.json").read_text())
    for name, value in changes.items():
        inner, _, field = name.rpartition(".")
        (config[inner] if inner else config)[field] = value
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        AutoModelForImageClassification.from_pretrained(saved)
    with pytest.raises(ValueError, match=r"saved"):
        skipless.load(saved)


@pytest.mark.parametrize(
    "gone", ["embedding.places", "embedding.weight", "head.weight", "blocks.1.mlp.inner.up.weight"]
)
def test_missing_weights_are_refused_and_not_drawn_at_random(saved, gone):
    rewrite(saved, lambda weights: {name: w for name, w in weights.items() if name != f"model.{gone}"})
    with pytest.raises(ValueError, match=f"model.{gone} missing"):
        AutoModelForImageClassification.from_pretrained(saved)


def test_another_image_size_is_refused_where_it_is_asked_for(saved):
    with pytest.raises(ValueError, match=r"image_size is 32, and images\.side 16: .*Resize them"):
        AutoModelForImageClassification.from_pretrained(saved, image_size=32)
    config = AutoConfig.from_pretrained(saved)
    config.image_size = 16  # as it is
    with pytest.raises(ValueError, match="num_channels is 1"):
        config.num_channels = 1


def test_what_is_folded_is_not_saved_under_the_unfolded_config(tmp_path):
    folded = SkiplessForImageClassification.from_native(fold(network("mirrored", value_output="trained").double()))
    with pytest.raises(ValueError, match="folded"):
        folded.save_pretrained(tmp_path)


@torch.no_grad()
def test_a_cold_network_compiles_as_one_graph(saved, native, pixels, values):
    loaded = AutoModelForImageClassification.from_pretrained(saved)
    compiled = torch.compile(loaded, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(values).logits, native(pixels), rtol=0, atol=1e-5)


@torch.no_grad()
def test_blocks_may_be_offloaded(saved, native, pixels, values, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    places = {"model.embedding": "disk", "model.head": "cpu", "model.norm": "cpu"}
    places |= {f"model.blocks.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    folder = str(tmp_path / "disk")
    loaded = AutoModelForImageClassification.from_pretrained(saved, device_map=places, offload_folder=folder)
    assert torch.equal(loaded(values).logits, native(pixels))


def test_inspection_reads_it(native, pixels, values):
    wrapped = SkiplessForImageClassification.from_native(native)
    inside, outside = skipless.inspect(native, pixels), skipless.inspect(wrapped, values)
    assert outside.verdict.text == inside.verdict.text
    assert [b.cosine_mean for b in outside.blocks] == pytest.approx([b.cosine_mean for b in inside.blocks], abs=1e-5)


REMOTE = """
import sys
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
folder = sys.argv[1]
assert AutoImageProcessor.from_pretrained(folder).size.height == 16
assert "skipless" not in sys.modules
loaded = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
values = load_file(folder + "/in.safetensors")["values"]
save_file({"logits": loaded(values).logits.detach()}, folder + "/out.safetensors")
from skipless.hf import SkiplessForImageClassification
assert type(loaded) is SkiplessForImageClassification, type(loaded)
loaded.save_pretrained(folder + "/again")
"""
REGISTERED = """
import sys, {order}
assert 'torch' not in sys.modules
transformers.AutoModelForImageClassification.from_pretrained(sys.argv[1])
"""


def test_a_saved_network_brings_its_code_with_it(saved, native, pixels, values):
    save_file({"values": values}, saved / "in.safetensors")
    fresh(REMOTE, saved)
    logits = load_file(saved / "out.safetensors")["logits"]
    torch.testing.assert_close(logits, native(pixels), rtol=0, atol=1e-5)  # threads may differ
    files = {file.name for file in (saved / "again").iterdir()}
    assert files == {"config.json", "model.safetensors", "modeling_skipless.py"}


@pytest.mark.parametrize("order", ["skipless, transformers", "transformers, skipless"])
def test_importing_both_registers_the_head(saved, order):
    fresh(REGISTERED.format(order=order), saved)
    shutil.rmtree(saved)


def test_text_classifiers_divide_an_accumulated_loss_too(tokens):
    """transformers' Trainer hands the number of labels of a whole batch to models that take keywords."""
    wrapped = SkiplessForSequenceClassification.from_native(build(head="pooled", classes=3))
    labels = torch.tensor([0, 1, 2])
    alone = wrapped(tokens, labels=labels).loss
    torch.testing.assert_close(wrapped(tokens, labels=labels, num_items_in_batch=6).loss, alone / 2)
    assert isinstance(wrapped.model.head, nn.Linear)
