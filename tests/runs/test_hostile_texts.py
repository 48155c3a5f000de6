"""Text files of a stranger's run folder: YAML, JSON and tokenizers that lie, are huge, or would execute something."""

import itertools
import json
import os
from pathlib import Path

import pytest
from helpers.command_helpers import refusal, run_command
from helpers.hostile_helpers import COMMANDS

from parnas.config.loader import dump_config
from parnas.config.yaml_file import read_yaml, to_yaml
from parnas.runs.run import Run

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("elsewhere")
LONG, HUGE = "s" * 1_000_000, "9" * 400
PYTHON_OBJECT = "!!python/object/apply:os.system ['touch owned']"


@pytest.mark.parametrize("name", ["config.yaml", "arch.yaml"])
@pytest.mark.parametrize(
    "text",
    [
        PYTHON_OBJECT,
        "arch: !!python/object/apply:os.system ['touch owned']",
        "model: !!python/object/new:os.system ['touch owned']",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{c}: &{c} [{(f'*{p},' * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "a: &a [*a]",
        "a" * (5 << 20),
        "[" * 100_000,
        "\0",
        f"model: {{arch: {LONG}}}",
        f"arch: {LONG}",
        "arch: 2001-01-01",
        "arch: [s, f]",
        "- arch",
        "",
    ],
    ids=range(14),
)
def test_yaml_that_executes_or_explodes_is_refused(name: str, text: str, searched: Run, capsys: Capture) -> None:
    Path("given.yaml").write_text(dump_config(searched.config()))
    (searched.folder / name).write_text(text)
    commands = ("retrain", "plot", "baselines") if name == "arch.yaml" else ("evaluate", "derive", "resume")
    for command in commands if text == PYTHON_OBJECT else commands[1:2]:
        assert str(searched.folder / name) in refusal(capsys, *COMMANDS[command](searched.folder)) or LONG in text
    assert not Path("owned").exists()


WRONG_PI = [
    {"pi": None},
    {"pi": 3},
    {"pi": []},
    {"pi": [[]]},
    {"pi": [["s", "f", "i"]] * 3},
    {"pi": [[0.5, 0.5, None]] * 3},
    {"pi": [[0.5, 0.5, float("nan")]] * 3},
    {"pi": [[2.0, -1.0, 0.0]] * 3},
    {"pi": [[1e308, 1e308, 0.0]] * 3},
    {"pi": [[0.4, 0.3, 0.3]] * 2},
    {"pi": [[0.4, 0.3, 0.3]] * 100_000},
    {"step": -1},
    {"step": True},
    {"step": 1e3},
    {"step": "9"},
    {"step": int(HUGE)},
    {"step": 2**63},
]
WRONG_ARCH = [{"arch": 3}, {"arch": LONG}, {"arch": "ccc"}, {"arch": "s"}]


@pytest.mark.parametrize(
    ("command", "change"),
    [(command, change) for command in ("derive", "plot") for change in WRONG_PI]
    + [("report", WRONG_PI[0])]
    + [(command, change) for command in ("plot", "evaluate") for change in WRONG_ARCH[:2]]
    + [("plot", change) for change in [*WRONG_ARCH[2:], {"tau": "x"}, {"tau": None}]],
    ids=itertools.count(),
)
def test_lines_of_pi_of_the_wrong_kind_are_refused(
    change: dict[str, object], command: str, searched: Run, capsys: Capture
) -> None:
    path = searched.folder / "pi.jsonl"
    first, *_, last = (json.loads(line) for line in path.read_text().splitlines())
    torn = "{" if "step" in change else ""
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, last | change)) + torn)
    error = refusal(capsys, *COMMANDS[command](searched.folder))
    assert str(path) in error or "Block 1 gives" in error or "arch" in change


ODD_METRICS = [
    '{"step": 4, "split": "train", "loss": NaN, "ppl": Infinity, "tokens_per_s": 1}',
    f'{{"step": 4, "split": "train", "ppl": {HUGE}, "tokens_per_s": 1}}',
    '{"step": 4, "split": "train", "ppl": 1e999, "tokens_per_s": 1}',
    '{"step": 4, "split": "train", "ppl": "$x$", "tokens_per_s": "fast"}',
    '{"step": 4, "split": ["train"], "ppl": [1], "tokens_per_s": {}}',
    '{"step": 4, "split": "train"}',
    '{"step": 4}',
    "[4]",
    "null",
    "{" * 100_000,
    "[" * 100_000,
    '{"step": 4, "split": "\\ud800"}',
    '{"step": 4, "split": "\u2028\u0085"}',
]


