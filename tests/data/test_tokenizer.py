import threading
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skipless.console import Progress
from skipless.data.text import open_corpus
from skipless.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    TrainUnigram,
    load_tokenizer,
    sample_lines,
    token_dtype,
    train_tokenizer,
)

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def pieces(model) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model.read_bytes())


@given(text=ANY_TEXT)
@example(text=" a ▁▁b\0c  \r\n\t")
@example(text="▁")
@example(text="</s><unk><0x41>\ufeff e\u0301\u3000")
def test_any_text_comes_back_exactly(pieces, text):
    for tokenizer in (pieces, ByteTokenizer()):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.end not in tokens
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)


@given(texts=st.lists(ANY_TEXT, max_size=5))
def test_documents_are_joined_by_the_end_token(pieces, texts):
    for tokenizer in (pieces, ByteTokenizer()):
        tokens = tokenizer.encode_documents(texts)
        assert tokens.dtype == np.uint16
        ends = np.flatnonzero(tokens == tokenizer.end)
        assert [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]] == texts
        assert tokenizer.decode(tokens) == "".join(texts)


def test_real_text_comes_back_exactly(pieces, sources, shared_data):
    texts = [*open_corpus(sources), *open_corpus(shared_data / "c4-sample")][:300]
    for text in texts:
        assert pieces.decode(pieces.encode(text)) == text


def test_shared_tokenizer_loads(shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizer" / "wiki32k.model")
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.encode("Deep transformers without shortcuts").size < 12


def test_training_is_deterministic(model, sources):
    again = TrainUnigram(600, 0.3).make(open_corpus(sources).parts, lambda text: True)
    assert again.sha256 == load_tokenizer(model).sha256
    assert again.vocab_size == 600


def test_vocabulary_beyond_the_data_names_the_largest(sources):
    parts = open_corpus(sources / "json-*.py").parts
    with pytest.raises(ValueError, match=r"32,000 is more than this text allows: use --vocab \d+ or less") as caught:
        TrainUnigram().make(parts, lambda text: True)
    largest = int(str(caught.value).split("--vocab ")[1].split()[0])
    assert TrainUnigram(largest).make(parts, lambda text: True).vocab_size == largest
    with pytest.raises(ValueError, match=r"less than this text's characters need: use --vocab \d+ or more"):
        TrainUnigram(260).make(parts, lambda text: True)
    with pytest.raises(ValueError, match="byte fallback alone needs 259"):
        TrainUnigram(100)
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        TrainUnigram(300).make(parts, lambda text: False)


def test_the_sample_is_bounded_and_takes_a_small_corpus_whole(sources):
    parts = open_corpus(sources).parts
    total = sum(part.size() or 0 for part in parts)
    for budget in (1000, total // 3):
        assert sum(map(len, sample_lines(parts, budget, lambda text: True))) <= budget
    lines = b"\n".join(sample_lines(parts, total, lambda text: True))
    texts = b"\n".join(text.encode() for text in open_corpus(sources))
    assert lines == b"\n".join(line for line in texts.split(b"\n") if line)


def test_what_is_not_a_model_is_refused(tmp_path):
    (tmp_path / "a.model").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"a.model is not a SentencePiece model"):
        load_tokenizer(tmp_path / "a.model")
    with pytest.raises(OSError, match=r"b.model cannot be read \(No such file or directory\)"):
        load_tokenizer(tmp_path / "b.model")


def test_bytes_have_256_symbols_and_a_wider_vocabulary_four_bytes():
    assert load_tokenizer("bytes").vocab_size == 256
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_training_shows_how_far_it_is(sources):
    """Rounds that were done of so many; all of them in the end, and never more than it said."""
    seen = []

    class Listener(Progress):
        def show(self, text="", *, done=None, total=None):
            seen.append((done, total))

    TrainUnigram(600, 0.3).make(open_corpus(sources).parts, lambda text: True, Listener(quiet=True))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert len(seen) > 4
    totals = [total for _, total in seen]
    assert max(totals) - min(totals) <= 4, "what is left is known from the start"
    assert seen[-1][0] <= seen[-1][1] <= seen[-1][0] + 4


def test_ctrl_c_while_the_listener_starts_is_quiet(monkeypatch):
    """The thread that hears the trainer outlives its pipe when Ctrl-C comes before it is known to be alive."""
    complaints: list[object] = []
    begin = threading.Thread.start

    def start(thread):
        def interrupted(timeout=None):
            raise KeyboardInterrupt

        thread._started.wait = interrupted
        begin(thread)

    monkeypatch.setattr(threading, "excepthook", complaints.append)
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                train_tokenizer(iter([b"to be or not to be"] * 100), 300)
        time.sleep(0.1)
    assert not complaints
