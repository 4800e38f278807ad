"""What commands share at the terminal."""

import io
import sys

import pytest
from rich.console import Console

from skipless import console
from skipless.console import Progress, near_names, nearest


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time that a Progress sees: its one entry."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_progress_is_a_line_at_first_then_every_few_seconds_and_at_the_end(capsys, clock):
    progress = Progress(every=5.0)
    progress.start("run", 100)
    for step, seconds in ((10, 0), (20, 4), (30, 6), (50, 8), (100, 9), (100, 9)):
        clock[0] = 100.0 + seconds
        progress.show(f"loss {step}", done=step)
    progress.stop()
    assert capsys.readouterr().err.splitlines() == [
        "run 10/100  loss 10",
        "run 30/100  loss 30  0:00:21 left",  # 20 steps in 6 s
        "run 100/100  loss 100  0:00:00 left",
    ]


def test_progress_counts_a_share_of_bytes_or_nothing_at_all(capsys, clock):
    progress = Progress()
    progress.start("tokenising", 4000, 1000, percent=True)
    progress.advance(2000)
    progress.show("0M tokens")
    clock[0] += 11
    progress.show("1M tokens")
    progress.start("tokenising", None, percent=True)
    clock[0] += 11
    progress.show("2M tokens")
    assert capsys.readouterr().err.splitlines() == ["tokenising 75 %  1M tokens", "tokenising 2M tokens"]


def test_quiet_progress_says_nothing(capsys):
    with Progress(quiet=True) as progress:
        progress.start("run", 3)
        progress.show("words", done=3)
        progress.say("more")
    assert capsys.readouterr().err == ""


def test_progress_may_be_a_bar_or_nothing(capsys):
    progress = Progress(every=None)
    progress.start("run", 3)
    progress.show("words", done=3)
    progress.say("a line")
    assert capsys.readouterr().err == "a line\n"


def test_in_a_terminal_progress_is_a_bar_that_goes_away(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress:
        progress.start("run", 3)
        progress.show("loss [1]", done=2)
        progress.say("step 2: [saved]")
    assert "2/3  loss [1]" in seen.getvalue()
    assert "step 2: [saved]" in seen.getvalue()
    assert seen.getvalue().endswith("\x1b[2K")  # the bar's line is erased


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dpeth", "did you mean 'depth' or 'width'?"),
        ("DEPTH", "did you mean 'depth'?"),
        ("e-spa", "did you mean 'c4/e-spa'?"),
        ("n_layer", "did you mean 'depth'?"),
        ("block_size", "there are width, depth, c4/e-spa"),
        ("zzz", "there are width, depth, c4/e-spa"),
        (7, "there are width, depth, c4/e-spa"),
    ],
)
def test_a_hint_is_the_nearest_name_or_all(name, hint):
    assert nearest(name, ["width", "depth", "c4/e-spa"]) == hint


def test_a_field_is_known_by_its_names_elsewhere():
    assert nearest("lr", ["gain_rate", "rate"]) == "did you mean 'rate'?"
    assert nearest("model.block_size", ["model.vocab_size", "model.length"]) == "did you mean 'model.length'?"
    assert nearest("train.block_size", ["model.vocab_size", "model.length"]) != "did you mean 'model.length'?"


def test_of_many_names_a_hint_shows_some():
    assert nearest("zzz", map(str, range(1000, 1100))).endswith("1028, 1029, … (100 in all)")


def test_near_names_may_be_asked_to_be_nearer():
    assert near_names("rates", ["rate", "date"]) == ["rate", "date"]
    assert near_names("rates", ["rate", "date"], cutoff=0.8) == ["rate"]


def test_an_import_that_is_stopped_says_what_its_command_would(capsys, monkeypatch):
    """Text may have been prepared before torch is imported: "nothing was written" would not be true."""

    class Exit(Exception):
        pass

    def leave(code: int) -> None:
        raise Exit(code)

    monkeypatch.setattr(console, "_importing", lambda frame: True)
    monkeypatch.setattr(console, "written_files", [])  # by commands of other tests in this process
    monkeypatch.setattr(console.os, "_exit", leave)
    for words, said in (
        ("stopped; go on", "skipless: stopped; go on\n"),
        (None, "skipless: stopped; nothing was written\n"),
    ):
        command = console.report_interrupt(lambda: console._interrupt(2, None), words)
        with pytest.raises(Exit):
            command()
        assert capsys.readouterr().err == said


def test_a_name_that_steers_a_terminal_is_spelt_out(capsys):
    console.say("red\x1b[31m, \udcff and é")
    assert capsys.readouterr().err == "red\\x1b[31m, \\udcff and é\n"


def test_words_between_colons_stay_words():
    """rich would draw a llama for hf:llama: and a cat for a class of that name."""
    seen = io.StringIO()
    out = Console(file=seen, force_terminal=False)
    console.print_text(out, "hf:llama: the signal")
    console.print_table(out, ("class", "images"), [(":cat:", "3")], [""])
    console.print_table(Console(file=seen, force_terminal=True), ("class", "images"), [(":cat:", "3")], [""])
    assert "hf:llama: the signal" in seen.getvalue()
    assert seen.getvalue().count(":cat:") == 2


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_narrow_terminal_cuts_no_number_and_no_word(width):
    head = ("block", "norm²", "mean cosine", "effective rank", "gradient²", "theory: norm²", "what is said of it")
    rows = [
        ("0", "1.238", "0.1251", "30.72", "1.214", "1.239", "preserved"),
        ("10", "0.0000977", "-0.0483", "2.931", "5.95e+04", "–", "collapse, after which nothing at all is left of it"),
    ]
    page = io.StringIO()
    console.print_table(Console(file=page, width=width, force_terminal=True, color_system=None), head, rows)
    shown = page.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    found = shown.split()
    for text in (*head, *rows[0], *rows[1]):
        assert all(word in found for word in text.split())
    tables = shown.split("\n\n")
    assert all({"block", "0", "10"} <= set(table.split()) for table in tables)


def test_a_wide_terminal_has_one_table_with_every_heading_on_one_line():
    page = io.StringIO()
    rows = [("a", "1", "two words")]
    console.print_table(
        Console(file=page, width=80, force_terminal=True, color_system=None), ("name", "a number", "words"), rows
    )
    assert [line.split() for line in page.getvalue().splitlines()] == [
        ["name", "a", "number", "words"],
        ["a", "1", "two", "words"],
    ]
