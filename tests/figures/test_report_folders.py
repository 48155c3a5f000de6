"""Input of the report: comparisons, fronts, analyses, and hostile folders."""

import base64
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.command_helpers import refusal
from helpers.report_helpers import (
    EVIL,
    Page,
    make_all,
    make_retraining,
    make_search,
    metric_lines,
    page_of,
    row,
    write_comparison,
    write_lines,
)

from parnas.errors import ParnasError
from parnas.evaluation.comparison import compare
from parnas.evaluation.loading import EvalOptions
from parnas.figures.report.page import write_report
from parnas.runs.run import METRICS, Run
from parnas.training.progress import Silent

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


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
    conditions = EvalOptions("test", mem_len=4, same_length=False, best=True)
    compare([retrain_run.folder], conditions, Silent()).write(tmp_path / "comparison")
    (row_written,) = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert (tmp_path / "comparison" / row_written["folder"]).resolve() == retrain_run.folder.resolve()
    assert not Path(row_written["folder"]).is_absolute()
    assert row_written["split"] == "test"
    assert row_written["conditions"] == {"split": "test", "mem_len": 4, "same_length": False, "best": True}
    assert "folder" not in (tmp_path / "comparison" / "comparison.csv").read_text()
    assert "sfs" in page_of(tmp_path / "comparison").text
    elsewhere = tmp_path / "deep" / "down"
    elsewhere.mkdir(parents=True)
    (tmp_path / "short").symlink_to(elsewhere)
    compare([retrain_run.folder], EvalOptions(), Silent()).write(tmp_path / "short" / "comparison")
    assert "is not here any more" not in page_of(tmp_path / "short" / "comparison").text


def test_comparisons_without_folders_and_runs_that_are_gone_still_give_a_table(tmp_path: Path) -> None:
    page = page_of(write_comparison(tmp_path / "old", [row("derived", "sfi"), row("interleaved", "sfs")]))
    assert "The run folders that the comparison names do not exist any more" in page.text
    assert "No finite loss" not in page.text
    make_all(tmp_path)
    shutil.rmtree(tmp_path / "derived")
    page = page_of(tmp_path / "comparison")
    assert "The run folder ../derived is not there any more." in page.text
    assert "64.20 perplexity per token, 0.5 % lower" in page.text


def test_a_comparison_moved_away_from_its_runs_says_so(tmp_path: Path) -> None:
    folder = make_all(tmp_path / "here")
    page = page_of(Path(shutil.move(folder, tmp_path / "alone")))
    assert page.text.count("The run folders that the comparison names do not exist any more") == 4
    assert not re.search("older version|No finite loss|No search|not known", page.text)


def test_a_front_without_runs_says_that_none_was_given(tmp_path: Path) -> None:
    (tmp_path / "pareto.csv").write_text("network,valid_ppl,cost\nsf,90.5,2.5\n")
    page = page_of(tmp_path)
    assert "No run is among the folders given here" in page.text
    assert not re.search("older version|No finite loss|not known", page.text)


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
    assert "attention.png" in picture["alt"]
    assert "run block layer memory segment derived 1 s 25.0% 75.0%" in page.text
    assert "memory.png is no PNG, or there was no room for it." in page.text
    assert "another run" not in page.text
    assert "--analyse attention,memory" in page.text


# Hostile folders


def test_a_folder_that_is_no_run_is_refused_and_its_links_are_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "release").symlink_to("/etc/passwd")
    message = refusal(capsys, "report", tmp_path)
    assert "holds neither a run nor a comparison" in message
    assert "link" not in message
    (tmp_path / "config.yaml").write_text("key: value\n")
    message = refusal(capsys, "report", tmp_path)
    assert "environment.json" in message
    assert "link" not in message


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
def test_links_out_of_a_comparison_are_refused(name: str, tmp_path: Path, capsys) -> None:
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
    assert "memory.png is a folder or a device" in refusal(capsys, "report", folder)


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


@pytest.mark.parametrize("figures", [{"ppl": 0}, {"latency_ms": -1}, {"ppl": None}])
def test_figures_that_cannot_be_drawn_are_left_out(figures: dict[str, object], tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    rows = [row("derived", "sfi", **figures), row("interleaved", "sfs", **figures), row("odd", "zz(", **figures)]
    assert "zz(" in page_of(tmp_path / "search", write_comparison(tmp_path / "comparison", rows)).text


@pytest.mark.parametrize("figures", [{"ppl": "x"}, {"latency_ms": []}, {"tokens": {}}, {"steps": -1}, {"ppl": True}])
def test_figures_of_the_wrong_kind_are_refused(figures: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=rf"comparison\.json.*{next(iter(figures))}"):
        page_of(write_comparison(tmp_path / "comparison", [row("derived", "sfi", **figures)]))


@pytest.mark.parametrize("value", [1e308, 1e14, 1e-320, 0, -5, 2**63])
def test_figures_beyond_all_measure_are_drawn_or_left_out(value: float, tmp_path: Path) -> None:
    run, derived = make_search(tmp_path / "search"), make_retraining(tmp_path / "derived", "sfi")
    odd = dict.fromkeys(("loss", "ppl", "bits_per_byte", "gap", "tau", "entropy", "expected_cost"), value)
    lines = [{"step": step, "split": split, **odd} for step in (0, 60, 2**62) for split in ("train", "valid")]
    for each in (run, derived):
        write_lines(each.folder / METRICS, [*metric_lines(70.0), *lines])
    rows = [row("derived", "sfi", ppl=value, latency_ms=value), row("interleaved", "sfs"), row("odd", "s")]
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
def test_summaries_of_the_wrong_kind_are_refused(summary: dict, tmp_path: Path) -> None:
    run = make_retraining(tmp_path / "derived", "sf")
    whole = json.loads((run.folder / "summary.json").read_text())
    (run.folder / "summary.json").write_text(json.dumps(whole | summary))
    with pytest.raises(ParnasError, match=rf"summary\.json.*{next(iter(summary))}"):
        page_of(run.folder)
