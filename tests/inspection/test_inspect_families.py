"""The five Hugging Face families, built from random configs: numbers equal hooks written by hand, faults are named."""

import numpy as np
import pytest
import torch
import transformers

from skipless.inspection.inspect import inspect
from skipless.inspection.load import build_family, open_pretrained
from skipless.inspection.stacks import find_blocks
from skipless.theory import kernels

FAMILIES = ("gpt2", "llama", "gpt-neox", "bert", "vit")
PLACES = {"gpt2": "transformer.h", "llama": "model.layers", "gpt-neox": "gpt_neox.layers"}
PLACES |= {"bert": "bert.encoder.layer", "vit": "vit.layers"}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def random_model(family: str, seed: int = 0, depth: int | None = None):
    """A model of random sizes, and a batch for it."""
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    heads = int(rng.choice([2, 4]))
    sizes = {
        "num_hidden_layers": depth or int(rng.integers(3, 8)),
        "num_attention_heads": heads,
        "hidden_size": heads * int(rng.choice([8, 12])),
    }
    torch.manual_seed(seed)
    if family == "vit":
        return build_family(family, **sizes, image_size=16, patch_size=4), torch.randn(2, 3, 16, 16)
    if family == "llama":
        sizes["num_key_value_heads"] = heads // 2
    rows, length = int(rng.integers(1, 4)), int(rng.integers(9, 25))
    return build_family(family, **sizes, vocab_size=97), torch.randint(0, 97, (rows, length))


