"""Networks of images: their rows, their positions, and the start that theory gives them."""

import numpy as np
import pytest
import torch
from tests.model.exact import check_kernels

from skipless.model import kernel_maps
from skipless.model.config import Images, ModelConfig, attention_shapes
from skipless.model.presets import names, preset
from skipless.model.transformer import Transformer
from skipless.nn.patches import PatchEmbedding, cut
from skipless.ops.attention import Rotation
from skipless.theory import kernels
from skipless.theory.schemes import ExponentialSPA

FAMILY = [name for name in names() if name.startswith("vit/")]
SMALL = Images(side=16)


def build(name: str, **fields) -> Transformer:
    """In float64 from the start: matrices that are rounded to float32 are orthogonal to 1e-7 only."""
    torch.manual_seed(0)
    model = Transformer(preset(name, **{"width": 48, "heads": 2, "images": SMALL, **fields}), impl="reference").double()
    model.reset_parameters()
    return model


def pictures(batch: int = 1, side: int = 16) -> torch.Tensor:
    """Smooth ones, whose patches are alike, as those of real images are."""
    coarse = torch.rand(batch, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return (255 * torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")).to(torch.uint8)


@pytest.mark.parametrize("depth", [1, 12, 24])
@pytest.mark.parametrize("name", ["vit/mirrored", "vit/mirrored-u-spa"])
def test_one_network_has_the_kernels_of_theory_at_every_block(name, depth):
    """Given its own Σ_0, all locations seeing each other, gains and rotations in place."""
    check_kernels(build(name, depth=depth), pictures())


@pytest.mark.parametrize("name", FAMILY)
def test_the_family(name):
    config = preset(name)
    assert (config.depth, config.width, config.length, config.causal) == (12, 256, 64, False)
    assert config.vanilla == (name != "vit/pre-ln")
    assert kernel_maps.certificate(config).verdict.kind == "preserved"
    assert kernel_maps.certificate(config.replace(depth=24)).verdict.kind == "preserved"
    assert ModelConfig.from_json(config.to_json()) == config
    assert preset(name, images=SMALL).length == 16
    assert config.replace(images=Images(patch=8)).length == 16


@pytest.mark.parametrize("name", ["vit/mirrored", "vit/e-spa"])
@pytest.mark.parametrize(
    "images", [Images(side=8), Images(side=24), Images(patch=16), Images(patch=32), Images(side=64)]
)
def test_e_spa_follows_the_rows_and_columns_of_any_images(name, images):
    """Without a size being stated: a preset's, one that is changed later, and one from JSON."""
    for config in (preset(name, images=images), ModelConfig.from_json(preset(name).replace(images=images).to_json())):
        shape, side = attention_shapes(config)[0], images.grid
        matrix = shape.dense(config.length)
        target = kernels.exponential_grid(shape.step.gamma_out, side, side)
        root = kernels.symmetric_root(target)
        average = kernels.uniform(config.scheme.repeat_rate, config.length)
        np.testing.assert_allclose(matrix @ average @ matrix.T, kernels.cosine(root @ average @ root), atol=1e-12)
        if side > 1:
            assert matrix[0, 1] == pytest.approx(matrix[0, side], rel=1e-12)
            assert kernel_maps.certificate(config).verdict.kind == "preserved"


def test_reading_order_is_there_for_those_who_want_it():
    config = preset("vit/mirrored", scheme=ExponentialSPA(0.2, 0.148))
    assert "grid" not in config.to_dict()["scheme"]
    row = attention_shapes(config)[0].dense(64)[27]
    assert row[28] > 10 * row[27 + 8]


@torch.no_grad()
def test_rows_have_unit_norm_and_half_the_cosine_of_their_patches():
    """For pixels of mean 0 and variance 1, of which all patches of an image are equal: on average over many widths."""
    torch.manual_seed(0)
    embedding = PatchEmbedding(4, 4, 20_000, (100.0,) * 3, (50.0,) * 3)
    patch = torch.randn(1, 3, 4, 4)
    patch = 100.0 + 50.0 * patch / patch.square().mean().sqrt()
    kernel = (lambda rows: rows @ rows.T)(embedding(patch.repeat(1, 1, 4, 4))[0])
    assert kernel.diagonal().tolist() == pytest.approx([1.0] * 16, abs=0.03)
    assert (kernel.sum() - kernel.trace()).item() / 240 == pytest.approx(0.5, abs=0.03)


def test_patches_are_in_reading_order():
    image = torch.arange(2 * 4 * 4).view(1, 2, 4, 4)
    assert cut(image, 2)[0].tolist() == [
        [0, 1, 4, 5, 16, 17, 20, 21],
        [2, 3, 6, 7, 18, 19, 22, 23],
        [8, 9, 12, 13, 24, 25, 28, 29],
        [10, 11, 14, 15, 26, 27, 30, 31],
    ]


def test_rotations_depend_on_rows_and_columns_apart():
    """q·k of two locations is that of any two as far apart in both directions, and of no other."""
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(
        -1, 1, 1, 25, 16
    )
    turned = Rotation.on_grid(5, 16, 100.0)
    scores = (turned.rotate(q) @ turned.rotate(k).mT)[0, 0].view(5, 5, 5, 5)
    assert scores[0, 0, 1, 2].item() == pytest.approx(scores[3, 2, 4, 4].item(), abs=1e-6)
    assert scores[2, 4, 0, 1].item() == pytest.approx(scores[4, 3, 2, 0].item(), abs=1e-6)
    assert scores[0, 0, 1, 2].item() != pytest.approx(scores[0, 0, 2, 1].item(), abs=1e-3)
    with pytest.raises(ValueError, match="head_width is 6; two axes need a multiple of 4: use 8"):
        Rotation.on_grid(5, 6, 100.0)


@pytest.mark.parametrize("name", ["vit/mirrored", "vit/pre-ln"])
def test_a_network_sees_where_a_patch_is(name):
    """Once W_Q is not zero, two places of one patch differ by the rotation alone."""
    model = build(name, depth=1)
    with torch.no_grad():
        model.embedding.places.zero_()
        model.blocks[0].layers()[0].query.weight.normal_()
        images = pictures()
        moved = images.roll((4, 8), dims=(2, 3))
        assert not torch.allclose(model(images), model(moved))


def test_smoothed_labels_are_for_training_alone():
    model, images, labels = build("vit/mirrored", depth=1), pictures(4), torch.tensor([0, 9, 3, 3])
    plain = model(images, labels).item()
    model.label_smoothing = 0.1
    wanted = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1).item()
    assert model(images, labels).item() == pytest.approx(wanted, rel=1e-12)
    assert wanted != pytest.approx(plain)
    assert model.eval()(images, labels).item() == pytest.approx(plain, rel=1e-12)


def test_bytes_and_floats_are_the_same_pixels():
    model = build("vit/mirrored", depth=1)
    assert torch.equal(model(pictures()), model(pictures().double()))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"length": 12}, r"length=12, and images of 32 × 32 in patches of 4 have 64 of them; use length=64"),
        ({"head": "lm", "classes": 0, "causal": True}, "head='lm' predicts tokens, and images have none"),
        ({"width": 24, "heads": 4}, "head width 6 is not a multiple of 4"),
        ({"images": "cifar"}, "images is 'cifar'; it must be Images"),
        ({"scheme": ExponentialSPA(0.5, grid=(4, 8))}, "is for 32 locations, and length=64; use length=32"),
    ],
)
def test_networks_that_cannot_be(fields, words):
    config = preset("vit/mirrored")
    with pytest.raises(ValueError, match=words):
        ModelConfig(
            **{**{name: getattr(config, name) for name in config.__dataclass_fields__}, "hidden": None, **fields}
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"patch": 5}, "images.patch=5 does not divide images.side=32; the nearest is 4"),
        ({"side": 0}, "images.side is 0"),
        ({"channels": 1}, "images.mean is .*; it must be a finite number for each of 1 channels"),
        ({"std": (1.0, 0.0, 1.0)}, "every channel's must be above 0"),
        ({"side": 2.5}, "images.side is 2.5; it must be a whole number"),
    ],
)
def test_images_that_cannot_be(fields, words):
    with pytest.raises(ValueError, match=words):
        Images(**fields)


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8), torch.zeros(3, 16, 16), torch.zeros(2, 3, 16, 16) > 0])
def test_a_batch_of_other_images_is_refused(images):
    with pytest.raises(ValueError, match=r"they must be \(batch, 3, 16, 16\) of pixels from 0 to 255"):
        build("vit/mirrored", depth=1)(images)


