"""Hugging Face: importing this registers SkiplessConfig and SkiplessForCausalLM with transformers' Auto classes.

import skipless.hf
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
"""

from transformers import AutoConfig, AutoModelForCausalLM

from skipless.hf.modeling import SkiplessConfig, SkiplessForCausalLM
from skipless.hf.tokenizer import byte_tokenizer, export_tokenizer, sentencepiece_tokenizer

AutoConfig.register(SkiplessConfig.model_type, SkiplessConfig, exist_ok=True)
AutoModelForCausalLM.register(SkiplessConfig, SkiplessForCausalLM, exist_ok=True)

__all__ = [
    "SkiplessConfig",
    "SkiplessForCausalLM",
    "byte_tokenizer",
    "export_tokenizer",
    "sentencepiece_tokenizer",
]
