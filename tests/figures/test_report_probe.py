"""The page of a probe: its first sentence, heat map, networks, pairs and conditions, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from helpers.command_helpers import refusal, result_of
from helpers.report_helpers import EVIL, Page, make_retraining, page_of

from parnas.errors import ParnasError
from parnas.figures.probe import read_probe
from parnas.figures.report.page import write_report

ANSWER = "Layer 1 needs attention; without it in the other the model is 1.6 times as fast at 1.0% higher perplexity."


def network(layers: str, rise: float, latency: float = 0.5) -> dict:
    figures = {"kl": 0.2, "predicted_kl": 0.15, "predicted_rise": rise / 2, "speed": 1.6}
    return {"layers": layers, "rise": rise, "latency": latency, **figures}


def make_probe(folder: Path, **changes: object) -> Path:
    loss = {name: {"loss": kl / 2, "kl": kl} for name, kl in (("s:heads=2", 0.002), ("f:d_inner=16", 0.03), ("i", 0.4))}
    attention = {name: loss[name] for name in ("s:heads=2", "i")}
    feed_forward = {name: loss[name] for name in ("f:d_inner=16", "i")}
    content = {
        "answer": ANSWER,
        "network": "sfif",
        "loss": 4.0,
        "tokens": 8192,
        "layers": ["s", "f", "s", "f"],
        "changes": [attention, feed_forward, attention, feed_forward],
        "pairs": [{"layers": [1, 3], "both": {"loss": 0.3, "kl": 0.9}, "predicted": {"loss": 0.4, "kl": 0.8}}],
        "milliseconds": {"softmax": 3.0, "s": 2.0, "f": 1.0, "s:heads=2": 1.5, "i": 0.0},
        "attention": [network("sfif", 0.01), network("ifif", 0.7, 0.2)],
        "front": [network("s:heads=2 f s:heads=2 f", 0.02, 0.8)],
        "conditions": {
            "model": "runs/derived",
            "text": None,
            "source": "the validation split of wikitext-2",
            "requested_tokens": 9000,
            "device_name": "a machine",
            "precision": "fp32",
            "seconds": 250.0,
        },
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.json").write_text(json.dumps(content))
    return folder


def first_paragraph(page: Page) -> str:
    """Return the first text below the title."""
    after = page.source.split("</h1>", 1)[1]
    return re.sub(r"<[^>]+>", "", re.search(r"<p[^>]*>(.*?)</p>", after, re.DOTALL)[1])


def test_the_first_sentence_is_the_answer(tmp_path: Path) -> None:
    page = page_of(make_probe(tmp_path / "probe"))
    assert first_paragraph(page) == ANSWER
    measured = "Measured on 8,192 tokens of the validation split of wikitext-2, on a machine in fp32, in 4.2 minutes"
    assert measured in page.text
    assert "parnas report · derived" in page.text


def test_the_heat_map_has_a_cell_for_each_replacement_and_a_name(tmp_path: Path) -> None:
    page = page_of(make_probe(tmp_path / "probe"))
    cells = [each for each in page.all("i") if each.get("class") == "cell"]
    assert len(cells) == 8, "each layer has two of the three replacements"
    shares = [int(re.search(r"--share:(\d+)%", str(each["style"]))[1]) for each in cells]
    assert max(shares) == 100
    assert sorted(set(shares)) == [12, 57, 100], "the logarithm of the loss, from 0.001 to 0.4 nats"
    for text in (".002", ".030", ".40"):
        assert text in page.text
    labels = " ".join(str(each.get("aria-label")) for _, each in page.tags)
    assert "Heat map: 3 replacements in rows, 4 layers in columns." in labels


def test_networks_have_predicted_and_measured_perplexities(tmp_path: Path) -> None:
    page = page_of(make_probe(tmp_path / "probe"))
    table = page.source[page.source.index("Networks with several layers replaced") :]
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    assert rows[1][0] == "unchanged"
    assert rows[1][-7:] == ["1.00", "1.00", "–", "54.60", "–", "–", "–"]
    assert {"1", "with", "attention", "0.50", "1.60", "54.87", "55.15", "+1.0%"} <= set(rows[2])
    assert {"0.80", "of", "the", "latency", "55.70", "+2.0%"} <= set(rows[4])
    assert "0 attention layers: 109.95 at 0.2" in " ".join(str(each.get("aria-label")) for _, each in page.tags)


def test_replacements_pairs_and_conditions_are_listed(tmp_path: Path) -> None:
    page = page_of(make_probe(tmp_path / "probe"))
    assert "1 s s:heads=2 0.0020 +0.0010 2.00 → 1.50" in page.text
    assert "2 f f:d_inner=16 0.0300 +0.0150 1.00 → –" in page.text
    assert "1 and 3 0.9000 0.8000" in page.text
    assert "Both together lose 1.12 times the sum of each alone" in page.text
    assert "time of the probe 4.2 minutes" in page.text
    command = f"parnas probe runs/derived --tokens 9000 --pairs 1 --out {tmp_path}/probe"
    assert command in page.text
    for absent in ("Learning curves", "Comparison", "Configuration"):
        assert absent not in page.text


def test_without_pairs_and_conditions_the_page_has_the_rest(tmp_path: Path) -> None:
    page = page_of(make_probe(tmp_path / "probe", pairs=[], conditions=None))
    assert "Do losses add up" not in page.text
    assert "Measured on 8,192 tokens, without any training." in page.text
    assert "The command lines are not known." in page.text


def test_the_worst_networks_are_counted_and_not_drawn(tmp_path: Path) -> None:
    page = page_of(make_probe(tmp_path / "probe", attention=[network("sfif", 0.01), network("ifif", 2.0)]))
    assert "Not drawn, with four times the model's perplexity or more: 1." in page.text
    assert page_of(make_probe(tmp_path / "other", attention=[], front=[])).text.count("attention layers:") == 0


def test_values_that_are_not_finite_have_no_cell(tmp_path: Path) -> None:
    changes = [{"i": {"loss": None, "kl": None}}, {"i": {"loss": 0.1, "kl": 0.1}}]
    small = {"layers": ["s", "f"], "changes": changes, "network": "sf", "attention": [], "front": [], "pairs": []}
    page = page_of(make_probe(tmp_path / "probe", **small))
    assert len([each for each in page.all("i") if each.get("class") == "cell"]) == 1


def test_a_probe_and_runs_may_share_a_page(tmp_path: Path) -> None:
    run = make_retraining(tmp_path / "derived", "sfsf")
    page = page_of(make_probe(tmp_path / "probe"), run.folder)
    assert first_paragraph(page) == ANSWER
    assert "Learning curves" in page.text
    assert "No search is among these runs" not in page.text
    twice = page_of(tmp_path / "probe", make_probe(tmp_path / "second", answer="The model has no attention layer."))
    assert ANSWER in twice.text
    assert "The model has no attention layer." in twice.text


def test_texts_of_a_probe_are_escaped_and_secrets_hidden(tmp_path: Path) -> None:
    content = json.loads((make_probe(tmp_path / "probe") / "probe.json").read_text())
    conditions = content["conditions"] | {"model": EVIL, "source": "https://me:secret@there", "device_name": EVIL}
    page = page_of(make_probe(tmp_path / "probe", answer=EVIL, conditions=conditions))
    assert not [each for each in page.all("img") if each.get("src") == "x"]
    assert "secret" not in page.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ["s", "f"]}, "value for each layer"),
        ({"layers": []}, "value for each layer"),
        ({"network": "sf"}, "value for each layer"),
        ({"front": [network("sf", 0.1)]}, "value for each layer"),
        ({"layers": ["s", "f", "s", "?"]}, "not known here"),
        ({"changes": [{"": {"loss": 1.0, "kl": 1.0}}] * 4}, "not known here"),
        ({"attention": [network("", 0.1)]}, "not known here"),
        ({"loss": "much"}, "no valid loss"),
        ({"tokens": -1}, "no valid tokens"),
        ({"pairs": [{"layers": [1]}]}, "no valid pairs"),
        ({"answer": None}, "no valid answer"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, changes: dict, message: str) -> None:
    folder = make_probe(tmp_path / "probe", **changes)
    for read in (lambda: read_probe(folder / "probe.json"), lambda: write_report([folder])):
        with pytest.raises(ParnasError, match=message) as refused:
            read()
        assert "probe.json" in str(refused.value)
    assert not (folder / "report.html").exists()


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    make_probe(tmp_path / "private")
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "probe.json").symlink_to(tmp_path / "private" / "probe.json")
    with pytest.raises(ParnasError, match="leads out"):
        write_report([tmp_path / "probe"])


def test_report_takes_the_folder_of_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_probe(tmp_path / "probe")
    assert result_of(capsys, "report", folder)["written"] == [str(folder / "report.html")]
    assert "or probe wrote" in refusal(capsys, "report", tmp_path)
