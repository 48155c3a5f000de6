"""The commands on the report page, and redaction in them and in all other texts of run folders."""

import json
from pathlib import Path

import pytest
from helpers.report_helpers import make_all, make_retraining, make_search, page_of, row, write_comparison

from parnas.config.loader import Config, dump_config
from parnas.figures.report.commands import reproduction_commands
from parnas.figures.report.data import read_report_data
from parnas.figures.report.secrets import hide, hide_command
from parnas.runs.run import Run

# The commands


def made_by(run: Run, *line: str) -> None:
    environment = json.loads((run.folder / "environment.json").read_text())
    (run.folder / "environment.json").write_text(json.dumps(environment | {"command_line": list(line)}))


def commands_of(*paths: Path) -> str:
    """Return the commands in one line each, with single spaces."""
    return "\n".join(" ".join(line.split()) for line in reproduction_commands(read_report_data(paths)))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (["/x/bin/parnas", "search", "demo"], "parnas search demo"),
        (["C:\\x\\parnas.exe", "search"], "parnas search"),
        (["/x/site-packages/parnas/__main__.py", "search"], "python -m parnas search"),
        (["../search.py", "a.yaml"], "python search.py a.yaml"),
        (["/x/ipykernel_launcher.py", "-f", "/x/k.json"], None),
        (["small.py"], None),
        (["/x/pytest/__main__.py"], None),
        ([""], None),
    ],
)
def test_only_commands_of_parnas_are_shown_as_such(line: list[str], shown: str | None, tmp_path: Path) -> None:
    run = make_search(tmp_path / "run", derived=None)
    made_by(run, *line)
    text = commands_of(run.folder)
    assert (shown or f"# {run.folder} was made from Python: parnas.search(…)") in text
    assert ("made from Python" in text) == (shown is None)
    assert "ipykernel" not in text
    assert "small.py" not in text


@pytest.mark.parametrize(("start", "verb"), [(["/x/bin/parnas"], "demo"), (["/x/parnas/__main__.py"], "pipeline")])
def test_the_demo_and_a_pipeline_are_one_command(start: list[str], verb: str, tmp_path: Path) -> None:
    make_all(tmp_path)
    rows = [row("derived", "sfi", folder="derived"), row("interleaved", "sfs", folder="interleaved")]
    for name in ("search", "derived", "interleaved"):
        made_by(Run(tmp_path / name), *start, verb, "--run", "runs/demo")
    text = commands_of(write_comparison(tmp_path, rows))
    assert text.count(f"parnas {verb} --run runs/demo") == 1
    assert "parnas derive" not in text
    assert "parnas evaluate" not in text
    (tmp_path / "search" / "arch.yaml").write_text("arch: sfi\nconstraints: {max: {s: 1}}\nfinalists: [sfi, sfs]\n")
    assert "parnas derive" not in commands_of(tmp_path)


