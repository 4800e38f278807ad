"""What is committed under results/ and told in the documents is what the logs say."""

import json
import re
from pathlib import Path

import pytest

from skipless.paper.experiments import SCALES, Setting
from skipless.paper.index import FIGURES, IN_WORDS, PRINTED, results_index
from skipless.paper.records import ResultsFolder, facts_of
from skipless.paper.runs import make_run
from skipless.paper.tables import TABLES, as_json, gather, markdown

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text()
FOLDERS = {scale: ResultsFolder(ROOT / "results", scale) for scale in SCALES}
DONE = [  # tables that have been run, and the scale
    (file.name.removesuffix(f"-{scale}.json"), scale)
    for scale in SCALES
    for file in sorted((ROOT / "results").glob(f"*-{scale}.json"))
    if file.name.removesuffix(f"-{scale}.json") in TABLES
]


def summary(name: str, scale: str = "small"):
    table, folder = TABLES[name], FOLDERS[scale]
    return gather(table, Setting.of(table.scales[scale], folder.texts(table.on_images)[0]), folder.records)


def claims(*scales: str) -> tuple[int, int]:
    """How many hold and how many do not, on the pages of these scales."""
    pages = [(ROOT / "results" / f"{name}-{scale}.md").read_text() for name, scale in DONE if scale in scales]
    return sum(page.count("| pass |") for page in pages), sum(page.count("| **fail** |") for page in pages)


@pytest.mark.parametrize(("name", "scale"), DONE)
def test_pages_are_made_from_the_logs_as_they_are(name, scale):
    found = summary(name, scale)
    data, page = ((ROOT / "results" / f"{name}-{scale}.{kind}").read_text() for kind in ("json", "md"))
    assert json.loads(data) == json.loads(json.dumps(as_json(found))) | {"skipless": json.loads(data)["skipless"]}
    assert page == markdown(found, f"{name}-{scale}.png")


def test_the_index_is_made_from_the_logs_as_they_are():
    page = (ROOT / "results" / "README.md").read_text()
    assert page == results_index(ROOT / "results", list(FOLDERS.values()))
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / "results" / link).is_file(), link
    assert "Wikipedia (train-00), 28.9M tokens" in page


def rows(head: str) -> list[list[str]]:
    """The cells of the page's table whose head begins so."""
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_the_losses_and_ratios_of_the_optimisers():
    data = as_json(summary("optimisers"))
    found = {row["arm"]: row for row in data["tables"]["train_loss"] if row["multiple"] == 1.0}
    ratios = {line["arm"]: f" ({line['steps to the baseline']}×)" for line in data["ratios"]}
    networks, ways = ("pre-ln", "e-spa", "e-spa-skip", "u-spa", "v-skipinit"), ("adam", "muon", "soap", "muon-vo")
    arms = [[found[f"{network}/{way}"] for way in ways] for network in networks]
    expected = [[f"{arm['ours']:.2f}{ratios.get(arm['label'], '')}" for arm in line] for line in arms]
    told = [[cell.replace("0.90×", "0.9×") for cell in row[1:]] for row in rows("| | Adam | Muon | SOAP")]
    assert told == expected


@pytest.mark.parametrize(
    "row", rows("| table | what came out") + rows("| table, on a CPU"), ids=lambda row: row[0].split("]")[0][1:]
)
def test_the_page_counts_claims_that_hold_and_fail(row):
    page = (ROOT / "docs" / re.search(r"\((.+?\.md)\)", row[0])[1]).read_text()
    held, failed, not_run = (page.count(f"| {mark} |") for mark in ("pass", "**fail**", "not run"))
    word = re.match(r"(\d+) of (\d+)( that have run)?( fails?| hold)?$", row[2])
    assert word, row[2]
    assert int(word[2]) == held + failed
    assert int(word[1]) == (failed if "fail" in (word[4] or "") else held)
    assert bool(word[3]) == bool(not_run)


def test_the_readme_counts_all_claims():
    kernels = (ROOT / "results" / "kernels.md").read_text()
    held, failed = claims("small", "medium")
    held += kernels.count("| pass |")
    here, not_here = claims("cpu")
    told = f"{held} of {held + failed} hold, and {here} of {here + not_here} on a CPU"
    assert told in " ".join((ROOT / "README.md").read_text().split())


