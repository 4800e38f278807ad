"""Corpora, tokenizers, token shards and the stateless loader; pictures and their arrays. Knows no model.

Read in the order text, formats, tokenizer, prepare, store, loader; then image_files, image_store, image_loader.
Only loaders import torch.
"""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "image_files": ["prepare_images"],
        "image_loader": ["ImageBatch", "ImageLoader"],
        "image_store": ["ImageStore"],
        "loader": ["Batch", "TokenLoader"],
        "prepare": ["Preparation"],
        "store": ["Manifest", "TokenStore", "read_manifest"],
        "text": ["Corpus", "open_corpus"],
        "tokenizer": ["ByteTokenizer", "SentencePieceTokenizer", "load_tokenizer"],
    },
)