def test_later_commands_on_the_runs_of_the_demo_are_shown(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    for name in ("search", "derived", "interleaved"):
        made_by(Run(tmp_path / name), "parnas", "demo")
    (tmp_path / "search" / "arch.yaml").write_text("arch: sfi\nconstraints: {top_k: 3}\n")
    text = commands_of(folder)
    assert "parnas derive" in text
    assert "parnas evaluate" in text


def test_derive_is_shown_with_its_constraints(tmp_path: Path) -> None:
    run = make_search(tmp_path / "search")
    assert f"parnas derive {run.folder} # arch.yaml does not record" in commands_of(run.folder)
    arch = run.folder / "arch.yaml"
    arch.write_text("arch: sfi\nconstraints: {}\n")
    assert f"parnas derive {run.folder}" in commands_of(run.folder)
    assert "whether with" not in commands_of(run.folder)
    arch.write_text(
        "arch: sfi\nconstraints: {cost_target: 0.65, metric: macs, rerank_top_k: 0, max: {s: 1, 's:heads=2': 2}}\n"
    )
    text = f"parnas derive {run.folder} --cost-target 0.65 --metric macs --rerank-top-k 0 --max s=1 --max s:heads=2=2"
    assert text in commands_of(run.folder)
    arch.write_text("arch: sfi\nconstraints: {within: {macs: 0.5, cache: 0.25}}\n")
    assert f"parnas derive {run.folder} --within macs=0.5,cache=0.25" in commands_of(run.folder)
    arch.write_text("arch: sfi\nconstraints: {cost_target: [1], max: 3}\n")
    assert f"parnas derive {run.folder}" in commands_of(run.folder)


def test_evaluate_is_shown_with_its_conditions(tmp_path: Path) -> None:
    folder = make_all(tmp_path)
    assert f"--split test --out {folder}" in commands_of(folder)
    rows = json.loads((folder / "comparison.json").read_text())
    asked = {"split": "test", "cmem_len": 8, "clamp_len": 40, "same_length": False, "best": True}
    write_comparison(folder, [each | {"conditions": asked} for each in rows])
    text = commands_of(folder).partition("parnas evaluate")[2]
    assert f"--split test --cmem-len 8 --clamp-len 40 --any-length --best --out {folder}" in text
    assert "is not known" not in text
    write_comparison(folder, [each | {"conditions": {"best": ["x"], "mem_len": {}}} for each in rows])
    assert f"--split test --out {folder}" in commands_of(folder)


# Redaction


def test_accounts_and_secrets_are_not_on_the_page(tmp_path: Path) -> None:
    run = make_retraining(tmp_path / "derived", "sf", data__corpus="s3://me:hush@host/x?access_key=sesame")
    made_by(run, "/x/parnas", "blackbox", "--storage", "postgresql://me:hush@host/db", "--token", "sesame")
    environment = json.loads((run.folder / "environment.json").read_text())
    text = environment | {"api_key": "rosebud", "nested": {"pwd": "rosebud"}, "cores": 4}
    (run.folder / "environment.json").write_text(json.dumps(text))
    page = page_of(run.folder)
    assert not any(word in page.source for word in ("hush", "sesame", "rosebud"))
    assert "parnas blackbox --storage postgresql://***@host/db --token ***" in page.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
        ("access_key: abc", "access_key: ***"),
        ("--key=abc --run runs/a", "--key=*** --run runs/a"),
        ("--api-token abc --run runs/a", "--api-token *** --run runs/a"),
        ("private_key=abc", "private_key=***"),
        ("PGPASSWORD = abc", "PGPASSWORD = ***"),
        ("pwd=abc", "pwd=***"),
        ("token: nullable", "token: ***"),
        ("passphrase: several words\nnext: 1", "passphrase: ***\nnext: 1"),
        ("password='a b' rest", "password=*** rest"),
        ("password='it''s' rest", "password=*** rest"),
        ('password="a \\" b" rest', "password=*** rest"),
        ("password='never closed", "password=***"),
        ("{'secret': 'a b', 'x': 1}", "{'secret': ***, 'x': 1}"),
        ("corpus: 's3://bucket?secret_key=abc'", "corpus: 's3://bucket?secret_key=***'"),
        ("postgresql://u:p/w@host/db", "postgresql://***@host/db"),
        ("postgresql://u:p@w@host/db", "postgresql://***@host/db"),
        ("https://abc@host/x", "https://***@host/x"),
    ],
)
def test_secrets_are_hidden_whole(text: str, shown: str) -> None:
    assert hide(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "corpus: /data/token list.txt",
        "data.tokenizer.kind=byte",
        "tokenizer:\n  vocab_size: 12000\ntrain_tokens_per_s: 3",
        "a note on the key idea",
        "token: null",
        "keyboard: us",
        "secrets:\n  none: 1",
        "http://host:8080/path@v2",
        "git+https://host/x/y@main",
        dump_config(Config()),
        dump_config(Config().replace(search__rerank_tokens=8192)),
    ],
)
def test_other_text_stays(text: str) -> None:
    assert hide(text) == text


def test_a_command_line_keeps_its_words_and_loses_its_secrets() -> None:
    words = ["parnas", "--token", "a b", "password=a b", "--storage", "mysql://u:p@h/d", "x=key y", "data.corpus=a b"]
    shown = "parnas --token *** password=*** --storage mysql://***@h/d 'x=key y' 'data.corpus=a b'"
    assert hide_command(words) == shown


@pytest.mark.parametrize("text", ["a", "key=", "a://", "a://b:", "key: '", "--key ", 'key=\\"', "' "])
def test_long_texts_are_read_in_passing(text: str) -> None:
    assert hide(text * (200_000 // len(text)))