def test_the_readme_names_the_rows_of_its_claims_on_mirrored_networks():
    data, readme = as_json(summary("mirrored")), (ROOT / "README.md").read_text()
    found = {row["arm"]: row for row in data["tables"]["train_loss"] if row["multiple"] == 1.0}
    told = re.findall(r"`((?:mirrored|pre-ln)[a-z-]*/[a-z]+)` (\d\.\d+)", readme)
    kinds = {"adam": ("mirrored", "pre-ln", "mirrored-identity"), "muon": ("mirrored-gain", "pre-ln")}
    assert [arm for arm, _ in told] == [f"{kind}/{way}" for way, each in kinds.items() for kind in each]
    for arm, loss in told:
        assert loss == f"{found[arm]['ours']:.2f}", arm
    ratio = next(line for line in data["ratios"] if line["arm"] == found["mirrored-identity/adam"]["label"])
    steps, time = ratio["steps to the baseline"], ratio["the same in wall-clock"]
    assert f"[{steps} times the steps and {time} times the time]" in readme


def test_the_readme_has_the_losses_of_longer_runs():
    data = json.loads((ROOT / "results" / "mirrored-long-medium.json").read_text())
    ends = {row["arm"]: f"{row['ours']:.2f}" for row in data["tables"]["train_loss"] if row["multiple"] == 8.0}
    readme = " ".join((ROOT / "README.md").read_text().split())
    readers, pre_ln = ends["mirrored-readers/muon"], ends["pre-ln/adam"]
    assert f"trained by Muon, ends at {readers} nats after 16,000 steps" in readme
    assert f"trained by Adam, ends at {pre_ln} (" in readme
    assert f"and Muon {readers}, Pre-LN and Adam {pre_ln} |" in readme


def test_the_readme_has_the_losses_of_the_demo():
    data = json.loads((ROOT / "results" / "demo-cpu.json").read_text())
    losses = {network["name"]: f"{network['training_loss']:.2f}" for network in data["networks"]}
    counting = f"{data['counting']['training_loss']:.2f}"
    told = (
        f"ends at {losses['standard']} nats, where the frequencies of symbols alone give {counting}; "
        f"E-SPA at {losses['e-spa']}, Pre-LN at {losses['pre-ln']}, mirrored E-SPA at {losses['mirrored']} "
    )
    assert told in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("log", sorted((ROOT / "results" / "logs").glob("*.jsonl")), ids=lambda log: log.stem)
def test_every_run_in_the_logs_has_the_key_that_its_settings_give_today(log):
    """New fields of a configuration must leave the keys of old runs as they are: tables find runs by them."""
    for line in log.read_text().splitlines():
        run = json.loads(line)
        table = TABLES[run["item"]]
        setting = Setting.of(table.scales[run["scale"]], facts_of(run["text"]))
        numbers = (run["rate"], run["seed"], run["multiple"], run["measure"], run.get("embedding_rate"))
        found = make_run(table, table.arm(run["arm"]), setting, *numbers)
        assert found.key == run["key"], (run["item"], run["arm"])


def test_the_index_has_every_figure_and_table_of_the_paper_in_order():
    page = (ROOT / "results" / "README.md").read_text()
    numbers = re.findall(r"^\| (Fig\. \d+|Table \d+)", page.split("## Claims that do not hold")[0], re.MULTILINE)
    figures, tables = ([n for n in dict.fromkeys(numbers) if n.startswith(kind)] for kind in ("Fig.", "Table"))
    assert figures == [f"Fig. {number}" for number in range(1, 16)]
    assert tables == [f"Table {number}" for number in range(1, 8)]
    assert {item.table for item in (*FIGURES, *PRINTED, *IN_WORDS)} <= {"", *TABLES}
    for name in TABLES:
        assert f"`skipless reproduce {name}" in page, name
    failed = page.split("## Claims that do not hold")[1]
    assert failed.count("\n| ") - 1 == claims(*SCALES)[1]
