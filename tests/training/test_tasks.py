import importlib.util
import json
import lzma
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from skipless.cli import evaluate
from skipless.cli.app import app
from skipless.data.tokenizer import ByteTokenizer, load_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.evaluate import scoring
from skipless.training.tasks import (
    TASKS,
    Question,
    encode_pair,
    hub_records,
    local_records,
    pair_row,
    questions,
    result_of,
    score_tasks,
    task_names,
)

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (extra: eval)"
)

RECORDS = {
    "boolq": {"passage": "Tea is hot.", "question": "is tea hot", "answer": True},
    "hellaswag": {
        "activity_label": "Roofs",
        "ctx_a": "A man [step] sits. [title] Next",
        "ctx_b": "he",
        "endings": ["falls [substeps] down.", "sleeps."],
        "label": "1",
    },
    "winogrande": {"sentence": "Ann beat Bo so _ won. ", "option1": "Ann", "option2": "Bo", "answer": "1"},
    "piqa": {"goal": "open it", "sol1": "pull", "sol2": "push ", "label": 1},
    "siqa": {"context": "Al ran.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"},
}
PAIRS = {
    "boolq": [
        ("Tea is hot.\nQuestion: is tea hot?\nAnswer:", " no"),
        ("Tea is hot.\nQuestion: is tea hot?\nAnswer:", " yes"),
    ],
    "hellaswag": [("Roofs: A man sits.. Next He", " falls down."), ("Roofs: A man sits.. Next He", " sleeps.")],
    "winogrande": [("Ann beat Bo so Ann", " won."), ("Ann beat Bo so Bo", " won.")],
    "piqa": [("Question: open it\nAnswer:", " pull"), ("Question: open it\nAnswer:", " push ")],
    "siqa": [("Q: Al ran. Why?\nA:", " a"), ("Q: Al ran. Why?\nA:", " b"), ("Q: Al ran. Why?\nA:", " c")],
}
GOLD = {"boolq": 1, "hellaswag": 1, "winogrande": 0, "piqa": 1, "siqa": 2}


class Indifferent(torch.nn.Module):
    """Every token is as likely as any other, so that a choice's score is −(its tokens)·ln(vocab_size)."""

    def __init__(self, vocab_size: int = 256, length: int = 512):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(vocab_size=vocab_size, length=length, head="lm", causal=True)

    def hidden(self, tokens, *, layout=None):
        return torch.zeros(*tokens.shape, 1)

    def logits(self, hidden):
        return hidden.expand(*hidden.shape[:-1], self.config.vocab_size)


@pytest.fixture
def tasks_folder(shared_data):
    if not (shared_data / "tasks").is_dir():
        pytest.skip("no shared tasks")
    return shared_data / "tasks"


