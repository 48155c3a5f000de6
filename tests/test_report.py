"""The report page: what it says of complete, unfinished, odd and hostile folders, and that it is whole in itself."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from command_helpers import refusal, run_command
from report_helpers import (
    EVIL,
    Page,
    make_all,
    make_retraining,
    make_search,
    metric_lines,
    page_of,
    pi_lines,
    row,
    write_comparison,
    write_lines,
    write_summary,
)

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.entries import Conditions
from parnas.figures.report import MAX_BYTES, write_report
from parnas.figures.report_answer import headline, tell_blocks
from parnas.figures.report_charts import Scale
from parnas.figures.report_colours import DARK, LIGHT, contrast, ink_on, shade_of
from parnas.run import METRICS, PI, Run
from parnas.training.reporter import Silent

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


# The answer


def test_the_answer_tells_what_is_better_and_what_is_worse(tmp_path: Path) -> None:
    page = page_of(make_all(tmp_path))
    assert "In 1 of its 3 blocks." in page.text
    assert "Self-attention in block 1; feed-forward in block 2; identity in block 3." in page.text
    assert "64.20 perplexity per token, 0.5 % lower (better) than the interleaved network's 64.50" in page.text
    assert "4.10 ms per segment, 2.5 % higher (worse) than the interleaved network's 4.00 ms" in page.text
    assert "Derive warned: block 2 is undecided" in page.text
    assert "One training each: a small difference may be chance." in page.text
    assert "on the test split" in page.text


def test_only_a_network_trained_by_itself_stands_for_the_derived_one(tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    rows = [row("search", "sfi", "derived, in SuperNet", ppl=50.0), row("plain", "sfs", ppl=60.0)]
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows))
    assert "has not been trained from scratch in the runs given here" in page.text
    assert "--arch" in page.text
    assert "(better)" not in page.text


def test_without_a_comparison_the_table_comes_from_the_runs_and_names_the_command_that_times_them(
    tmp_path: Path,
) -> None:
    make_all(tmp_path)
    page = page_of(*(tmp_path / name for name in ("search", "derived", "interleaved")))
    assert "64.20 perplexity per token, 0.5 % lower" in page.text
    assert "Latency was not measured." in page.text
    assert f"parnas evaluate {tmp_path}/derived {tmp_path}/interleaved" in page.text
    assert "ms per segment" not in page.text
    assert "perplexity per token by 272,204 tokens" in page.text


def test_what_makes_a_comparison_unfair_or_empty_is_told(tmp_path: Path) -> None:
    make_search(tmp_path / "search", derived="sfs")
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "same", [row("one", "sfs"), row("two", "sfsi")]))
    assert "It is the interleaved network itself" in page.text
    assert "(better)" not in page.text
    (tmp_path / "search" / "arch.yaml").write_text("arch: sfi\n")
    rows = [row("one", "sfi", steps=10), row("two", "sfs", steps=20)]
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "other", rows))
    assert "They were trained for 10 and 20 steps." in page.text


@pytest.mark.parametrize(
    ("arch", "told"), [("fff", "In none of its 3 blocks."), ("s", "In its only block."), ("sc", "In every one")]
)
def test_headlines(arch: str, told: str) -> None:
    assert headline(Architecture.parse(arch)).startswith(told)
    assert "in 13 blocks" in tell_blocks(Architecture.parse("f*13 s:heads=2"))


# Runs that lack something


def test_a_search_without_derive_says_what_derive_would_take(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "search", derived=None).folder)
    assert "Nothing was derived yet" in page.text
    assert f"parnas derive {tmp_path}/search" in page.text
    assert "block 1: self-attention" in page.text


def test_an_unfinished_search_is_told_as_such(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "search", derived=None, finished=False).folder)
    assert "The search has not ended" in page.text
    assert "Not ended yet: search." in page.text


@pytest.mark.parametrize("spoil", ["empty", "missing"])
def test_a_search_that_logged_nothing_yet_gives_a_page_without_an_answer(spoil: str, tmp_path: Path) -> None:
    run = make_search(tmp_path / "search", derived=None, finished=False)
    for name in (PI, METRICS):
        (run.folder / name).unlink()
        if spoil == "empty":
            (run.folder / name).touch()
    page = page_of(run.folder)
    assert "has not logged any pi yet" in page.text
    assert "No pi was logged yet" in page.text
    assert "No finite loss was logged yet" in page.text
    assert page.data() == []


def test_a_single_logged_step_has_a_heatmap_and_no_slider(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "search", lines=1).folder)
    assert not page.all("input")
    assert "1 logged step." in page.text
    assert len(page.data()[0]["steps"]) == 1
    assert len([each for each in page.all("rect") if each["class"] == "cell"]) == 9


def test_a_retraining_alone_has_its_figures_and_no_search(tmp_path: Path) -> None:
    page = page_of(make_retraining(tmp_path / "derived", "sf").folder)
    assert "No search is among these runs" in page.text
    assert "64.20" in page.text
    assert "#pi" not in [link.get("href") for link in page.all("a")]


def test_losses_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_retraining(tmp_path / "derived", "sf")
    broken = [{"step": 60 + n, "split": "train", "loss": None, "ppl": None} for n in range(3)]
    write_lines(run.folder / METRICS, [*metric_lines(64.0), *broken])
    with (run.folder / METRICS).open("a") as file:
        file.write('{"step": 70, "split": "valid", "loss": NaN, "ppl": Infinity}\n')
    write_summary(run, "retrain", "sf", None)
    page = page_of(run.folder)
    assert "derived logged 4 loss(es) that were not finite" in page.text
    assert "180.50" in page.text
    assert "nan" not in page.text.lower().split()


def test_networks_without_a_finite_perplexity_or_a_latency_are_named_and_not_drawn(tmp_path: Path) -> None:
    rows = [row("one", "sf", ppl=None, word_ppl=None, bits_per_byte=None), row("two", "s", latency_ms=None)]
    page = page_of(write_comparison(tmp_path / "comparison", rows))
    assert "No network has both a finite perplexity and a latency." in page.text
    page = page_of(write_comparison(tmp_path / "comparison", [*rows, row("three", "f")]))
    assert "Not drawn, without a finite perplexity or a latency: one, two." in page.text


def test_runs_of_other_tokenizers_are_compared_by_words_alone(tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    make_retraining(tmp_path / "derived", "sfi")
    make_retraining(tmp_path / "bytes", "sfs", data__tokenizer__kind="byte")
    rows = [row("derived", "sfi", word_ppl=180.0), row("bytes", "sfs", word_ppl=200.0)]
    for each in rows:
        del each["ppl"], each["tokens"]
        each["folder"] = f"../{each['run']}"
    page = page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows))
    assert "180.00 perplexity per word, 10.0 % lower (better)" in page.text
    assert "perplexities per token do not compare and are left out" in page.text
    assert "Bits per byte over the steps" in page.text
    assert page.text.count("ppl per token") == 1  # of the search, which stands outside the comparison


@pytest.mark.parametrize("warnings", ["5", "undecided", "{block: 2}", "[3, [4]]", "null"])
def test_warnings_that_are_none_are_left_out(warnings: str, tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    (run.folder / "arch.yaml").write_text(f"arch: sfi\nwarnings: {warnings}\n")
    assert "Derive warned" not in page_of(run.folder).text


# What the SuperNet's weights reach


def test_a_search_has_the_figures_of_the_one_network_not_of_the_mixture(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    summary = json.loads((run.folder / "summary.json").read_text())
    summary["valid"] = summary["mixture"]  # as a search by the soft estimator has it
    (run.folder / "summary.json").write_text(json.dumps(summary))
    page = page_of(run.folder)
    assert "With the SuperNet's weights it reaches 70.00" in page.text
    assert "99.90" not in page.text


def test_figures_of_the_network_that_the_search_ended_with_are_not_given_to_another(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    (run.folder / "arch.yaml").write_text("arch: fff\n")
    page = page_of(run.folder)
    assert "With the SuperNet's weights" not in page.text
    assert "The search ended with another network, sfi, and validated only that one." in page.text
    assert "search ended with sfi, and validated that network" in page.text
    assert "180.50" not in page.text
    (run.folder / "arch.yaml").write_text("arch: sifi\n")  # identity does nothing
    assert "With the SuperNet's weights it reaches 70.00" in page_of(run.folder).text


@pytest.mark.parametrize(("last", "shown"), [("sfi", True), ("sss", False)])
def test_a_search_that_goes_on_has_the_figure_of_the_string_that_was_validated(
    last: str, shown: bool, tmp_path: Path
) -> None:
    run = make_search(tmp_path / "search", derived=None, finished=False)
    validated = {"step": 40, "split": "valid", "ppl": 99.9, "argmax_ppl": 71.25}
    write_lines(run.folder / METRICS, [validated])
    lines = pi_lines(5, 3)
    lines[3]["arch"], lines[4]["arch"] = "sfi", last
    write_lines(run.folder / PI, lines)
    cells = Page(write_report([run.folder], tmp_path / "page")).source
    assert (">71.25<" in cells) == shown
    assert ">99.90<" not in cells


# Comparisons and the runs they name


def test_a_comparison_knows_its_runs_wherever_they_are_moved_together(tmp_path: Path) -> None:
    make_all(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    page = page_of(tmp_path / "there" / "comparison")
    assert len(page.data()) == 1
    assert page.text.count("Configuration of") == 0
    assert {"search", "derived", "interleaved"} <= set(re.findall(r"\w+", page.text))


def test_evaluate_writes_where_its_runs_are(retrain_run: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    conditions = Conditions("test", mem_len=4, same_length=False, best=True)
    compare([retrain_run.folder], conditions, Silent()).write(tmp_path / "comparison")
    (found,) = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert (tmp_path / "comparison" / found["folder"]).resolve() == retrain_run.folder.resolve()
    assert not Path(found["folder"]).is_absolute()
    assert found["split"] == "test"
    assert found["conditions"] == {"split": "test", "mem_len": 4, "same_length": False, "best": True}
    assert "folder" not in (tmp_path / "comparison" / "comparison.csv").read_text()
    assert "sfs" in page_of(tmp_path / "comparison").text


def test_old_comparisons_and_runs_that_are_gone_still_give_a_table(tmp_path: Path) -> None:
    page = page_of(write_comparison(tmp_path / "old", [row("derived", "sfi"), row("interleaved", "sfs")]))
    assert "since it was written by an older version; give the run folders too" in page.text
    assert "No finite loss" not in page.text
    make_all(tmp_path)
    shutil.rmtree(tmp_path / "derived")
    page = page_of(tmp_path / "comparison")
    assert "The run folder ../derived is not here any more." in page.text
    assert "64.20 perplexity per token, 0.5 % lower" in page.text


def test_a_comparison_moved_away_from_its_runs_says_so(tmp_path: Path) -> None:
    folder = make_all(tmp_path / "here")
    page = page_of(Path(shutil.move(folder, tmp_path / "alone")))
    assert page.text.count("The run folders of the comparison are not where it names them") == 4
    assert not re.search("older version|No finite loss|No search|not known", page.text)


def test_a_front_without_runs_says_that_none_was_given(tmp_path: Path) -> None:
    (tmp_path / "pareto.csv").write_text("network,valid_ppl,cost\nsf,90.5,2.5\n")
    page = page_of(tmp_path)
    assert "No run is among the folders given here" in page.text
    assert not re.search("older version|No finite loss|not known", page.text)


def test_runs_of_an_old_comparison_are_found_by_name(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    rows = json.loads((folder / "comparison.json").read_text())
    write_comparison(folder, [{key: value for key, value in each.items() if key != "folder"} for each in rows])
    page = page_of(*(tmp_path / name for name in ("search", "derived", "interleaved", "comparison")))
    assert "outside the comparison" not in page.text


def test_the_search_beside_the_demos_comparison_is_found(tmp_path: Path) -> None:
    make_all(tmp_path)
    rows = [row("derived", "sfi", folder="derived"), row("interleaved", "sfs", folder="interleaved")]
    page = page_of(write_comparison(tmp_path, rows))
    assert len(page.data()) == 1
    assert "Runs outside the comparison" in page.text


def test_baselines_and_blackbox_fronts_are_drawn(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    (run.folder / "baselines").mkdir()
    networks = [
        {"name": "derived", "cost_share": 0.6, "valid_ppl_mean": 104.3, "valid_ppl_sd": 0.5, "random": False},
        {"name": "lost", "cost_share": 0.6, "valid_ppl_mean": None, "valid_ppl_sd": None, "random": False},
        {"name": "random-1", "cost_share": 0.6, "valid_ppl_mean": 106.0, "valid_ppl_sd": None, "random": True},
    ]
    content = {"metric": "macs", "networks": networks, "answers": [{"text": "derived against chance"}], "notes": []}
    (run.folder / "baselines" / "baselines.json").write_text(json.dumps(content))
    (tmp_path / "blackbox").mkdir()
    front = "network,valid_ppl,cost,trial,source\nsf,90.5,2.5,0,trained\nssf,88.25,3.5,4,trained\n"
    (tmp_path / "blackbox" / "pareto.csv").write_text(front)
    page = page_of(run.folder, tmp_path / "blackbox")
    assert "104.30 ± 0.50 at 0.6" in page.text
    assert "1 random network" in page.text
    assert "derived against chance" in page.text
    assert "Not finite, so not drawn: lost." in page.text
    assert "88.25 at 3.5" in page.text


def test_analyses_come_with_their_pictures_and_what_they_say(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    (folder / "attention.csv").write_text(
        "run,block,layer,part,bucket,positions,weight,per_position\n"
        "derived,1,s,memory,1,8,0.25,0.03\nderived,1,s,segment,1,8,0.5,0.06\nderived,1,s,segment,2,8,0.25,0.03\n"
    )
    (folder / "attention.png").write_bytes(PIXEL)
    (folder / "memory.csv").write_text("run,length,ppl\nderived,0,99.0\n")
    (folder / "memory.png").write_text("<script>alert(1)</script>")
    (folder / "frequency.csv").write_text("run,occurrences,words,ppl\nanother run,all,3,99.0\n")
    page = page_of(folder)
    (picture,) = page.all("img")
    assert "block 1, layer s, memory 25.0%, segment 75.0%" in picture["alt"]
    assert "There was no room for the picture memory.png, or it is none." in page.text
    assert "another run" not in page.text
    assert "--analyse attention,memory" in page.text


# Hostile folders


def test_a_folder_that_is_no_run_is_told_so_and_its_links_are_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "release").symlink_to("/etc/passwd")
    told = refusal(capsys, "report", tmp_path)
    assert "holds neither a run nor a comparison" in told
    assert "link" not in told
    (tmp_path / "config.yaml").write_text("key: value\n")
    told = refusal(capsys, "report", tmp_path)
    assert "environment.json" in told
    assert "link" not in told


def test_a_comparison_beside_other_things_is_reported_whatever_links_they_hold(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    for name in ("bin", "service"):
        (folder / name).mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "service" / "environment.json").write_text("{}")
    (folder / "away").symlink_to(tmp_path / "search")  # a run, but not one of this folder
    assert "64.20 perplexity per token" in page_of(folder).text


@pytest.mark.parametrize(
    "name", ["comparison.json", "baselines.json", "pareto.csv", "memory.csv", "memory.png", "attention-derived.png"]
)
def test_what_is_read_of_a_comparison_may_not_lead_elsewhere(name: str, tmp_path: Path, capsys) -> None:
    folder = make_all(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    if (folder / name).exists():
        (folder / name).rename(elsewhere)
    else:
        elsewhere.write_text("secret")
    (folder / name).symlink_to(elsewhere)
    assert f"{name} is a link that leads out of" in refusal(capsys, "report", folder)


def test_a_pipe_in_place_of_a_picture_is_refused(tmp_path: Path, capsys) -> None:
    folder = make_all(tmp_path)
    os.mkfifo(folder / "memory.png")
    assert "memory.png is no file" in refusal(capsys, "report", folder)


def test_nothing_of_a_folder_becomes_markup(tmp_path: Path) -> None:
    breakout = f"</script><script>alert(1)</script>{EVIL}"
    evil = tmp_path / EVIL.replace("/", "")
    folder = make_all(evil, data__corpus=breakout)
    for name in ("search", "derived"):
        environment = json.loads((evil / name / "environment.json").read_text())
        more = {"device_name": breakout, EVIL: EVIL, "command_line": ["search.py", breakout]}
        (evil / name / "environment.json").write_text(json.dumps(environment | more))
    (evil / "search" / "arch.yaml").write_text(f"arch: sfi\nwarnings: ['{breakout}']\n")
    rows = json.loads((folder / "comparison.json").read_text())
    write_comparison(folder, [*rows, row(breakout, EVIL, EVIL, split=breakout)])
    (folder / "memory.csv").write_text(f'run,{EVIL}\nderived,"{breakout}"\n')
    page = Page(write_report([folder], tmp_path / "page"))
    plain = Page(write_report([make_all(tmp_path / "plain")], tmp_path / "other"))
    assert EVIL not in page.source
    assert len(page.all("script")) == len(plain.all("script"))
    assert not page.all("img")
    assert page.scripts[-1] == plain.scripts[-1]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", "3", "[1]", '[{"run": 1, "arch": "s"}]', '[{"run": "x"}]', '[{"run": "x", "arch": "s", "folder": 3}]'],
)
def test_comparisons_of_the_wrong_kind_are_refused(content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "comparison.json").write_text(content)
    assert "comparison.json" in refusal(capsys, "report", tmp_path)


@pytest.mark.parametrize("figures", [{"ppl": "x"}, {"latency_ms": []}, {"tokens": {}}, {"ppl": 0}, {"latency_ms": -1}])
def test_figures_that_are_none_are_left_out(figures: dict[str, object], tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    rows = [row("derived", "sfi", **figures), row("interleaved", "sfs", **figures), row("odd", "zz(", **figures)]
    assert "zz(" in page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows)).text


@pytest.mark.parametrize("value", [1e308, 1e16, 1e14, 1e-320, 0, -5, 2**63, True, "9"])
def test_figures_beyond_all_measure_are_drawn_or_left_out(value: object, tmp_path: Path) -> None:
    run, derived = make_search(tmp_path / "search"), make_retraining(tmp_path / "derived", "sfi")
    odd = dict.fromkeys(("loss", "ppl", "bits_per_byte", "gap", "tau", "entropy", "expected_cost"), value)
    lines = [{"step": step, "split": split, **odd} for step in (0, 60, 2**62) for split in ("train", "valid")]
    for each in (run, derived):
        write_lines(each.folder / METRICS, [*metric_lines(70.0), *lines])
    rows = [row("derived", "sfi", ppl=value, latency_ms=value, steps=value), row("interleaved", "sfs"), row("odd", "s")]
    folder = write_comparison(tmp_path / "comparison", rows)
    page = page_of(run.folder, derived.folder, folder)
    assert not re.search(r"\b(nan|inf)\b", page.source)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("baselines.json", "[]"),
        ("baselines.json", '{"metric": "macs", "networks": [3], "answers": []}'),
        ("baselines.json", '{"metric": "macs"}'),
        ("pareto.csv", "network,valid_ppl,cost\nsf,nan,1\n"),
        ("pareto.csv", "a,b\n1,2\n"),
    ],
)
def test_fronts_of_the_wrong_kind_are_refused(name: str, content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / name).write_text(content)
    assert name in refusal(capsys, "report", tmp_path)


@pytest.mark.parametrize("summary", [{"valid": 3}, {"valid": {"ppl": "x"}}, {"seconds": []}, {"steps": "many"}])
def test_summaries_of_the_wrong_kind_give_a_page_without_these_figures(summary: dict, tmp_path: Path) -> None:
    run = make_retraining(tmp_path / "derived", "sf")
    (run.folder / "summary.json").write_text(json.dumps(summary))
    page_of(run.folder)


# The page itself


def test_the_page_asks_for_nothing_and_allows_its_own_script_alone(tmp_path: Path) -> None:
    page = page_of(make_all(tmp_path))
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert f"script-src 'sha256-{digest}';" in policy
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert "url(" not in page.source
    assert "@import" not in page.source


def test_the_page_can_be_read_by_a_screen_reader(tmp_path: Path) -> None:
    page = page_of(make_all(tmp_path))
    assert page.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(svg.get("aria-label") or svg.get("aria-hidden") for svg in page.all("svg"))
    assert all(head.get("scope") for head in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [link["href"][1:] for link in page.all("a")]
    assert set(targets) <= set(ids)
    assert "main" in targets
    labels = [svg["aria-label"] for svg in page.all("svg") if svg.get("aria-label")]
    assert not any("At step" in label for label in labels)  # it would be wrong in other frames
    assert not page.all("output")  # a live region, which a screen reader would read out frame by frame
    assert any("from 0.9" not in label and "derived: 64.2 at step 50" in label for label in labels)


def test_frames_are_thinned_and_end_with_the_last_step(tmp_path: Path) -> None:
    (data,) = page_of(make_search(tmp_path / "search", lines=700).folder).data()
    assert len(data["steps"]) == len(data["pi"]) == len(data["strings"]) <= 201
    assert (data["steps"][0], data["steps"][-1]) == (10, 7000)
    assert data["strings"][-1] == "sfi"
    assert [sum(data["pi"][-1][at : at + 3]) for at in (0, 3, 6)] == pytest.approx([100] * 3, abs=1)


def test_a_large_search_gives_a_small_page(tmp_path: Path) -> None:
    space = ["s", *(f"s:heads={heads}" for heads in (2, 4)), "f", *(f"f:d_inner={n}" for n in range(1, 5)), "i"]
    run = make_search(tmp_path / "search", blocks=300, lines=2, derived=None, search__space=tuple(space))
    write_lines(run.folder / PI, pi_lines(300, 300, len(space)))
    path = write_report([run.folder])
    assert path == run.folder / "report.html"
    assert path.stat().st_size < MAX_BYTES
    (data,) = Page(path).data()
    assert len(data["steps"]) >= 15
    assert data["steps"][-1] == 3000


def test_the_only_folder_gets_the_page_and_several_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_command("report", "comparison") == 0
    assert capsys.readouterr().out == "written: comparison/report.html\n"
    assert run_command("report", "search", "derived") == 0
    assert Path("runs/report/report.html").is_file()
    assert run_command("report", "search", "--out", "elsewhere", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["written"] == ["elsewhere/report.html"]


@pytest.mark.parametrize(("name", "cure"), [("nowhere", "give run folders"), ("empty", "evaluate --out")])
def test_other_folders_are_refused_with_the_cure(name: str, cure: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert cure in refusal(capsys, "report", tmp_path / name)
    with pytest.raises(ParnasError, match="nothing to report"):
        write_report([])


def test_equal_folders_give_equal_pages(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    assert write_report([folder], tmp_path / "a").read_bytes() == write_report([folder], tmp_path / "b").read_bytes()


def test_the_report_needs_neither_torch_nor_pyplot() -> None:
    code = "import sys, parnas.figures.report; sys.exit(bool({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Charts and colours


@pytest.mark.parametrize(
    ("scale", "texts"),
    [
        (Scale(0, 1), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (Scale(90, 210), ["100", "150", "200"]),
        (Scale(45, 1300, log=True), ["50", "100", "200", "500", "1,000"]),
        (Scale(1.4521, 1.4534), ["1.4525", "1.4530"]),
        (Scale(3, 3), ["3"]),
        (Scale(1e-9, 3e-9), None),
        (Scale(1, 1e12, log=True), None),
    ],
)
def test_ticks_are_round_and_within_the_range(scale: Scale, texts: list[str] | None) -> None:
    ticks = scale.ticks()
    assert all(-0.01 <= tick.at <= 100.01 for tick in ticks)
    assert texts is None or [tick.text for tick in ticks] == texts
    assert len(ticks) <= 14


def test_contrasts_are_those_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)
    assert (ink_on("#0072b2"), ink_on("#e69f00")) == ("#ffffff", "#000000")


@pytest.mark.parametrize("colour", ["#000000", "#ffffff", "#56b4e9", "#cc79a7", "#0072b2"])
def test_lines_stand_out_on_light_and_on_dark(colour: str) -> None:
    shade = shade_of(colour)
    assert contrast(shade.light, LIGHT) >= 3
    assert contrast(shade.dark, DARK) >= 3
    assert contrast(ink_on(shade.light), shade.light) >= 4.5