@pytest.mark.parametrize(
    ("line", "command"),
    [
        *((line, "plot") for line in ODD_METRICS),
        *((ODD_METRICS[number], command) for number in (0, 2, 5) for command in ("evaluate", "report")),
    ],
    ids=range(19),
)
def test_metrics_of_the_wrong_kind_are_refused_or_left_out(
    line: str, command: str, trained: Run, capsys: Capture
) -> None:
    path = trained.folder / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}", encoding="utf-8")
    assert run_command(*COMMANDS[command](trained.folder)) in (0, 2)
    assert len(capsys.readouterr().err) < 4000


READERS = {
    "environment.json": "evaluate",
    "streams.json": "evaluate",
    "summary.json": "evaluate",
    "costs.json": "baselines",
    "rerank.json": "derive",
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "text",
    ["[]", "null", "3", '"x"', "{}", "", "[" * 100_000, '{"kind": ["search"]}', f'{{"step": {HUGE}}}', "NaN", "\0"],
    ids=range(11),
)
def test_json_of_the_wrong_kind_is_refused(name: str, text: str, searched: Run, capsys: Capture) -> None:
    (searched.folder / name).write_text(text)
    assert name in refusal(capsys, *COMMANDS[READERS[name]](searched.folder))


@pytest.mark.parametrize("key", ["data.corpus", "search.cost.table"])
@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "/", "~nobody-here/x", "pipe", "\0", "x" * 300])
def test_paths_of_a_configuration_that_lead_elsewhere_are_read_as_what_they_should_be_or_refused(
    key: str, target: str, searched: Run, capsys: Capture
) -> None:
    os.mkfifo("pipe")
    tree = read_yaml((searched.folder / "config.yaml").read_text(), "config")
    (searched.folder / "rerank.json").unlink()
    section, *between, last = key.split(".")
    inner = tree[section][between[0]] if between else tree[section]
    inner[last] = target
    if between:
        inner |= {"metric": "latency", "target": 0.7}
    (searched.folder / "config.yaml").write_text(to_yaml(tree))
    for command in ("derive", "blackbox") if between else ("evaluate", "blackbox", "rerank_top_k"):
        error = refusal(capsys, *COMMANDS[command](searched.folder))
        assert "root:" not in error


@pytest.mark.parametrize("command", ["evaluate", "blackbox", "rerank_top_k"])
def test_a_network_that_would_fill_the_memory_is_refused_before_it_is_made(
    command: str, searched: Run, capsys: Capture
) -> None:
    tree = read_yaml((searched.folder / "config.yaml").read_text(), "config")
    tree["model"] |= {"d_model": 99_999, "n_heads": 1}
    (searched.folder / "config.yaml").write_text(to_yaml(tree))
    (searched.folder / "rerank.json").unlink()
    assert "are fewer than the" in refusal(capsys, *COMMANDS[command](searched.folder))


def test_running_out_of_memory_is_one_message(searched: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for error in (MemoryError("x"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr("parnas.runs.run.Run.config", lambda run, error=error: (_ for _ in ()).throw(error))
        assert "not enough memory" in refusal(capsys, "derive", searched.folder)


# Tokenizers


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "word", "lowercase": False, "symbols": "\n<unk>"},
        {"kind": "word", "lowercase": False, "symbols": {"\n": 1, "<unk>": 2}},
        {"kind": "word", "lowercase": False, "symbols": ["\n", "<unk>", 3]},
        {"kind": "word", "lowercase": False, "symbols": ["a"]},
        {"kind": "word", "lowercase": False, "symbols": ["\n", "<unk>", "a", "a"]},
        {"kind": "byte", "lowercase": False, "bytes": [10, 10**30]},
        {"kind": "byte", "lowercase": False, "bytes": [10.0, 11]},
        {"kind": "byte", "lowercase": False, "bytes": None},
        {"kind": "sentencepiece", "lowercase": False, "byte_fallback": True, "pieces": [0, 1]},
        {"kind": "os.system"},
        {"kind": ["word"]},
        {"kind": None},
        [],
        "word",
    ],
    ids=range(14),
)
def test_tokenizers_that_are_broken_or_lie_are_refused(settings: object, trained: Run, capsys: Capture) -> None:
    (trained.tokenizer / "tokenizer.json").write_text(json.dumps(settings))
    assert "tokenizer" in refusal(capsys, "evaluate", trained.folder)


def test_a_tokenizer_of_another_size_than_the_network_is_refused(trained: Run, capsys: Capture) -> None:
    symbols = ["\n", "<unk>", "a"]
    (trained.tokenizer / "tokenizer.json").write_text(
        json.dumps({"kind": "word", "lowercase": False, "symbols": symbols})
    )
    assert "The weights in" in refusal(capsys, "evaluate", trained.folder)