def test_the_order_of_axes_and_a_missing_batch_are_named():
    model = build("vit/mirrored", depth=1)
    for images, words in (
        (pictures().permute(0, 2, 3, 1), r"permute\(0, 3, 1, 2\)"),
        (pictures()[0], r"images\[None\]"),
    ):
        with pytest.raises(ValueError, match=words):
            model(images)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x / 255, r"images run from 0\.\d+ to 0\.\d+; they must be pixels from 0 to 255.*images \* 255"),
        (lambda x: x / 127.5 - 1, r"images run from -0\.\d+ to 0\.\d+.*as they are before that"),
        (lambda x: (x - x.mean()) / x.std(), r"images run from -2\.\d+ to 2\.\d+.*as they are before that"),
    ],
)
def test_pixels_that_were_scaled_already_are_refused(change, words):
    """ToTensor's, and normalised ones: every patch would be the same grey to the network, and nothing would tell."""
    model = build("vit/mirrored", depth=1)
    with pytest.raises(ValueError, match=words):
        model(change(pictures(4).double()))


def test_dark_pictures_are_pictures():
    model = build("vit/mirrored", depth=1)
    for images in (torch.zeros(1, 3, 16, 16), pictures() // 128, pictures().double() - 0.5):
        assert model(images).isfinite().all()


def test_labels_may_be_of_either_kind_of_whole_numbers():
    model, labels = build("vit/mirrored", depth=1).train(), torch.tensor([3])
    for smoothing in (0.0, 0.1):
        model.label_smoothing = smoothing
        assert model(pictures(), labels.int()) == model(pictures(), labels)


def test_images_by_another_name_are_refused():
    with pytest.raises(ValueError, match=r"images is \{'side': 64\}; it must be Images"):
        preset("vit/mirrored", images={"side": 64})
