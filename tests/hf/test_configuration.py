import json

import pytest
from transformers import AutoConfig

from skipless.hf.configuration import SkiplessConfig
from skipless.model.config import ModelConfig
from skipless.model.presets import preset
from skipless.theory.schemes import UniformSPA


@pytest.mark.parametrize("name", ["wikitext103/e-spa", "wikitext103/pre-ln", "c4/u-spa-skip", "c4/v-skipinit-tat"])
def test_a_native_config_survives_the_wrapper_and_the_disk(name, tmp_path):
    native = preset(name)
    SkiplessConfig.from_native(native, eos_token_id=2).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, SkiplessConfig)
    assert (loaded.native(), loaded.eos_token_id) == (native, 2)


def test_the_file_is_plain_json_with_every_native_field(tmp_path):
    SkiplessConfig(width=64, heads=4).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    expected = json.loads(ModelConfig(width=64, heads=4).to_json())
    assert {name: saved[name] for name in expected} == expected
    assert saved["model_type"] == "skipless"


def test_the_default_is_the_native_default():
    assert SkiplessConfig().native() == ModelConfig()


def test_fields_may_be_native_objects_or_transformers_names():
    config = SkiplessConfig(hidden_size=64, num_hidden_layers=8, num_attention_heads=4, scheme=UniformSPA(0.5))
    native = config.native()
    assert (native.width, native.depth, native.heads, native.scheme) == (64, 8, 4, UniformSPA(0.5))
    assert (config.hidden_size, config.num_key_value_heads, config.max_position_embeddings) == (64, 4, 512)


def test_changed_attributes_are_checked_by_the_native_config(tmp_path):
    SkiplessConfig(width=64, heads=4).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, rope_base=5e5).native().rope_base == 5e5
    with pytest.raises(ValueError, match="not a multiple of heads"):
        AutoConfig.from_pretrained(tmp_path, width=65).native()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("kv_head", "kv_heads"), ("num_layer", "depth"), ("n_embd", "width"), ("hidden_sizes", "hidden_size")],
)
def test_a_slip_in_a_name_is_an_error(name, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        SkiplessConfig(**{name: 2})


def test_the_file_has_sizes_by_the_names_that_tools_read(tmp_path):
    SkiplessConfig(width=64, heads=4, kv_heads=2, depth=8).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 256, "max_position_embeddings": 512}
    assert {name: saved[name] for name in sizes} == sizes
    assert AutoConfig.from_pretrained(tmp_path, hidden_size=128).width == 128
    with pytest.raises(ValueError, match="hidden_size is 32 and width 64, but they are one field"):
        SkiplessConfig(width=64, hidden_size=32)


def test_classes_are_labels():
    config = SkiplessConfig(width=64, heads=4, head="pooled", classes=5)
    assert config.num_labels == 5
    assert SkiplessConfig(width=64, heads=4, id2label={0: "a", 1: "b"}).num_labels == 2


def test_labels_and_classes_are_one_number(tmp_path):
    """Of a file that says two, neither is taken; a wish for another number is one for as many classes."""
    file = tmp_path / "config.json"
    SkiplessConfig(width=64, heads=4, head="pooled", classes=3, id2label={0: "a", 1: "b", 2: "c"}).save_pretrained(
        tmp_path
    )
    two = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    for wish in ({"num_labels": 2}, two):
        wished = AutoConfig.from_pretrained(tmp_path, **wish)
        assert (wished.num_labels, wished.classes, wished.native().classes) == (2, 2, 2)
    saved = json.loads(file.read_text())
    for wrong in ({"classes": 4}, two):
        file.write_text(json.dumps({**saved, **wrong}))
        with pytest.raises(ValueError, match=r"names (3|2) classes in id2label, and classes is (4|3): give each class"):
            AutoConfig.from_pretrained(tmp_path)
