"""Which architectures an inspection takes: small random networks of transformers' and timm's families, one row each.

    python benchmarks/inspect_architectures.py --out docs/architectures.md

Every family is built from its own config with a few small sizes, without downloads. "works": every stack of blocks was
measured and no fault is said of it; "partly": some stacks were left out, or gradients or attention are missing; else
the reason. timm's families are added where it is installed.
"""

import argparse
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from skipless.files import write_whole
from skipless.inspection.inputs import model_inputs
from skipless.inspection.inspect import inspect
from skipless.inspection.inspection import Inspection

CAUSAL = (
    "bloom codegen cohere cohere2 ctrl deepseek_v2 deepseek_v3 falcon gemma gemma2 gemma3_text glm glm4 gpt2 "
    "gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium jamba llama mamba mistral mixtral mpt "
    "nemotron olmo olmo2 olmoe opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma rwkv smollm3 "
    "stablelm starcoder2 xglm"
)
MASKED = "albert bert bart camembert convbert deberta deberta-v2 distilbert electra ernie fnet longformer mobilebert "
MASKED += "modernbert mpnet nystromformer roberta roformer squeezebert xlm-roberta xlnet yoso"
PAIRED = "bart blenderbot led longt5 m2m_100 marian mbart mt5 mvp pegasus pegasus_x prophetnet switch_transformers t5 "
PAIRED += "umt5"
IMAGES = "convnextv2 dinov2 ijepa pvt pvt_v2 segformer swin swinv2 vit vit_msn"
AUDIO = "audio-spectrogram-transformer hubert sew unispeech wav2vec2 wav2vec2-conformer wavlm whisper"
TIMM = (
    "vit_tiny_patch16_224 deit_tiny_patch16_224 cait_xxs24_224 swin_tiny_patch4_window7_224 maxvit_pico_rw_256 "
    "levit_128s mixer_s32_224 resmlp_12_224 pvt_v2_b0 convit_tiny poolformer_s12"
)

_SIZES = {
    32: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim moe_intermediate_size image_size max_length",
    4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_local_experts num_experts n_routed_experts patch_size "
    "state_size",
    64: "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim d_inner dff hidden_dim",
    8: "d_kv head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim attention_window",
    1: "n_group topk_group first_k_dense_replace bos_token_id decoder_start_token_id",
    2: "num_key_value_heads eos_token_id num_experts_per_tok",
    0: "pad_token_id",
    16: "num_mel_bins",
    96: "vocab_size",
    128: "max_position_embeddings n_positions",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_OWN = {  # what fits none else: latent attention has as many keys as queries, and stages halve an image
    "deepseek_v2": {"num_key_value_heads": 4, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    "deepseek_v3": {"num_key_value_heads": 4, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    "pvt": {"image_size": 64},  # of 32 its first stages have one key, and so no gradient for queries
    "pvt_v2": {"image_size": (64, 64)},
    "swin": {"image_size": 64, "patch_size": 2, "window_size": 4},
    "swinv2": {"image_size": 64, "patch_size": 2, "window_size": 4},
}


def config_of(kind: str) -> Any:
    """The family's config with every small size that it knows and that fits the others."""
    import transformers

    usual = transformers.AutoConfig.for_model(kind)
    known = {**vars(usual), **{n: getattr(usual, n, 0) for n in type(usual).attribute_map}}
    sizes = {n: v for n, v in _SMALL.items() if n in known and isinstance(known[n], int | float | type(None))}
    sizes |= _OWN.get(kind, {})
    while True:
        try:
            return transformers.AutoConfig.for_model(kind, **sizes)
        except Exception:
            if not sizes:
                raise
            sizes.popitem()


def batch_of(model: Any, config: Any, group: str) -> Any:
    """Tokens, images or sound for the model."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (3, 16), generator=generator)
    if group == "images":
        side = getattr(config, "image_size", 64)
        side = side if isinstance(side, int) else side[0]
        return torch.randn(2, 3, side, side, generator=generator)
    if group == "audio":
        if config.model_type == "whisper":
            frames = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
            return {"input_features": frames, "decoder_input_ids": ids[:2]}
        if config.model_type == "audio-spectrogram-transformer":
            return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)}
        return {"input_values": torch.randn(2, 4000, generator=generator)}
    return {"input_ids": ids, "decoder_input_ids": ids.flip(0)} if group == "paired" else ids


def of_transformers(kind: str, group: str) -> tuple[Any, Any]:
    """(model, batch) of a family."""
    import transformers

    classes = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "paired": transformers.AutoModelForSeq2SeqLM,
        "images": transformers.AutoModelForImageClassification,
        "audio": transformers.AutoModelForAudioClassification,
    }
    config = config_of(kind)
    kinds = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else classes[group]
    kinds = transformers.AutoModelForCausalLM if kind == "xlnet" else kinds
    return kinds.from_config(config), batch_of(None, config, group)


def of_timm(name: str) -> tuple[Any, Any]:
    """(model, batch) of one of timm's."""
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, torch.randn(2, *model.default_cfg["input_size"])


def judged(found: Inspection) -> tuple[str, str]:
    """(works or partly, what there is to say)."""
    every = (found, *found.others)
    places = ", ".join(f"{each.blocks[-1].name.rpartition('.')[0]} ({len(each.blocks) - 1})" for each in every)
    missing = [note for note in found.notes if "left out" in note]
    if any(each.blocks[1].gradient_mean is None for each in every):
        missing.append("no gradient reaches a stack")
    if any(each.blocks[1].attention_spread is None for each in every):
        places += "; attention not seen"
    if not found.healthy:
        places += f"; verdict: {found.verdict.text}"
    return ("partly" if missing else "works"), "; ".join([places, *missing])


def row(name: str, group: str) -> tuple[str, str, str, str]:
    """(name, group, outcome, words) of one family."""
    torch.manual_seed(0)
    try:
        model, batch = of_timm(name) if group == "timm" else of_transformers(name, group)
        args, options = model_inputs(model.eval(), batch)
        with torch.no_grad():
            model(*args, **options)  # small sizes that do not fit each other are no fault of ours
    except Exception as error:
        return name, group, "not built", _line(error)
    try:
        return name, group, *judged(inspect(model, batch, keep_kernels=False))
    except Exception as error:
        return name, group, "refused" if isinstance(error, ValueError) else "fails", _line(error)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0].replace("|", "/")[:180]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="a family or a group: causal, masked, paired, images, audio, timm")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    groups = {"causal": CAUSAL, "masked": MASKED, "paired": PAIRED, "images": IMAGES, "audio": AUDIO, "timm": TIMM}
    rows = []
    for group, names in groups.items():
        for name in names.split():
            if not options.only or options.only in (name, group):
                rows.append(row(name, group))
                print(*rows[-1], sep=" | ", flush=True)
    counts = Counter(each[2] for each in rows)
    print(dict(counts))
    if options.out is not None:
        lines = ["| family | of | outcome | stacks (blocks), and what is missing |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(each)} |" for each in rows]
        write_whole(options.out, "\n".join([*lines, ""]).encode())


if __name__ == "__main__":
    main()
