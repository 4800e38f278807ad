"""Corpora, tokenizers, token shards and the stateless loader. Knows no model.

Read in the order corpora, tokenizer, prepare, store, loader. Only `loader` imports torch.
"""
