import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.theory import kernels
from skipless.theory.kernels import repeat_rate, sample_tokens


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40))
def test_rate_is_the_share_of_equal_pairs(tokens):
    kernel = kernels.of_tokens(np.array(tokens))
    n = len(tokens)
    assert repeat_rate(np.array(tokens)) == pytest.approx((kernel.sum() - n) / (n * (n - 1)))


def test_a_stream_gives_the_same_rate_as_one_array():
    tokens = np.random.default_rng(0).integers(0, 1000, 10_000).astype(np.uint16)
    assert repeat_rate(iter(np.array_split(tokens, 7))) == repeat_rate(tokens)


@pytest.mark.parametrize("rate", [0.0, 0.008, 0.05, 0.3, 0.4, 0.7, 0.9])
def test_sampled_tokens_have_their_rate(rate):
    assert repeat_rate(sample_tokens(rate, 200_000)) == pytest.approx(rate, rel=0.03, abs=1e-12)


def test_bytes_of_real_english_repeat_like_the_papers_characters(shared_data):
    """App. B quotes r ≈ .05 for characters; bytes of real articles agree."""
    text = lzma.decompress((shared_data / "wikipedia" / "valid.txt.xz").read_bytes())
    assert repeat_rate(np.frombuffer(text, dtype=np.uint8)) == pytest.approx(0.065, abs=0.015)


def test_sentencepiece_tokens_repeat_at_the_papers_rate(shared_data):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sentencepiece.SentencePieceProcessor(model_file=str(shared_data / "tokenizer" / "wiki32k.model"))
    text = lzma.decompress((shared_data / "wikipedia" / "valid.txt.xz").read_bytes())[:2_000_000]
    assert repeat_rate(np.array(model.encode(text.decode(errors="ignore")))) == pytest.approx(0.008, abs=0.001)


def test_too_few_tokens_have_no_rate():
    with pytest.raises(ValueError, match="1 tokens were given"):
        repeat_rate(np.array([3]))


@pytest.mark.parametrize(
    ("tokens", "seen"), [(np.array([0.2, 0.7]), "0.2"), (np.array([1, -2]), "-2"), ("abab", "'a'"), ([0.5, 0.5], "0.5")]
)
def test_only_token_ids_have_a_rate(tokens, seen):
    """Cut to whole numbers, any probabilities would repeat all the time."""
    with pytest.raises(ValueError, match=f"among the tokens is .*{seen}.*token ids, integers of at least 0"):
        repeat_rate(tokens)
