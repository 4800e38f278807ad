"""Rounding to few bits: by the definition, against torchao and bitsandbytes where they are installed, and undone."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

from skipless.model.presets import preset
from skipless.model.quantise import QUANTISATIONS, fp8, integers, nf4, nf4_levels, quantisation, quantised
from skipless.model.transformer import Transformer

# The 16 levels that bitsandbytes ships, to eight digits.
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
TOKENS = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(0))


def matrix(rows: int = 96, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def network(name: str = "e-spa") -> Transformer:
    torch.manual_seed(0)
    return Transformer(preset(f"wikitext103/{name}", width=64, heads=2, depth=4, vocab_size=300, length=32)).eval()


def needs(module: str):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_integers_are_the_nearest_of_evenly_spaced_levels(bits, per_tensor):
    x = matrix()
    scale = (x.abs().max() if per_tensor else x.abs().amax(1, keepdim=True)) / (2 ** (bits - 1) - 0.5)
    levels = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    nearest = ((x / scale)[..., None] - levels).abs().amin(-1)
    found = integers(x, bits, per_tensor) / scale
    assert torch.allclose(found, found.round(), atol=1e-4)
    assert len(found.round().unique()) <= 2**bits
    assert torch.allclose(((x / scale) - found).abs(), nearest, atol=1e-4)


def test_what_is_zero_stays_zero():
    zero = torch.zeros(3, 64)
    for rounded in (integers(zero, 8), integers(zero, 4, True), fp8(zero), nf4(zero)):
        assert torch.equal(rounded, zero)


def test_fp8_has_three_bits_of_mantissa():
    x = matrix()
    error = (fp8(x) - x).abs() / x.abs()
    normal = x.abs() > x.abs().amax(1, keepdim=True) * 2**-6 / 448  # the smallest normal number
    assert error[normal].max() <= 2**-4 + 1e-6
    assert torch.equal(fp8(x).abs().amax(1), x.abs().amax(1))


def test_the_levels_of_nf4_are_quantiles():
    assert np.allclose(nf4_levels(), NF4, atol=2e-7)


@pytest.mark.parametrize("shape", [(96, 128), (3, 70)])
def test_nf4_takes_the_nearest_level_of_its_block(shape):
    x = matrix(*shape)
    found, flat = nf4(x).flatten(), x.flatten()
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        levels = torch.tensor(nf4_levels()) * block.abs().max()
        nearest = levels[(block[:, None] - levels).abs().argmin(1)]
        assert torch.allclose(found[start : start + 64], nearest, atol=1e-6)


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_a_network_is_rounded_while_it_lasts_and_then_as_it_was(name):
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        exact = model.hidden(TOKENS)
        with quantised(model.blocks, name):
            rounded = model.hidden(TOKENS)
        again = model.hidden(TOKENS)
    share = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < share < 1.0
    assert torch.equal(again, exact)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_more_bits_lose_less():
    model, shares = network(), {}
    with torch.no_grad():
        exact = model.hidden(TOKENS)
        for name in ("int8-weights", "int8", "int4-weights", "int4-weights-tensor", "nf4", "fp8"):
            with quantised(model.blocks, name):
                shares[name] = float((model.hidden(TOKENS) - exact).norm() / exact.norm())
    assert shares["int8-weights"] < shares["int8"] < shares["fp8"] < shares["nf4"] < shares["int4-weights-tensor"]
    assert shares["nf4"] < shares["int4-weights"]


def test_an_error_restores_the_network():
    model = network()
    before = model.state_dict()["blocks.0.mlp.inner.up.weight"].clone()
    with pytest.raises(RuntimeError, match="stop"), quantised(model.blocks, "int8"):
        raise RuntimeError("stop")
    assert torch.equal(model.state_dict()["blocks.0.mlp.inner.up.weight"], before)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="no quantisation 'int9'; did you mean 'int8'"):
        quantisation("int9")
    with pytest.raises(ValueError, match=r"no nn.Linear to quantise"), quantised([nn.ReLU()], "int8"):
        pass


@needs("torchao")
@pytest.mark.parametrize("name", ["int8-weights", "int4-weights", "fp8"])
def test_weights_are_torchaos(name):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis

    configs = {
        "int8-weights": Int8WeightOnlyConfig(),
        "int4-weights": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)),
        "fp8": Float8WeightOnlyConfig(),
    }
    layer = nn.Linear(128, 96, bias=False)
    layer.weight.data = matrix()
    ours = QUANTISATIONS[name].weights(matrix(), False)
    quantize_(layer, configs[name])
    theirs = layer.weight.dequantize()
    differ = (theirs - ours).abs() > 1e-5
    # a row's largest number lies half way between two levels, and either is nearest
    assert torch.equal(matrix()[differ].abs(), matrix().abs().amax(1, keepdim=True).expand(96, 128)[differ])


@needs("torchao")
def test_products_in_int8_are_torchaos():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    x, layer = matrix(40, 128), nn.Linear(128, 96, bias=False)
    layer.weight.data = matrix(96, 128).flip(0)
    with torch.no_grad(), quantised([layer], "int8"):
        ours = layer(x)
    exact = x @ layer.weight.detach().T
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    with torch.no_grad():
        theirs = layer(x)
    assert (theirs - ours).abs().max() < (ours - exact).abs().max() / 2
    assert (theirs - ours).norm() < (ours - exact).norm() / 4


@needs("bitsandbytes")
def test_nf4_is_bitsandbytes():
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(matrix(), blocksize=64, quant_type="nf4")
    assert torch.allclose(functional.dequantize_4bit(codes, state), nf4(matrix()), atol=1e-5)
