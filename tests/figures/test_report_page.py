"""The report page itself: whole, small, readable by all, its charts and colours."""

import base64
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.command_helpers import refusal, run_command
from helpers.report_helpers import (
    Page,
    make_all,
    make_search,
    page_of,
    pi_lines,
    write_lines,
)

from parnas.errors import ParnasError
from parnas.figures.colours import DARK, LIGHT, contrast, shade_of
from parnas.figures.report.page import MAX_BYTES, write_report
from parnas.runs.run import PI

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
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page.source))
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
    write_lines(run.folder / PI, pi_lines(160, 300, len(space)))
    path = write_report([run.folder])
    assert path == run.folder / "report.html"
    assert path.stat().st_size < MAX_BYTES
    (data,) = Page(path).data()
    assert len(data["steps"]) >= 15
    assert data["steps"][-1] == 1600


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


@pytest.mark.parametrize(("name", "hint"), [("nowhere", "give run folders"), ("empty", "evaluate --out")])
def test_other_folders_are_refused_with_a_hint(name: str, hint: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert hint in refusal(capsys, "report", tmp_path / name)
    with pytest.raises(ParnasError, match="nothing to report"):
        write_report([])


def test_equal_folders_give_equal_pages(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    assert write_report([folder], tmp_path / "a").read_bytes() == write_report([folder], tmp_path / "b").read_bytes()


# Charts and colours


def test_contrasts_are_those_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize("colour", ["#000000", "#ffffff", "#56b4e9", "#cc79a7", "#0072b2"])
def test_lines_stand_out_on_light_and_on_dark(colour: str) -> None:
    shade = shade_of(colour)
    assert contrast(shade.light, LIGHT) >= 3
    assert contrast(shade.dark, DARK) >= 3