def part_of(block, family: str, which: int, width: int, heads: int) -> torch.Tensor:
    """The view of W_Q (0), W_K (1) or W_V (2) in a block's weights."""
    name = "qkv"[which]
    word = ("query", "key", "value")[which]
    if family == "gpt2":
        return block.attn.c_attn.weight.data[:, which * width : (which + 1) * width]
    if family == "gpt-neox":
        return block.attention.query_key_value.weight.data.view(heads, 3, width // heads, width)[:, which]
    if family == "bert":
        return getattr(block.attention.self, word).weight.data
    home = block.self_attn if family == "llama" else block.attention
    return getattr(home, f"{name}_proj").weight.data


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_equal_hooks_written_by_hand(family, seed):
    model, batch = random_model(family, seed)
    found = inspect(model, batch)
    assert found.healthy, found.verdict.text
    states, places = [], model.get_submodule(PLACES[family])

    def first(out):
        return (out[0] if isinstance(out, tuple) else out).detach()

    hooks = [
        places[0].register_forward_pre_hook(
            lambda _, args, kw: states.append((args or [*kw.values()])[0]), with_kwargs=True
        )
    ]
    hooks += [block.register_forward_hook(lambda _, args, out: states.append(first(out))) for block in places]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    assert [each.name for each in found.blocks[1:]] == [f"{PLACES[family]}.{i}" for i in range(len(places))]
    for each, state in zip(found.blocks, states, strict=True):
        grams = kernels.of_activations(state.detach().numpy())
        assert each.norm_mean == pytest.approx(np.mean([np.diagonal(g).mean() for g in grams]), rel=1e-5)
        assert each.cosine_mean == pytest.approx(np.mean([kernels.mean_cosine(g) for g in grams]), abs=1e-6)
        np.testing.assert_allclose(found.kernels[each.block], kernels.cosine(grams[0]), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_equals_what_eager_models_return(family):
    model, batch = random_model(family)
    found = inspect(model, batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(batch, output_attentions=True).attentions
    eager = inspect(model, batch)
    for each, same, attention in zip(found.blocks[1:], eager.blocks[1:], weights, strict=True):
        attention = attention[:2].double()
        entropy = -(attention * attention.clamp(min=1e-300).log()).sum(-1)
        several = (attention[0, 0] > 0).sum(-1) > 1
        assert each.attention_entropy == pytest.approx(float(entropy[..., several].mean()), rel=1e-5)
        assert each.attention_first == pytest.approx(float(attention[..., several, 0].mean()), rel=1e-5)
        assert same.attention_entropy == pytest.approx(each.attention_entropy, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ["scale", "uniform", "values"])
def test_a_planted_fault_is_named(family, fault):
    for block in (1, 3, 5):
        model, batch = random_model(family, seed=block, depth=5)
        config = model.config
        at = find_blocks(model)[block - 1][1]
        if fault == "scale":
            at.register_forward_hook(
                lambda _, args, out: (out[0] * 1e-3, *out[1:]) if isinstance(out, tuple) else out * 1e-3
            )
        else:
            which = 0 if fault == "uniform" else 2
            part_of(at, family, which, config.hidden_size, config.num_attention_heads).zero_()
        found = inspect(model, batch)
        assert found.verdict.lost
        assert found.verdict.block == block, found.verdict.text
        words = {"uniform": "is uniform", "values": "attention gives nothing", "scale": "drops"}
        assert words[fault] in found.verdict.text


def test_padding_changes_nothing():
    model, _ = random_model("llama")
    ids = torch.randint(0, 97, (1, 12))
    alone = inspect(model, ids)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.cat([torch.ones(1, 12), torch.zeros(1, 4)], dim=1).long()
    with_padding = inspect(model, {"input_ids": padded, "attention_mask": mask})
    for one, two in zip(alone.blocks, with_padding.blocks, strict=True):
        assert two.cosine_mean == pytest.approx(one.cosine_mean, abs=1e-5)
        assert two.norm_max == pytest.approx(one.norm_max, rel=1e-4)
    with pytest.raises(ValueError, match="fewer than 2 tokens outside the padding"):
        inspect(model, {"input_ids": padded, "attention_mask": (torch.arange(16) < 1).long()[None]})


def test_labels_may_come_in_the_batch():
    model, ids = random_model("gpt2")
    inside = inspect(model, {"input_ids": ids, "labels": ids})
    beside = inspect(model, ids, labels=ids)
    assert inside.blocks[1].gradient_mean == beside.blocks[1].gradient_mean
    loss = inspect(model, ids, loss=lambda out: out.logits.square().mean())
    assert loss.blocks[1].gradient_mean != beside.blocks[1].gradient_mean


@pytest.mark.parametrize("kind", ["t5", "m2m_100"])
def test_labels_of_another_length_are_what_a_decoder_reads(kind):
    """T5's config names no start, and M2M100 shifts labels inside its forward."""
    sizes = {"d_model": 16, "vocab_size": 64, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32}
    sizes |= {
        f"{side}_{word}": n for side in ("encoder", "decoder") for word, n in {"layers": 2, "ffn_dim": 32}.items()
    }
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    found = inspect(model, {"input_ids": torch.randint(3, 64, (2, 12)), "labels": torch.randint(3, 64, (2, 7))})
    assert found.healthy
    assert {each.locations["norm"].shape[1] for each in (found, *found.others)} == {7, 12}


def test_a_stage_of_two_blocks_is_read_beside_the_other_stages():
    """Without its shortcut, one of two has no sibling that would tell."""
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "image_size": 32, "patch_size": 2}
    torch.manual_seed(0)
    model = transformers.SwinForImageClassification(transformers.SwinConfig(**sizes, window_size=4))
    images = torch.randn(2, 3, 32, 32)
    assert inspect(model, images).healthy
    block = model.swin.encoder.layers[1].blocks[0]
    block.register_forward_hook(
        lambda module, args, out: (out[0] - args[0], *out[1:]) if isinstance(out, tuple) else out - args[0]
    )
    found = inspect(model, images)
    assert found.blocks[found.verdict.block or 0].name == "swin.encoder.layers.1.blocks.0"
    assert "does not carry its input on" in found.verdict.text


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_saved_folder_is_opened_with_its_own_class(tmp_path, family):
    model, batch = random_model(family)
    model.save_pretrained(tmp_path)
    assert type(open_pretrained(tmp_path)) is type(model)
    assert inspect(tmp_path, batch).blocks[-1].cosine_mean == pytest.approx(
        inspect(model, batch).blocks[-1].cosine_mean
    )
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        inspect(tmp_path / "none", batch)


def test_unknown_families_are_named():
    with pytest.raises(ValueError, match="transformers knows no family 'gtp2'; did you mean 'gpt2'"):
        build_family("gtp2")


def test_a_list_of_stages_is_no_stack():
    """Also where there are more stages than blocks in any."""
    sizes = {
        "hidden_sizes": (8, 16, 16),
        "depths": (2, 1, 1),
        "num_attention_heads": (1, 2, 2),
        "patch_sizes": (3,) * 3,
    }
    sizes |= {"strides": (2, 2, 1), "sr_ratios": (2, 1, 1), "mlp_ratios": (2,) * 3, "num_encoder_blocks": 3}
    model = transformers.SegformerForImageClassification(transformers.SegformerConfig(**sizes))
    found = inspect(model, torch.randn(2, 3, 16, 16))
    names = sorted(
        block.name.removeprefix("segformer.") for each in (found, *found.others) for block in each.blocks[1:]
    )
    assert names == ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.2.blocks.0"]


def test_attention_with_matrices_apart_is_seen():
    """torch's function takes queries, keys and values from three matrices in WavLM."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"conv_dim": (16,), "conv_kernel": (10,), "conv_stride": (5,), "num_conv_pos_embeddings": 4}
    model = transformers.WavLMModel(transformers.WavLMConfig(num_conv_pos_embedding_groups=2, **sizes))
    found = inspect(model, {"input_values": torch.randn(2, 200)})
    assert found.healthy, found.verdict.text
    assert all(0.5 < block.attention_spread <= 1 for block in found.blocks[1:])


def test_an_expert_that_no_token_reaches_is_no_fault():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 3, "num_decoder_layers": 3}
    sizes |= {"num_experts": 8, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "vocab_size": 64}
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**sizes))
    found = inspect(model, torch.randint(1, 64, (1, 6)))
    assert found.healthy, found.verdict.text
