import lzma

import pytest
import sentencepiece
from transformers import AutoTokenizer

from skipless.hf.tokenizer import SentencePieceFile, byte_tokenizer, export_tokenizer

ODD = [
    "",
    " ",
    "  Hello  world\n x\t y ",
    "<s> hi </s> <unk> <0x41> <<s>>",
    "日本語 🎉 ñ é ﬁ Ⅳ ａｂｃ",
    "a\u00a0b\u200bc",
    "▁x ▁▁y",
    "x" * 500,
]


def train(folder, **options) -> str:
    """A small model of our own, so that the test needs no data."""
    lines = [f"the {a} {b} of {a}{b} were <{b}> here, {i} times" for i, (a, b) in enumerate(WORDS * 20)]
    text = folder / "text.txt"
    text.write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "own"), vocab_size=310, byte_fallback=True, minloglevel=2, **options
    )
    return str(folder / "own.model")


WORDS = [("red", "house"), ("green", "mouse"), ("blue", "horse"), ("pale", "moon"), ("bright", "sun")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"add_dummy_prefix": False, "user_defined_symbols": ["[SEP]"], "pad_id": 3},
    ],
    ids=["default", "identity", "symbols"],
)
def test_ids_and_text_equal_sentencepiece(options, tmp_path):
    file = train(tmp_path, **options)
    reference = sentencepiece.SentencePieceProcessor(model_file=file)
    export_tokenizer(file, tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in [*ODD, "the red house", "bright [SEP] moon", " two  spaces"]:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == reference.decode(ids), text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_id(), reference.eos_id())
    assert tokenizer.pad_token_id == (3 if "pad_id" in options else reference.unk_id())
    assert len(tokenizer) == reference.vocab_size()


def test_the_shared_model_equals_sentencepiece_on_real_text(shared_data, tmp_path):
    file = shared_data / "tokenizer" / "wiki32k.model"
    if not file.is_file():
        pytest.skip("no shared tokenizer")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
    tokenizer = export_tokenizer(file, tmp_path)
    with lzma.open(shared_data / "wikipedia" / "valid.txt.xz", "rt", encoding="utf-8") as lines:
        texts = [line.rstrip("\n") for line, _ in zip(lines, range(1500), strict=False)] + ODD
    assert tokenizer(texts)["input_ids"] == reference.encode(texts)


def test_padding_is_on_the_left(tmp_path):
    tokenizer = export_tokenizer(train(tmp_path), tmp_path / "saved")
    batch = tokenizer(["the red house of mice", "moon"], padding=True)
    assert batch["attention_mask"][1][0] == 0
    assert batch["attention_mask"][1][-1] == 1


def test_bytes_are_their_own_ids(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (255, 255, 254)
    batch = tokenizer(["abc", "é"], padding=True)
    assert batch["input_ids"] == [[97, 98, 99], [254, 195, 169]]
    assert batch["attention_mask"] == [[1, 1, 1], [0, 1, 1]]
    assert tokenizer.decode([254, 97, 255], skip_special_tokens=True) == "a"
    for text in ["<end> and <pad>", *ODD, "".join(map(chr, range(300)))]:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.model").write_bytes(b"\xff\xfenot a model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        SentencePieceFile.read(tmp_path / "a.model")
    with pytest.raises(ValueError, match="kind BPE"):
        SentencePieceFile.read(train(tmp_path, model_type="bpe"))
