import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from skipless.data.loader import Batch, TokenLoader
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes, ByteTokenizer, load_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.theory.schemes import ExponentialSPA
from skipless.training import evaluate as scoring_module
from skipless.training.evaluate import (
    EvalResult,
    Row,
    Windowing,
    Windows,
    evaluate_loss,
    evaluate_text,
    padded_batches,
    scoring,
    token_windows,
)

TEXT = "\n\n\n".join(f"Article {n}\nThe naïve cat no. {n} sat on {'the mat, and ' * n}slept." for n in range(12))


def build(**changes) -> Transformer:
    torch.manual_seed(0)
    fields = {"vocab_size": 256, "width": 32, "depth": 2, "heads": 4, "length": 16, "activation": "gelu"}
    model = Transformer(ModelConfig(**{**fields, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    prepare(Preparation(str(place / "text.txt"), Bytes(), valid_fraction=0.5), place / "prepared", workers=1)
    return place / "prepared"


@torch.no_grad()
def brute_force(model, tokens: np.ndarray, length: int) -> float:
    """Summed loss over windows of at most `length` inputs, one at a time and with all logits."""
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        row = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        total += F.cross_entropy(model(row[None, :-1])[0].double(), row[1:], reduction="sum").item()
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_loss_over_a_loader_is_that_of_every_token_but_the_first(model, folder, batch_size):
    store = TokenStore(folder, "valid")
    tokens = store.read(0, len(store))
    result = evaluate_loss(model, TokenLoader(store, 16, batch_size))
    assert result.tokens == len(store) - 1
    assert result.loss == pytest.approx(brute_force(model, tokens, 16) / result.tokens, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    first = 1 if tokens[0] != store.end else 0
    assert result.bytes == store.manifest.splits["valid"].text_bytes - first
    assert result.bits_per_byte == pytest.approx(result.loss * result.tokens / math.log(2) / result.bytes)


def test_logits_are_projected_in_pieces(model, folder, monkeypatch):
    store = TokenStore(folder, "valid")
    whole = evaluate_loss(model, TokenLoader(store, 16, 8))
    sizes = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: sizes.append(len(hidden)) or logits(hidden))
    monkeypatch.setattr(scoring_module, "LOGITS_AT_ONCE", 256 * 5)
    assert evaluate_loss(model, TokenLoader(store, 16, 8)).loss == pytest.approx(whole.loss, rel=1e-6)
    assert max(sizes) == 5


def test_max_tokens_takes_whole_windows(model, folder):
    store = TokenStore(folder, "valid")
    result = evaluate_loss(model, TokenLoader(store, 16, 4), max_tokens=90)
    assert result.tokens == 96
    assert result.loss * 96 == pytest.approx(brute_force(model, store.read(0, 97), 16), rel=1e-6)


def test_ranks_add_up_to_the_whole(model, folder):
    store = TokenStore(folder, "valid")
    whole = evaluate_loss(model, TokenLoader(store, 16, 6))
    calls, hidden = [], model.hidden
    parts = []
    for rank in range(3):
        calls.append(0)

        def counted(*inputs, **options):
            calls[-1] += 1
            return hidden(*inputs, **options)

        model.hidden = counted
        try:
            parts.append(evaluate_loss(model, TokenLoader(store, 16, 6, rank=rank, world=3)))
        finally:
            del model.hidden
    assert len(set(calls)) == 1  # a sharded model is called by all processes together
    nats, tokens, size = (sum(f(p) for p in parts) for f in (lambda p: p.loss * p.tokens, _tokens, _bytes))
    assert EvalResult.of(nats, tokens, size).loss == pytest.approx(whole.loss)
    assert (tokens, size) == (whole.tokens, whole.bytes)


def _tokens(result: EvalResult) -> int:
    return result.tokens


def _bytes(result: EvalResult) -> int:
    return result.bytes or 0


def test_a_rank_may_have_nothing_to_score(model, folder):
    store = TokenStore(folder, "valid")
    loaders = [TokenLoader(store, len(store) - 1, 2, rank=rank, world=2) for rank in range(2)]
    assert [evaluate_loss(model, loader).tokens for loader in loaders] == [len(store) - 1, 0]


def test_packed_documents_do_not_see_each_other(model, folder):
    store = TokenStore(folder, "valid")
    loader = TokenLoader(store, 64, 2, documents=True)
    total = count = 0
    for batch in loader.sweep():
        with torch.no_grad():
            logits = model(batch.inputs, layout=Layout.packed(batch.documents))
        total += F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").item()
        count += batch.targets.numel()
    result = evaluate_loss(model, loader, max_tokens=count)
    assert result.loss == pytest.approx(total / count, rel=1e-6)
    assert result.loss != pytest.approx(
        evaluate_loss(model, TokenLoader(store, 64, 2), max_tokens=count).loss, rel=1e-6
    )


def test_lists_of_batches_tensors_and_windows_are_alike(model):
    tokens = torch.randint(0, 256, (3, 11), generator=torch.Generator().manual_seed(2))
    results = [evaluate_loss(model, [kind(tokens)]) for kind in (Batch, Windows, lambda rows: rows)]
    assert results[0] == results[1] == results[2]
    assert (results[0].tokens, results[0].bytes, results[0].bits_per_byte) == (30, None, None)
    cut = evaluate_loss(model, [tokens, tokens], max_tokens=33, tokenizer=ByteTokenizer())
    assert (cut.tokens, cut.bytes) == (33, 33 - int((tokens[:, 1:] == 255).sum() + (tokens[0, 1:4] == 255).sum()))


def test_the_model_is_left_as_it_was(model):
    model.train()
    evaluate_loss(model, [torch.zeros(1, 4, dtype=torch.int64)])
    assert model.training
    model.eval()


@pytest.mark.parametrize(("precision", "within"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_half_precision_agrees_within_its_own(model, precision, within):
    tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(3))
    exact, rough = (evaluate_loss(model, [tokens], precision=each).loss for each in ("fp32", precision))
    assert rough == pytest.approx(exact, rel=within)
    assert rough != exact


@pytest.mark.parametrize(("length", "stride"), [(1, None), (5, None), (8, 3), (8, 1), (64, 64)])
def test_windows_score_each_token_once(length, stride):
    for count in range(2, 40):
        tokens = np.arange(count)
        rows = list(token_windows(np.array_split(tokens, 3), length, stride))
        scored = np.concatenate([row.tokens[len(row.tokens) - row.scored :] for row in rows])
        assert scored.tolist() == list(range(1, count))
        assert all(1 <= row.scored <= len(row) <= length for row in rows)


@pytest.mark.parametrize("few_sizes", [False, True])
def test_rows_keep_their_order_and_padding_changes_nothing(model, few_sizes):
    numbers = np.random.default_rng(0)
    rows = [Row(numbers.integers(0, 256, size), int(numbers.integers(1, size))) for size in (9, 2, 30, 17, 5, 30)]
    batches = list(padded_batches(rows, 64, few_sizes))
    assert sorted(np.concatenate([index for index, _ in batches]).tolist()) == list(range(6))
    if few_sizes:
        assert {windows.tokens.shape for _, windows in batches} == {(1, 129)}
    with scoring(model) as scorer:
        found = scorer.row_log_likelihoods(rows, batch_tokens=64)
    for row, value in zip(rows, found, strict=True):
        tokens = torch.from_numpy(row.tokens)
        with torch.no_grad():
            steps = model(tokens[None, :-1])[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        assert value == pytest.approx(float(steps[-row.scored :].sum()), abs=1e-4)


def test_a_network_that_ends_at_its_length_is_not_padded_beyond_it():
    scheme = ExponentialSPA(0.5, 0.05, calibration="exact")
    exact = build(scheme=scheme)
    gpu = torch.device("cuda")
    assert scoring_module.wants_few_sizes(build().config, gpu)
    assert not scoring_module.wants_few_sizes(build().config, torch.device("cpu"))
    rows = [Row(np.arange(size), 2) for size in (17, 9)]
    with scoring(exact) as scorer:
        for _, windows in padded_batches(rows, 64, scoring_module.wants_few_sizes(exact.config, gpu)):
            assert scorer.log_probs(windows).isfinite().all()


def test_text_joined_is_what_prepare_makes_of_it_after_an_end(model):
    tokenizer = ByteTokenizer()
    texts = ["abc", "naïve", "x" * 40]
    tokens = np.concatenate([[tokenizer.end], tokenizer.encode_documents(texts)])
    result = evaluate_text(model, tokenizer, texts, Windowing(16))
    assert (result.tokens, result.bytes) == (len(tokens) - 1, sum(len(text.encode()) for text in texts))
    assert result.loss * result.tokens == pytest.approx(brute_force(model, tokens, 16), rel=1e-6)


@pytest.mark.parametrize("length", [16, 200])
def test_packed_text_is_scored_as_packed_tokens_are(model, length):
    tokenizer = ByteTokenizer()
    texts = ["abc", "naïve", "x" * 40]
    tokens = np.concatenate([[tokenizer.end], tokenizer.encode_documents(texts)]).astype(np.int64)
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        row = torch.from_numpy(tokens[start : start + length + 1])
        begins = [0, *((row[:-1] == tokenizer.end).nonzero()[:, 0] + 1).tolist(), len(row) - 1]
        for first, last in pairwise(begins):
            if first < last:
                logits = model(row[None, first:last])[0].detach().double()
                total += F.cross_entropy(logits, row[first + 1 : last + 1], reduction="sum").item()
    result = evaluate_text(model, tokenizer, texts, Windowing(length, packed=True))
    assert result.loss * result.tokens == pytest.approx(total, rel=1e-6)
    assert result.loss != pytest.approx(evaluate_text(model, tokenizer, texts, Windowing(length)).loss, rel=1e-6)


def test_text_by_document_starts_each_one_anew(model):
    tokenizer = ByteTokenizer()
    texts = ["abc", "naïve", "x" * 40]
    result = evaluate_text(model, tokenizer, texts, Windowing(16, separate=True, batch_tokens=32))
    total = sum(
        brute_force(model, np.concatenate([[tokenizer.end], tokenizer.encode_documents([text])]), 16) for text in texts
    )
    assert result.loss * result.tokens == pytest.approx(total, rel=1e-6)


def test_stride_one_gives_each_token_all_the_context_there_is(model):
    tokenizer = ByteTokenizer()
    tokens = np.concatenate([[tokenizer.end], tokenizer.encode_documents(["a longer sentence than that"])]).astype(int)
    total = 0.0
    for last in range(1, len(tokens)):
        row = torch.from_numpy(tokens[max(0, last - 8) : last + 1])
        with torch.no_grad():
            total -= float(model(row[None, :-1])[0, -1].log_softmax(-1)[row[-1]])
    result = evaluate_text(model, tokenizer, ["a longer sentence than that"], Windowing(8, stride=1))
    assert result.loss * result.tokens == pytest.approx(total, rel=1e-6)


def test_max_tokens_ends_the_text(model):
    result = evaluate_text(model, ByteTokenizer(), iter(["ab", "cdef", "never"]), Windowing(16), max_tokens=5)
    assert (result.tokens, result.bytes) == (5, 4)


def test_bytes_of_tokens_are_those_of_the_text(shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizer" / "wiki32k.model")
    text = "A naïve, 日本 cat 🎉 sat."
    # that model puts a space of its own before the text
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text.encode()) + 1
    from skipless.hf.tokenizer import FastTokenizer, byte_tokenizer, sentencepiece_tokenizer

    fast = FastTokenizer(sentencepiece_tokenizer(shared_data / "tokenizer" / "wiki32k.model"))
    sizes = fast.token_bytes()
    assert sizes[1:].tolist() == tokenizer.token_bytes()[1:].tolist()  # <unk>, which never stands for text, may differ
    assert fast.encode(text).tolist() == tokenizer.encode(text).tolist()
    plain = FastTokenizer(byte_tokenizer())
    assert (plain.end, plain.encode("é").tolist()) == (255, list("é".encode()))
    sizes = ByteTokenizer().token_bytes()
    sizes[254] = 0  # <pad> of the fast tokenizer; no text holds that byte
    assert plain.token_bytes().tolist() == sizes.tolist()


def test_what_cannot_be_evaluated_is_said(model):
    with pytest.raises(ValueError, match=r"head=.token.*only a causal language model"):
        evaluate_loss(build(head="token", classes=3), [torch.zeros(1, 3, dtype=torch.int64)])
    with pytest.raises(ValueError, match="tokenizer has 256 pieces and the model an embedding of 100"):
        evaluate_text(build(vocab_size=100), ByteTokenizer(), ["a"])
    with pytest.raises(ValueError, match="no tokens were scored"):
        evaluate_loss(model, [])
    with pytest.raises(ValueError, match="use 'bf16', 'fp16' or 'fp32'"):
        evaluate_loss(model, [torch.zeros(1, 3, dtype=torch.int64)], precision="fp8")
    with pytest.raises(ValueError, match="stride=9"):
        evaluate_text(model, ByteTokenizer(), ["a"], Windowing(8, stride=9))


def test_a_hopeless_loss_has_infinite_perplexity():
    assert EvalResult.of(5000.0, 1, 1).perplexity == math.inf
