import json

import numpy as np
import pytest

from skipless.model.config import ModelConfig
from skipless.model.kernel_maps import certificate
from skipless.model.presets import names, preset
from skipless.model.transformer import Transformer
from skipless.theory.activations import ShapedActivation
from skipless.theory.local_maps import c_slope
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, StandardAttention, UniformSPA, ValueSkipInit
from skipless.theory.shaping import dks

CONFIGS = [
    ModelConfig(width=64, depth=8),
    ModelConfig(width=64, depth=16, scheme=UniformSPA(0.6, 0.05, "geometric"), activation="tat-leaky_relu"),
    ModelConfig(width=64, depth=4, scheme=ValueSkipInit(per_head=True), activation="gelu", kv_heads=2),
    preset("c4/skipinit-ln", width=64),
    ModelConfig(width=64, depth=2, causal=False, head="pooled", classes=3, hidden=0, activation="gelu"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_json_round_trip_gives_an_equal_object(config):
    assert ModelConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["scheme"]["kind"] in ("e-spa", "u-spa", "standard", "value-skipinit")


def test_solved_constants_are_stored():
    config = ModelConfig(depth=36)
    assert config.activation == dks("gelu", 36)
    assert json.loads(config.to_json())["activation"]["input_scale"] == pytest.approx(0.298536, abs=5e-7)


def test_parameter_counts_of_the_papers_models():
    assert round(preset("wikitext103/e-spa").matrix_parameters / 1e6, 1) == 485.8
    assert round(preset("c4/pre-ln").matrix_parameters / 1e6, 1) == 435.4


@pytest.mark.parametrize("name", names())
def test_every_preset_is_a_valid_configuration(name):
    config = preset(name)
    assert config.depth in ((12,) if name.startswith("vit/") else (36, 32, 72, 108))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_presets_say_what_the_paper_says():
    espa = preset("wikitext103/e-spa")
    assert espa.vanilla
    assert espa.scheme == ExponentialSPA(0.005, 0.008)
    assert (espa.query_key, espa.init, espa.position) == ("zero-query", "orthogonal", "rope")
    assert espa.scales_embedding
    baseline = preset("wikitext103/pre-ln")
    assert (baseline.norm, baseline.attention_skip, baseline.mlp_skip) == ("pre", Skip(1.0, 1.0), Skip(1.0, 1.0))
    assert (baseline.activation, baseline.scales_embedding) == (ShapedActivation("gelu"), False)
    assert preset("c4/e-spa-skip").attention_skip == Skip.normalised(0.9975)
    assert preset("depth/e-spa-108").width == 512


@pytest.mark.parametrize(
    ("name", "attention", "mlp"),
    [("skip", 0.999, 0.99), ("skip-ln", 0.99, 0.99), ("u-spa-skip", 0.995, 0.995), ("u-spa-skip-ln", 0.98, 0.99),
     ("e-spa-skip", 0.9975, 0.99), ("e-spa-skip-ln", 0.9975, 0.995)],
)  # fmt: skip
def test_normalised_skips_on_c4_are_table_7s(name, attention, mlp):
    config = preset(f"c4/{name}")
    assert (config.attention_skip, config.mlp_skip) == (Skip.normalised(attention), Skip.normalised(mlp))
    assert config.norm == ("pre" if name.endswith("-ln") else "none")


def test_only_standard_networks_that_normalise_a_growing_stream_leave_the_embedding_unscaled():
    unscaled = {name for name in names() if not preset(name).scales_embedding}
    growing = {
        "wikitext103": {"pre-ln", "skip-ln", "stable-ln"},
        "c4": {"pre-ln", "skip-ln", "stable-ln", "skipinit-ln"},
        "vit": {"pre-ln"},
    }
    assert unscaled == {f"{group}/{name}" for group, members in growing.items() for name in members}


def test_an_activation_is_shaped_for_the_skips_around_it():
    assert ModelConfig(mlp_skip=Skip.normalised(0.9)).activation == dks("gelu", 36, skip_weight=0.9)
    usual = ModelConfig(mlp_skip=Skip(1.0, 1.0), norm="pre")
    assert usual.activation == dks("gelu", 36)


def test_replace_follows_sizes_that_were_derived():
    config = ModelConfig(width=64, depth=8, heads=4).replace(width=128, scheme=StandardAttention())
    assert (config.hidden, config.query_key) == (512, "normal")
    assert ModelConfig(width=64, hidden=100, depth=8).replace(width=128).hidden == 100


@pytest.mark.parametrize("name", ["e-spa", "e-spa-tat", "e-spa-gelu", "v-skipinit-ln"])
def test_replace_shapes_the_activation_for_the_new_depth(name):
    """DKS and TAT aim at the whole network's C map: kept for 36 blocks, dks-gelu has a slope of 125 over 108."""
    deeper, anew = preset(f"wikitext103/{name}").replace(depth=108), preset(f"wikitext103/{name}", depth=108)
    assert deeper == anew
    assert deeper.replace(depth=36) == preset(f"wikitext103/{name}")


def test_replace_leaves_an_activation_of_one_s_own_alone():
    own = dks("gelu", 36, xi=3.0)
    assert ModelConfig(activation=own).replace(depth=72).activation == own
    assert ModelConfig().replace(depth=72, activation=own).activation == own


@pytest.mark.parametrize(("depth", "xi"), [(1, 1.48), (2, 2.2), (3, 3.27), (4, 4.86)])
def test_a_shallow_network_takes_the_largest_xi_it_allows_and_says_so(depth, xi, caplog):
    config = ModelConfig(depth=depth)
    assert config.activation == dks("gelu", depth, xi)
    assert network_c_slope(config) == pytest.approx(xi, rel=1e-9)
    assert f"depth={depth} is too shallow for dks-gelu with ξ = 5; ξ is {xi:g}" in caplog.text
    assert config.replace(depth=36) == ModelConfig()
    assert ModelConfig().replace(depth=depth) == config
    caplog.clear()
    assert ModelConfig.from_json(config.to_json()) == config
    assert not caplog.text


def network_c_slope(config: ModelConfig) -> float:
    """C_f'(1) of the whole network."""
    return float(c_slope(config.shaped_activation)) ** config.depth


def test_a_deep_network_has_xi_5_in_silence(caplog):
    assert network_c_slope(ModelConfig(depth=5)) == pytest.approx(5, rel=1e-9)
    assert not caplog.text


def test_a_short_name_is_wikitext103s_and_the_log_says_so(caplog):
    assert preset("e-spa", width=256) == preset("wikitext103/e-spa", width=256)
    assert caplog.messages == ["e-spa is the preset wikitext103/e-spa (not c4/e-spa, mirrored/e-spa, vit/e-spa)"]


def test_mirrored_mlps_take_plain_gelu_unless_told_otherwise():
    """At any depth: there is nothing to solve."""
    mirrored = preset("wikitext103/e-spa", mlp_init="mirrored")
    assert mirrored.activation == ShapedActivation("gelu")
    assert mirrored == preset("wikitext103/e-spa").replace(mlp_init="mirrored")
    assert mirrored.replace(depth=1).activation == ShapedActivation("gelu")
    assert mirrored.replace(mlp_init=None).activation == ShapedActivation("gelu")
    assert ModelConfig(depth=1, mlp_init="mirrored").activation == ShapedActivation("gelu")
    silu = ModelConfig(mlp_init="mirrored", activation="silu")
    assert silu.activation == ShapedActivation("silu")
    assert ModelConfig.from_json(silu.to_json()) == silu
    assert ModelConfig(mlp_init="mirrored", hidden=0).activation == ShapedActivation("identity")


@pytest.mark.parametrize("activation", ["dks-gelu", "tat-gelu", "tanh", "sigmoid", dks("gelu", 36)])
def test_mirrored_mlps_refuse_an_activation_whose_odd_part_is_curved(activation):
    with pytest.raises(ValueError, match=r"mlp_init='mirrored': φ\(x\) − φ\(−x\) must be a multiple of x.*use 'gelu'"):
        ModelConfig(mlp_init="mirrored", activation=activation)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ModelConfig(mlp_init="mirror"), "mlp_init is 'mirror'; it must be one of None, 'mirrored'"),
        (lambda: ModelConfig(mlp_init="mirrored", hidden=4095), "hidden=4095 is odd.*use hidden=4096"),
        (lambda: ModelConfig(mlp_init="mirrored", hidden=1024), "512 mirrored pairs, fewer than the 1024.*hidden=2048"),
        (lambda: ModelConfig(activation=3), "activation is 3; it must be a name"),
        (lambda: preset("wikitext103/e-spa", hidden=0).replace(hidden=64), "hidden becomes 64.*name one too"),
        (lambda: ModelConfig(scheme="e-spa"), r"scheme is 'e-spa'; it must be one of .*ExponentialSPA\(\)"),
        (lambda: ModelConfig(attention_skip=0.98), r"attention_skip is 0.98; it must be a Skip"),
        (lambda: ModelConfig(hidden=-3), "hidden is -3"),
        (lambda: Skip.normalised(1.01), r"weight is 1.01; it must lie in \[-1, 1\]"),
        (lambda: Skip(1.0, float("nan")), "residual is nan"),
        (lambda: ModelConfig(width=100, heads=8), "width=100 is not a multiple of heads=8; the nearest is 96"),
        (lambda: ModelConfig(depth=0), "depth is 0"),
        (lambda: ModelConfig(kv_heads=3), "kv_heads=3 does not divide heads=8; the nearest is 2"),
        (lambda: ModelConfig(width=24, heads=8), "head width 3 is odd.*: width=32 or"),
        (lambda: ModelConfig(norm="layer"), "norm is 'layer'; it must be one of 'none', 'pre', 'post'"),
        (lambda: ModelConfig(attention_skip=Skip(1.0, 1.0)), r"SPA needs a normalised skip.*Skip.normalised"),
        (
            lambda: ModelConfig(scheme=StandardAttention(4)),
            r"\(alibi_heads=4\) is for 4 heads, and heads=8; use heads=4",
        ),
        (lambda: ModelConfig(causal=False), "sees the token it would predict"),
        (lambda: ModelConfig(head="pooled", causal=False), "needs classes ≥ 1"),
        (lambda: ModelConfig(activation="dsk-gelu"), "must be 'dks' or 'tat'"),
        (lambda: ModelConfig(activation="glue"), "gelu"),
        (
            lambda: ModelConfig(depth=2, activation="dks-gelu"),
            r"activation='dks-gelu' over 2 blocks: .*Take xi below 2.205",
        ),
        (lambda: ModelConfig.from_dict({"widht": 3}), "no field 'widht'; did you mean 'width'"),
        (lambda: ModelConfig().replace(dpeth=3), "did you mean 'depth'"),
        (lambda: ModelConfig.from_dict({"scheme": {"kind": "spa"}}), "scheme kind is 'spa'"),
        (lambda: ModelConfig.from_dict({"scheme": {"kind": "e-spa", "gama_final": 1}}), "did you mean 'gamma_final'"),
        (
            lambda: ModelConfig.from_dict({"mlp_skip": {"short": 1}}),
            "Skip has no field 'short'; did you mean 'shortcut'",
        ),
        (lambda: ModelConfig.from_json("[]"), "a ModelConfig is read from a mapping of its fields, not from list"),
        (lambda: ModelConfig(depth=36.0), "depth is 36.0; it must be an integer of at least 1"),
        (lambda: ModelConfig(depth=True), "depth is True; it must be an integer"),
        (lambda: ModelConfig(depth=float("inf")), "depth is inf; it must be an integer"),
        (lambda: ModelConfig(length=None), "length is None; it must be an integer"),
        (lambda: ModelConfig(classes=-1), "classes is -1; it must be an integer of at least 0"),
        (lambda: ModelConfig(classes=3), "classes=3 with head='lm'.*head='token' or 'pooled'"),
        (lambda: ModelConfig(rope_base=0), "rope_base is 0; it must be finite and above 0"),
        (lambda: ModelConfig(rope_base=float("nan")), "rope_base is nan"),
        (lambda: ModelConfig(query_key_scale=float("inf")), "query_key_scale is inf"),
        (lambda: ModelConfig(causal="no"), "causal is 'no'; it must be true or false"),
        (lambda: ModelConfig(mlp_bias=1), "mlp_bias is 1; it must be true or false"),
        (lambda: Transformer(3), "config is 3; it must be a ModelConfig, a Transformer or a preset's name"),
        (lambda: Transformer("wikitext103/e-sp"), "no preset 'wikitext103/e-sp'; did you mean 'wikitext103/e-spa'"),
        (lambda: Transformer("e-spa", dpeth=4), "no field 'dpeth'; did you mean 'depth'"),
        (lambda: certificate("x"), "no preset 'x'"),
        (lambda: certificate(42), "config is 42; it must be a ModelConfig"),
        (lambda: preset("wikitext103/e-spa", widht=64), "no field 'widht'; did you mean 'width'"),
        (lambda: preset("skipinit"), "no preset 'skipinit'; did you mean 'c4/skipinit'"),
        (lambda: preset("WikiText103/E-SPA"), r"did you mean 'wikitext103/e-spa'\?$"),
        (lambda: preset(None), "no preset None"),
        (lambda: preset("wikitext103/espa"), "no preset 'wikitext103/espa'; did you mean 'wikitext103/e-spa'"),
    ],
)
def test_mistakes_are_named_with_a_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_sizes_of_numpy_are_plain_integers_in_the_file():
    config = preset("wikitext103/e-spa", depth=np.int64(36), width=np.int32(256))
    assert type(config.depth) is type(config.width) is type(config.hidden) is int
    assert ModelConfig.from_json(config.to_json()) == config
