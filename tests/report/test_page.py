"""The page: what it says, that it is one safe file of bounded size, and, where there is a browser, what it does."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from skipless.inspection.inspection import BlockSignal, Inspection
from skipless.report.page import (
    ResultTable,
    render,
)
from skipless.theory import kernels
from skipless.theory.certificate import Verdict

NASTY = "</script><img src=x onerror=alert(1)>&\"'\u2028`${1}"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --window-size=1280,1600"
)


def measured(name: str = "e-spa", depth: int = 4, length: int = 12, **changes) -> Inspection:
    """Kernels that grow together with depth, with every field filled."""
    rates = np.linspace(3.0, 0.2, depth + 1)
    base = Inspection.of_states(name, np.stack([kernels.exponential(rate, length) for rate in rates]))
    extra = {"kurtosis": 3.1, "outlier": 4.2, "gradient_mean": 0.9, "gradient_max": 1.4, "attention_first": 0.2}
    predicted = {"norm": 1.0, "cosine": 0.4, "gradient": 1.0}
    blocks = tuple(BlockSignal(**{**vars(block), **extra, "predicted": predicted}) for block in base.blocks)
    fields = {"model": name, "blocks": blocks, "verdict": base.verdict, "kernels": base.kernels}
    return Inspection(**{**fields, **changes})


def collapsed(name: str = "standard") -> Inspection:
    verdict = Verdict("collapse", 2, "Rank collapse at block 2: the mean cosine between locations is 0.9995.")
    return measured(name, verdict=verdict, advice="Use skipless attention, or add skips.")


CURVES = {
    "run one": [
        {"step": step, "loss": 8.0 - step / 50, "ema": 8.1 - step / 50, "gradient": 1.0} for step in range(1, 101)
    ]
    + [{"step": 100, "valid_loss": 6.2, "valid_perplexity": 492.7}]
}


class Page(HTMLParser):
    """Tags with attributes, and the text of the script elements."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts.append(data)

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def test_the_verdict_comes_first_in_plain_words() -> None:
    text = render([measured(), collapsed()])
    assert "The signal is lost in 1 of 2 networks." in text
    assert "collapse: locations are no longer told apart" in text
    assert "Use skipless attention, or add skips." in text
    assert text.index("lost in 1 of 2") < text.index("Rank collapse at block 2") < text.index("<table>")
    assert "The signal reaches the end." in render([measured()])
    assert "<title>e-spa – skipless</title>" in render([measured()])


def test_every_block_is_in_the_table_and_unmeasured_columns_are_not() -> None:
    text = render([measured(depth=3)])
    assert [text.count(f">{name}</th>") for name in ("input", "block 1", "block 3", "block 4")] == [1, 1, 1, 0]
    assert ">kurtosis</th>" in text
    assert ">kurtosis</th>" not in render([Inspection.of_states("x", np.stack([np.eye(4)] * 2))])


def test_no_text_becomes_markup() -> None:
    block = BlockSignal(**{**vars(measured().blocks[1]), "name": NASTY})
    nasty = measured(NASTY, verdict=Verdict("preserved", None, NASTY), advice=NASTY, blocks=(block,), kernels=None)
    page = Page(render([nasty], {NASTY: CURVES["run one"]}, NASTY))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert page.data["networks"][0]["name"] == NASTY
    assert page.data["curves"][0]["name"] == NASTY


