"""The pages agree with the program and the results."""

import re
import runpy
from pathlib import Path
from typing import Any

import demo_seeds
import nbformat
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config as load_site_config
from nbclient import NotebookClient

from parnas.runs.files import read_json

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "commands",
    "configuration",
    "performance",
    "evidence",
    "hybrids",
    "compression",
    "one_run",
    "results",
    "earlier_results",
    "compressive",
    "reliability",
    "scaling",
    "tuning",
    pytest.param("planning", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_made_from_the_models_and_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    page = runpy.run_path(str(ROOT / "docs" / "make" / f"{name}.py"))["render"]()
    made = ROOT / "docs" / f"{name.replace('_', '-')}.md"
    assert made.read_text(encoding="utf-8") == page, f"run docs/make/{name}.py"


def test_the_readme_has_the_figures_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    readme = runpy.run_path(str(ROOT / "docs" / "make" / "readme.py"))["render"]()
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme, "run docs/make/readme.py"
    assert "\n<!-- results: begin -->\n| experiment | question |" in readme


def test_derived_networks_are_compared_with_the_best_of_their_latency(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def record(variant: str, arch: str, latency: float, ppl: float, **more: object) -> dict[str, object]:
        compared = {"percent": 100 * (ppl / 55 - 1), "low": -6.0, "high": -4.0}
        return {
            "variant": variant,
            "arch": arch,
            "latency": latency,
            "ppl": ppl,
            "steps": 3000,
            "seeds": 5,
            "ppl_by_seed": {"1": ppl - 0.1, "2": ppl + 0.1},
            **compared,
            **more,
        }

    result = {
        "variants": [
            record("interleaved", "sfsf", 1.0, 55.0),
            record("one attention layer", "kkkskkk", 0.34, 53.0),
            record("two attention layers", "kkskkskk", 0.46, 52.5),
            record("derived within 0.45", "kksk", 0.45, 52.6),
            record("derived within 0.3", "kkk", 0.29, 58.0, low=4.0, high=6.0),
            record("interleaved, longer", "sfsf", 1.0, 44.0, steps=6000, seeds=1),
        ]
    }
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    page = runpy.run_path(str(ROOT / "docs" / "make" / "hybrids.py"))
    summary, *_, within, cheapest, _, longer = page["describe_search"](result).splitlines()
    assert "from -4.4 to +5.5 %" in summary
    assert "at 29% to 45% of its latency" in summary
    assert "| `kksk` | 3 | 0.45 | 5 | -4.4 %" in within
    assert "| `kkskkskk`: +0.2 % (95 % interval +0.2 to +0.2 %) |" in within, "0.46 counts as equally fast"
    assert cheapest.endswith("| – |"), "no hand-designed network is that fast"
    assert "With 2 times the steps, *interleaved* has a perplexity 20.0 % lower (1 seed)." in longer
    rows = list(runpy.run_path(str(ROOT / "docs" / "make" / "readme.py"))["hybrid_rows"](result))
    assert "at most 10% slower (`kkskkskk`): +0.2 % (95 % interval +0.2 to +0.2 %)." in rows[0].answer
    assert rows[0].answer.startswith("Yes.")
    assert rows[1].answer == "No."
    assert page["difference"](result["variants"][3], {"ppl_by_seed": {"2": 50.0}}) == "+5.4 % (1 seed)", (
        "paired by seed"
    )
    page["draw_search"](result, tmp_path / "hybrids.png")
    assert (tmp_path / "hybrids.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_says_yes_to_a_compression_only_if_the_interval_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def network(name: str) -> dict[str, Any]:
        return {"name": name, "latency": 0.5, "whole": 0.6, "test": 90.0, "total": 0.2}

    def comparison(name: str, other: str, pairs: int, low: float | None, high: float | None) -> dict[str, Any]:
        test = {"percent": -2.0, "low": low, "high": high, "pairs": pairs}
        return {"network": name, "relative_to": other, **test, "percent": 50.0, "test": test}

    longer, names = "parent, twice the steps", ("child 0.7", "child 0.5", "child 0.3")
    result = {
        "blocks": 12,
        "networks": [network(name) for name in ("parent", longer, "search", *names)],
        "comparisons": [
            comparison(longer, "parent", 1, None, None) | {"test": None, "percent": -7.0},
            comparison("child 0.7", "parent", 3, -3.0, -1.0),
            comparison("child 0.7", "scratch 0.7", 3, -4.0, -1.5),
            comparison("child 0.7", "shallower 0.7", 1, None, None),
            comparison("child 0.5", "parent", 3, -3.0, 1.0),
            comparison("child 0.3", "parent", 3, 1.0, 3.0),
        ],
    }
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "make"))
    rows = list(runpy.run_path(str(ROOT / "docs" / "make" / "readme.py"))["compression_rows"](result))
    assert [row.answer.partition(".")[0] for row in rows] == ["Yes", "Not decided: the interval includes 0", "No"]
    assert "-2.0 % (95 % interval -3.0 to -1.0 %) (3 seeds)" in rows[0].figures, "of the test split"
    assert "take 40% of the parent's training time" in rows[0].figures
    assert "twice the steps lower the parent's perplexity by 7.0 % (validation, 1 seed)" in rows[0].answer
    assert "trained from scratch for the parent's time: -2.0 % (95 % interval -4.0 to -1.5 %)." in rows[0].answer
    assert "shallower" not in rows[0].answer, "its trainings are not complete"


def test_the_faq_says_how_many_seeds_got_stuck() -> None:
    records = read_json(ROOT / "benchmarks" / "results" / "demo_seeds-cpu.json")["records"]
    page = " ".join((ROOT / "docs" / "faq.md").read_text(encoding="utf-8").split())
    assert demo_seeds.sentence(records) in page, "benchmarks/demo_seeds.py has other figures"


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site make of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_site_builds_without_a_warning_and_asks_nothing_of_the_web(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build(load_site_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {"index.html", "tutorial.html", "faq.html", "commands.html"} <= pages.keys()
    for text in pages.values():
        fetched = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)", text)
        fetched += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]*", text)
        assert fetched
        assert not [each for each in fetched if "//" in each]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "explore", "compress"])
def test_the_notebooks_run(name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # beside other tests, two threads would wait for each other
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    small = {
        "data.corpus": str(corpus),
        "data.tokenizer.vocab_size": 305,
        "data.batch_size": 4,
        "data.tgt_len": 16,
        "model.d_model": 32,
        "model.d_inner": 32,
        "model.mem_len": 16,
        "search.blocks": 3,
        "search.rerank_top_k": 2,
    }
    parameters.source += f"\nsteps, tokens, more = 12, 200, {small}\n"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert list((tmp_path / "runs" / name).glob("*/summary.json"))


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_with_pictures_and_without_places_of_a_machine(path: Path) -> None:
    assert path.stat().st_size < 1_500_000
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    assert (
        sum("image/png" in output.get("data", {}) or "image/gif" in output.get("data", {}) for output in outputs) >= 2
    )
    told = [str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert not re.search(r"/(tmp|home|root|work|Users|usr)/", "".join(told))
    assert "error" not in {output.output_type for output in outputs}
