"""Corpora, tokenizers, token shards and the stateless loader. Knows no model.

Read in the order text, formats, tokenizer, prepare, folder, store, loader. Only `loader` imports torch.
"""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "loader": ["Batch", "TokenLoader"],
        "prepare": ["Preparation"],
        "store": ["Manifest", "TokenStore", "read_manifest"],
        "text": ["Corpus", "open_corpus"],
        "tokenizer": ["ByteTokenizer", "SentencePieceTokenizer", "load_tokenizer"],
    },
)