def test_the_file_asks_for_nothing() -> None:
    text = render([measured(), collapsed()], CURVES)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|eval\(|innerHTML", text)
    page = Page(text)
    assert not [a for _, attrs in page.tags for a in ("src", "href", "srcset", "action") if a in attrs]
    policy = next(attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_size_of_a_page_of_36_blocks() -> None:
    noise = np.random.default_rng(0)
    states = np.stack([kernels.of_activations(noise.standard_normal((128, 64))) for _ in range(37)])
    one = Inspection.of_states("36 blocks", states)
    kept = Page(render([one])).data["networks"][0]["kernels"]
    assert (kept["side"], kept["stride"]) == (128, 1)
    assert len(render([one]).encode()) < 500_000
    many = render([one] * 12)
    assert len(many.encode()) < 2_500_000
    assert Page(many).data["networks"][0]["kernels"]["stride"] > 1


def test_kernels_come_back_from_the_page() -> None:
    inspection = measured(length=9)
    kept = Page(render([inspection])).data["networks"][0]["kernels"]
    levels = np.frombuffer(base64.b64decode(kept["bytes"]), dtype=np.uint8).reshape(len(kept["blocks"]), -1)
    rows, columns = np.triu_indices(kept["side"])
    assert inspection.kernels is not None
    np.testing.assert_allclose(levels / 127 - 1, inspection.kernels[:, rows, columns], atol=1 / 254 + 1e-12)


def test_a_lost_kernel_is_left_out_and_infinite_numbers_are_null() -> None:
    states = np.stack([np.eye(4), np.full((4, 4), np.inf), np.eye(4)])
    inspection = Inspection.of_states("burst", states)
    assert inspection.verdict.kind == "explosion"
    network = Page(render([inspection])).data["networks"][0]
    assert network["kernels"]["blocks"] == [0, 2]
    assert network["columns"]["norm_mean"] == [1.0, None, 1.0]
    assert network["lost"] == 1


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    records = [{"step": step, "loss": 5.0, "ema": float(step)} for step in range(5000)]
    curve = Page(render([], {"long": records})).data["curves"][0]
    assert len(curve["ema"][0]) == 401
    assert (curve["ema"][0][-1], curve["ema"][1][-1]) == (4999, 4999.0)


def test_curves_alone_and_nothing_at_all() -> None:
    text = render([], CURVES)
    assert "Training curves of 1 run." in text
    assert ">6.2</td>" in text
    with pytest.raises(ValueError, match="nothing to show"):
        render([])


def test_an_inspection_survives_json() -> None:
    inspection = collapsed()
    again = Inspection.from_dict(json.loads(inspection.to_json()))
    assert again.as_dict() == inspection.as_dict()
    assert (again.model, again.verdict, again.blocks) == (inspection.model, inspection.verdict, inspection.blocks)
    with pytest.raises(ValueError, match="damaged or of another version"):
        Inspection.from_dict({"model": "x", "blocks": [{"block": 0}], "verdict": {}})
    odd = measured(verdict=Verdict("fault", 3, "Block 3 (h.2) is odd."), at_fault=True).as_dict()
    assert Inspection.from_dict(odd).at_fault
    assert Inspection.from_dict({name: value for name, value in odd.items() if name != "at_fault"}).at_fault


def test_certificates_keep_the_kernels_that_were_shown() -> None:
    report = {"diagonal_min": 1.0, "diagonal_mean": 1.0, "diagonal_max": 1.0, "mean_cosine": None}
    report |= {"effective_rank": 2.0, "backward_mean": 1.0, "backward_max": 1.0}
    network = {
        "label": "net",
        "certificate": {
            "reports": [{"block": block, **report} for block in range(3)],
            "verdict": {"kind": "preserved", "block": None, "text": "fine"},
        },
        "cosines": {"0": np.eye(3).tolist(), "2": np.ones((3, 3)).tolist()},
    }
    (inspection,) = Inspection.of_certificates({"networks": [network]})
    assert Page(render([inspection])).data["networks"][0]["kernels"]["blocks"] == [0, 2]
    assert inspection.blocks[2].cosine_quantiles == (1.0,) * 5
    assert inspection.blocks[1].cosine_quantiles == ()


def test_claims_are_counted_at_the_top() -> None:
    claims = [("a below b", "pass", "1 against 2"), ("b below c", "fail", ""), ("c below d", "not run", "")]
    tables = [
        ResultTable("losses", ("arm", "ours"), [("a", "1")]),
        ResultTable("bands", ("claim", "verdict", "numbers"), claims, True),
    ]
    page = render([], results=tables)
    assert "Of 3 claims stated before the runs 1 hold, 1 fail, 1 await their runs." in page
    assert page.count('<tr class="lost"><th scope="row">b below c</th>') == page.count('<tr class="lost"') == 1
    assert "claims stated" not in render([], results=tables[:1])


def opened(path: Path, fragment: str = "") -> str:
    """The page's DOM after its script has run, in a browser; any message on the console fails."""
    profile = path.parent / "profile"
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{path.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    assert 'data-ready="true"' in done.stdout, done.stderr[-2000:]
    return done.stdout


@browser
def test_the_page_draws_itself_under_its_own_policy(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render([measured(), collapsed()], CURVES), encoding="utf-8")
    dom = opened(path, "#block=3")
    assert dom.count("<canvas") == 2
    assert dom.count('data-block="3"') == 2
    assert ">after block 3</output>" in dom
    assert dom.count('class="plot"') == 5 + 2  # by block, and of training; one validation is no curve
    assert dom.count('class="lost"') >= 4  # the place of loss, in every chart by block and in the table


@browser
def test_blocks_behind_the_last_kernel_can_be_looked_at(tmp_path: Path) -> None:
    seen = measured()
    seen.kernels[3:] = np.nan
    verdict = Verdict("explosion", 3, "Activations are not finite at block 3.")
    path = tmp_path / "page.html"
    path.write_text(render([measured(kernels=seen.kernels, verdict=verdict)]), encoding="utf-8")
    dom = opened(path, "#block=3")
    assert "e-spa has no kernel from block 3 on: what blocks give there is zero or not finite" in dom
    assert "Not every block" not in dom.partition('id="kernel-note"')[2].partition("</p>")[0]
    assert ">after block 3</output>" in dom
    assert dom.count('data-block="2"') == 1


@browser
def test_slider_play_and_boxes_in_a_browser(tmp_path: Path) -> None:
    script = """
    const seen = {}, canvas = () => document.querySelector("canvas");
    const at = (value) => { slider.value = value; slider.dispatchEvent(new Event("input")); };
    at(0); seen.first = [canvas().toDataURL().length > 100, label.textContent, canvas().dataset.block];
    const before = canvas().toDataURL();
    at(4); seen.last = [canvas().toDataURL() !== before, label.textContent, canvas().dataset.block];
    seen.reading = document.querySelector(".values .at").textContent;
    document.querySelector('[data-network="1"]').click(); seen.canvases = document.querySelectorAll("canvas").length;
    play.click(); seen.pressed = play.getAttribute("aria-pressed");
    setTimeout(() => {
      seen.played = [label.textContent, play.getAttribute("aria-pressed")];
      seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
      document.body.dataset.seen = JSON.stringify(seen);
    }, 3500);
    """
    page = render([measured(), collapsed()])
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    page = page.replace("</body>", f"<script>{script}</script></body>")
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    attribute = re.search(r'data-seen="([^"]*)"', opened(path))
    assert attribute is not None
    seen = json.loads(attribute[1].replace("&quot;", '"'))
    assert seen == {
        "first": [True, "input", "0"],
        "last": [True, "after block 4", "4"],
        "reading": "after block 4 (the last)",
        "canvases": 1,
        "pressed": "true",
        "played": ["after block 4", "false"],
        "overflow": 0,
    }


@browser
@pytest.mark.parametrize("width", [360, 768])
def test_nothing_sticks_out_on_a_narrow_screen(tmp_path: Path, width: int) -> None:
    """In a frame, since a browser window has a smallest width."""
    probe = "const root = document.documentElement; parent.postMessage(root.scrollWidth - root.clientWidth, '*');"
    page = render([measured("a-long-name-" * 12), collapsed()], CURVES)
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    page = page.replace("</body>", f"<script>{probe}</script></body>")
    (tmp_path / "inner.html").write_text(page, encoding="utf-8")
    path = tmp_path / "outer.html"
    path.write_text(
        "<body data-ready='true'><script>onmessage = (m) => { document.body.dataset.over = m.data; }</script>"
        f"<iframe src='inner.html' style='width:{width}px;height:900px;border:0'></iframe>"
    )
    assert 'data-over="0"' in opened(path)


def seen_in_browser(tmp_path: Path, page: str, script: str) -> dict:
    """What the script leaves in `seen` once the page has drawn itself."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    script = f"const seen = {{}}; {script}; document.body.dataset.seen = JSON.stringify(seen);"
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    attribute = re.search(r'data-seen="([^"]*)"', opened(path))
    assert attribute is not None
    return json.loads(attribute[1].replace("&quot;", '"'))


@browser
def test_a_chart_of_what_no_shown_network_has_is_hidden(tmp_path: Path) -> None:
    """Neither an empty box nor the numbers of a network that was switched off."""
    base = measured("with attention")
    blocks = tuple(BlockSignal(**{**vars(block), "attention_spread": 0.5}) for block in base.blocks)
    page = render([measured(), Inspection(**{**vars(base), "blocks": blocks})])
    script = """
    const drawn = () => [...document.querySelectorAll(".chart")].filter((chart) => chart.offsetHeight);
    const visible = () => drawn().map((chart) => chart.firstChild.textContent);
    seen.both = visible();
    document.querySelector('[data-network="1"]').click(); seen.one = visible();
    document.querySelector('[data-network="1"]').click(); seen.again = visible();
    seen.drawn = charts.every((chart) => chart.plot.querySelector("path"));
    """
    seen = seen_in_browser(tmp_path, page, script)
    assert seen["both"][-1] == "Spread of attention"
    assert seen["one"] == seen["both"][:-1]
    assert seen["again"] == seen["both"]
    assert seen["drawn"]


def one_run(values: list[float]) -> list[dict]:
    return [{"step": step, "ema": value} for step, value in enumerate(values, 1)]


@browser
def test_a_run_that_blew_up_does_not_press_the_others_flat(tmp_path: Path) -> None:
    calm = one_run([7.0 - step / 20 for step in range(60)])
    script = """
    const heights = (i) => charted[i].match(/[ML][\\d.]+ [\\d.]+/g).map((p) => Number(p.split(" ")[1]));
    const charted = [...document.querySelectorAll("#curve-charts .plot path.line")].map((p) => p.getAttribute("d"));
    seen.height = Math.max(...heights(0)) - Math.min(...heights(0));
    seen.note = document.querySelector("#curve-charts .note").textContent;
    """
    blown = render([], {"calm": calm, "blown": one_run([7.0 * 1.3**step for step in range(40)])})
    assert seen_in_browser(tmp_path, blown, script)["height"] > 8  # it was 0.1 of 164 points
    seen = seen_in_browser(tmp_path, render([], {"calm": calm}), script)
    assert seen["height"] > 100
    assert seen["note"] == "Cross-entropy in nats per token, smoothed."  # nothing faint is drawn


@browser
def test_runs_of_images_have_accuracies_and_losses_per_image(tmp_path: Path) -> None:
    """Four charts, in one row where there is room; beside a run of text the losses are of both."""
    lines = [{"step": 10 * n, "ema": 2.0 / n, "loss": 1.9 / n, "gradient": 1.0} for n in range(1, 4)]
    lines += [{"step": step, "valid_loss": 1.5, "valid_accuracy": step / 100} for step in (10, 30)]
    script = """
    const drawn = [...document.querySelectorAll("#curve-charts .chart")];
    seen.titles = drawn.map((chart) => chart.firstChild.textContent);
    seen.columns = document.getElementById("curve-charts").className;
    seen.note = document.querySelector("#curve-charts .note").textContent;
    """
    seen = seen_in_browser(tmp_path, render([], {"vit": lines}), script)
    assert seen["titles"] == ["Training loss", "Validation loss", "Validation accuracy", "Gradient norm"]
    assert seen["columns"] == "charts"
    assert seen["note"] == "Cross-entropy in nats per image, smoothed; faint: as logged."
    both = seen_in_browser(tmp_path, render([], {"vit": lines, "text": one_run([7.0, 6.0])}), script)
    assert "nats per token, or per image" in both["note"]


@browser
def test_losses_as_logged_stay_inside_their_chart(tmp_path: Path) -> None:
    """A short run's smoothed loss lags far above them."""
    records = [{"step": step, "ema": 6.3 - step / 1000, "loss": 6.3 - step / 60} for step in range(1, 31)]
    script = """
    const plot = document.querySelector("#curve-charts .plot"), box = plot.getBoundingClientRect();
    const lines = [...plot.querySelectorAll("path.line")].map((line) => line.getBoundingClientRect());
    seen.inside = lines.map((line) => line.bottom <= box.bottom && line.top >= box.top);
    """
    assert seen_in_browser(tmp_path, render([], {"short": records}), script) == {"inside": [True, True]}


@browser
def test_every_kind_of_line_can_be_seen(tmp_path: Path) -> None:
    """Of a pattern with long gaps and short dashes too little ink is left, above all on a dark page."""
    script = "seen.dashes = DASHES.filter((one) => one)"
    for pattern in seen_in_browser(tmp_path, render([], CURVES), script)["dashes"]:
        lengths = [float(part) for part in pattern.split()]
        assert sum(lengths[::2]) / sum(lengths) >= 0.4, pattern


@browser
def test_long_names_hide_no_number(tmp_path: Path) -> None:
    """In a legend what tells names apart often stands at their end; in a table numbers stay in sight."""
    arms = [f"optimisers, small: e-spa-skip-without-norms/muon{end}" for end in ("", "-vo")]
    curves = {name: one_run([7.0, 6.0, 5.0]) for name in (*arms, "x" * 300)}
    script = """
    document.body.style.width = "700px"; // of two columns
    const names = [...document.querySelectorAll(".values .name")].slice(0, 2);
    seen.cut = names.filter((n) => n.scrollWidth > n.clientWidth || n.scrollHeight > n.clientHeight).length;
    const scroll = document.querySelector("#curve-charts + .scroll");
    seen.first = scroll.querySelector("tbody td").getBoundingClientRect().right <= scroll.getBoundingClientRect().right;
    """
    assert seen_in_browser(tmp_path, render([], curves), script) == {"cut": 0, "first": True}


def test_the_stacks_of_one_network_have_one_headline():
    decoder = measured("T5, decoder.block")
    encoder = measured("T5, encoder.block", verdict=Verdict("explosion", 2, "x"), others=(decoder,))
    page = render([encoder, decoder])
    assert "<h1>T5</h1>" in page
    assert [each["name"] for each in Page(page).data["networks"]] == ["encoder.block", "decoder.block"]
    assert "The signal is lost (explosion at block 2 of encoder.block)." in page
    odd = render([measured(verdict=Verdict("fault", 3, "Block 3 (h.2) is odd."), at_fault=True)])
    assert "Block 3 (h.2) is odd." in odd
    assert "fault: something in a block is not as it should be" in odd
    assert '<tr class="lost"><th scope="row">✖ block 3' in odd


@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("Block 2 (h.1) does not carry its input on: it keeps 0.00, the others 1.00.", "does not carry its input on."),
        (
            "fc1.bias of block 2 (h.1) is larger: 1e+03. It is odd in block 3 too.",
            "fc1.bias of block 2 (h.1) is larger.",
        ),
        ("No gradient passes block 2 (h.1): what it gives is detached.", "No gradient passes block 2 (h.1)."),
        ("Rank collapse at block 2 (h.1), in one block: it jumps.", "Rank collapse at block 2 (h.1), in one block."),
        ("fc1.bias of block 2 (h.1) holds it. So it is.", "fc1.bias of block 2 (h.1) holds it."),
        ("fc1.bias of block 2", "fc1.bias of block 2."),
    ],
)
def test_the_headline_names_the_fault_of_a_block(text, headline):
    page = render([measured(verdict=Verdict("vanishing", 2, text), at_fault=True)])
    assert f"{headline}</p>" in page.partition('<p class="headline">')[2].partition("<p class")[0]
    spread = render([measured(verdict=Verdict("vanishing", 2, text))])
    assert "The signal is lost (vanishing at block 2).</p>" in spread


def test_a_long_name_is_broken_between_its_words():
    page = render([measured("T5ForTokenClassification")])
    assert "<h1>T5For<wbr>Token<wbr>Classification</h1>" in page
    assert "<title>T5ForTokenClassification" in page


def test_numbers_of_the_stack_at_fault_are_open():
    decoder = measured("T5, decoder.block")
    encoder = measured("T5, encoder.block", verdict=Verdict("fault", 2, "x"), others=(decoder,))
    assert "<details open><summary>T5, encoder.block" in render([encoder, decoder])
    assert render([encoder, decoder]).count("<details open>") == 1
    assert "<details open>" not in render([measured("T5, encoder.block", others=(decoder,)), decoder])


def test_a_headline_says_no_more_than_its_verdict():
    """A weight that is zero takes no signal away where a shortcut passes it, and notes are not to be overlooked."""
    dead = render([measured(verdict=Verdict("vanishing", 2, "fc2.weight of block 2 (h.1) is zero."), at_fault=True)])
    assert '<p class="headline">fc2.weight of block 2 (h.1) is zero.</p>' in dead
    assert "The signal is lost" not in dead
    doubted = render([measured(notes=("Block 3 (h.2) is frozen.", "h, 3 blocks, was inspected too: preserved."))])
    assert "The signal reaches the end, but read the note below." in doubted
    assert "healthy: the signal survives; 1 thing to look at" in doubted