def small_model(vocab_size: int, length: int) -> Transformer:
    torch.manual_seed(0)
    fields = {"vocab_size": vocab_size, "width": 32, "depth": 2, "heads": 4, "length": length, "activation": "gelu"}
    model = Transformer(ModelConfig(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("name", TASKS)
def test_prompts(name):
    (question,) = questions(name, iter([RECORDS[name]]))
    assert (list(question.pairs), question.gold) == (PAIRS[name], GOLD[name])


def test_lengths_count_characters_without_the_space_before():
    assert questions("piqa", iter([RECORDS["piqa"]]))[0].lengths == (4, 5)
    assert questions("winogrande", iter([RECORDS["winogrande"]]))[0].lengths is None


def test_super_glue_s_label_serves_too():
    record = {**RECORDS["boolq"], "label": 0}
    del record["answer"]
    assert questions("boolq", iter([record]))[0].gold == 0


def test_spaces_at_the_end_of_the_context_belong_to_the_continuation():
    tokens, scored = encode_pair(ByteTokenizer(), "so  ", " won")
    assert bytes(tokens.tolist()) == b"so   won"
    assert scored == 6


def test_an_indifferent_model_takes_the_shortest_choice(tasks_folder):
    asked = {name: questions(name, local_records(name, tasks_folder), 200) for name in ("hellaswag", "piqa")}
    results = score_tasks(Indifferent(), ByteTokenizer(), asked, length=4096)
    for name, each in asked.items():
        sizes = [[len(text.encode()) for _, text in question.pairs] for question in each]
        shortest = [own.index(min(own)) == question.gold for own, question in zip(sizes, each, strict=True)]
        assert results[name].accuracy == np.mean(shortest)
        # per character (n+1)/n tokens: the longest choice, where all is ASCII
        per_character = [
            [-s / n for s, n in zip(own, q.lengths, strict=True)] for own, q in zip(sizes, each, strict=True)
        ]
        longest = [own.index(max(own)) == question.gold for own, question in zip(per_character, each, strict=True)]
        assert results[name].normalised == pytest.approx(np.mean(longest), abs=0.02)  # ties may fall either way
        error = np.std(shortest, ddof=1) / math.sqrt(len(each))
        assert results[name].accuracy_stderr == pytest.approx(error)
        assert results[name].truncated == 0


def test_every_question_has_the_choices_of_its_task(tasks_folder):
    for name, task in TASKS.items():
        asked = questions(name, local_records(name, tasks_folder), 300)
        assert {len(question.pairs) for question in asked} == {task.choices}


def test_results_from_known_scores():
    asked = [Question.ask("q", ("aa", "bbbbbbbb"), 1), Question.ask("q", ("aa", "bbbbbbbb"), 0)]
    result = result_of("piqa", asked, np.array([-2.0, -4.0, -2.0, -1.0]), 0)
    assert (result.accuracy, result.normalised, result.questions) == (0.0, 0.5, 2)
    assert result.normalised_stderr == pytest.approx(0.5)
    alone = result_of("winogrande", [Question((("a", "b"), ("c", "b")), 1)], np.array([-2.0, -1.0]), 0)
    assert (alone.accuracy, alone.accuracy_stderr, alone.normalised) == (1.0, None, None)
    with pytest.raises(ValueError, match="1 of 2 log-likelihoods are not a number"):
        result_of("piqa", asked[:1], np.array([-2.0, np.nan]), 0)


def test_contexts_too_long_are_cut_from_the_left_and_counted():
    asked = {"piqa": questions("piqa", iter([RECORDS["piqa"]]))}
    model = small_model(256, 8)
    result = score_tasks(model, ByteTokenizer(), asked)["piqa"]
    assert result.truncated == 2
    row, cut = pair_row(ByteTokenizer(), *PAIRS["piqa"][0], 8)
    assert (bytes(row.tokens.tolist()), row.scored, cut) == (b"wer: pull", 5, True)
    with pytest.raises(ValueError, match="has 5 tokens, and the model is to see length=4"):
        score_tasks(model, ByteTokenizer(), asked, length=4)


def test_files_and_names_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ValueError, match="no task 'arc'; there are boolq"):
        task_names("piqa,arc")
    assert task_names("all") == [*TASKS]
    with pytest.raises(ValueError, match=r"has no piqa\.validation\.jsonl"):
        next(local_records("piqa", tmp_path))
    with pytest.raises(ValueError, match="no network is used unless asked for"):
        next(hub_records("piqa", download=False))
    (tmp_path / "piqa.jsonl").write_text('{"goal": "x"}\n{"goal"\n')
    with pytest.raises(ValueError, match=r"record 1 lacks the field 'sol1'.*baber/piqa"):
        questions("piqa", local_records("piqa", tmp_path))
    with pytest.raises(ValueError, match=r"piqa\.jsonl, line 2 is no JSON record"):
        list(local_records("piqa", tmp_path))
    with lzma.open(tmp_path / "social_i_qa.validation.jsonl.xz", "wt") as file:
        file.write(json.dumps(RECORDS["siqa"]) + "\n")
    assert len(questions("siqa", local_records("siqa", tmp_path))) == 1


@pytest.mark.parametrize("label", [5, -1, 0.5, None, "x", ""])
def test_a_label_that_names_no_choice_is_refused_with_its_place(label):
    bad = {**RECORDS["siqa"], "label": label}
    with pytest.raises(
        ValueError, match=r"siqa, record 2 .*the label of the right answer is .* must be one of 1, 2, 3"
    ):
        questions("siqa", iter([RECORDS["siqa"], bad]))


def test_a_broken_record_is_named_by_file_and_line(tmp_path):
    bad = {**RECORDS["hellaswag"], "ctx_b": None}
    (tmp_path / "hellaswag.jsonl").write_text(f"{json.dumps(RECORDS['hellaswag'])}\n{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=r"hellaswag\.jsonl, line 2 is no question of hellaswag: ctx_b is None"):
        evaluate._asked("hellaswag", tmp_path, SimpleNamespace(limit=None))


def test_the_command_prints_accuracies(tmp_path):
    from skipless.hf.modeling import SkiplessForCausalLM
    from skipless.hf.tokenizer import byte_tokenizer

    SkiplessForCausalLM.from_native(small_model(256, 64)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    for name in TASKS:
        (tmp_path / f"{name}.jsonl").write_text(3 * (json.dumps(RECORDS[name]) + "\n"))
    arguments = ["eval", str(tmp_path / "model"), "--tasks", "all", "--tasks-folder", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--limit", "2", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert [*record["tasks"]] == [*TASKS]
    assert all(task["questions"] == 2 for task in record["tasks"].values())
    assert all(name in result.stdout for name in TASKS)
    chance = {name: round(task["chance"], 3) for name, task in record["tasks"].items()}
    assert chance == {"boolq": 0.5, "hellaswag": 0.25, "winogrande": 0.5, "piqa": 0.5, "siqa": 0.333}


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch):
    from skipless.training import tasks

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(tasks, "import_module", absent)
    with pytest.raises(ValueError, match=r"pip install 'skipless\[eval\]', or use the built-in scorer"):
        tasks.run_lm_eval(small_model(256, 8), ByteTokenizer(), ["piqa"], ".")


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "wiki32k"])
def test_prompts_log_likelihoods_and_accuracies_are_lm_eval_s(kind, shared_data, tasks_folder):
    from skipless.training import tasks

    tokenizer = ByteTokenizer() if kind == "bytes" else load_tokenizer(shared_data / "tokenizer" / "wiki32k.model")
    model = small_model(tokenizer.vocab_size, 512 if kind == "bytes" else 128)
    asked = {name: questions(name, local_records(name, tasks_folder), 40) for name in TASKS}
    ours = score_tasks(model, tokenizer, asked)
    raw = tasks.run_lm_eval(model, tokenizer, [*TASKS], tasks_folder, limit=40)
    assert ours["boolq"].truncated > 0
    for name, each in asked.items():
        samples = sorted(raw["samples"][f"skipless_{name}"], key=lambda sample: sample["doc_id"])
        pairs = [pair for question in each for pair in question.pairs]
        assert pairs == [tuple(pair) for sample in samples for pair in sample["arguments"]], name
        with scoring(model) as scorer:
            scores = scorer.row_log_likelihoods([pair_row(tokenizer, *pair, model.config.length)[0] for pair in pairs])
        theirs = [response[0] for sample in samples for response in sample["filtered_resps"]]
        # lm-eval adds up in float32: 6e-8 of sums that reach thousands
        np.testing.assert_allclose(scores, theirs, atol=1e-4, rtol=5e-7, err_msg=name)
        result = tasks.lm_eval_result(name, raw)
        assert (result.accuracy, result.questions) == (ours[name].accuracy, 40)
        assert result.accuracy_stderr == pytest.approx(ours[name].accuracy_stderr)
        if result.normalised is not None:
            assert (result.normalised, name in ("hellaswag", "piqa")) == (ours[name].normalised, True)
