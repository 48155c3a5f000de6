"""Fuzzing of what is read from run folders: lines of JSON, manifests of checkpoints, JSON and YAML files.

Each case ends in a `ParnasError` or in what a slow and obvious reader finds; any other exception fails the test.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fuzz_helpers import Cases, cases, damage, mutate, values
from hypothesis import given, settings
from hypothesis import strategies as st

from parnas.architecture import Architecture
from parnas.config.yaml_file import read_yaml, to_yaml
from parnas.data.streams import StreamHeader
from parnas.nas.cost import read_costs
from parnas.nas.rerank import read_rerank
from parnas.runs.files import from_json, to_json
from parnas.runs.records import Record
from parnas.runs.run import METRICS, Run
from parnas.training.checkpoints import newest_checkpoint, verify_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # the other tests cover what these read
__all__ = ["cases"]

draws = st.randoms(use_true_random=False)


# Lines of JSON

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
fields = st.dictionaries(st.text(max_size=5), plain | st.text(max_size=5) | st.lists(plain, max_size=3), max_size=3)
steps = st.integers(0, 40) | st.sampled_from([2**63 - 1, 2**63, -1, True, None, 1.0, "1"])
record_lines = st.builds(
    lambda given, step, ascii_only: json.dumps({**given, "step": step}, ensure_ascii=ascii_only).encode(),
    fields,
    steps,
    st.booleans(),
)
junk_lines = st.binary(max_size=12) | st.sampled_from(
    [b"", b" ", b"[]", b"3", b"null", b'{"step": ', b"[" * 5000, b"\xff", b"\r"]
)


def read_obviously(content: bytes) -> list[dict[str, Any]] | None:
    """The records of a file of lines, the last of which may be torn; none where another line is no record."""
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            return records if number == len(lines) else None
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= 2**63 - 1:
            return None
        records.append(record)
    return records


def test_lines_of_json_are_read_as_they_are_or_refused(cases: Cases, tmp_path: Path) -> None:
    run, path = Run(tmp_path), tmp_path / METRICS

    @settings(max_examples=400)
    @given(
        st.lists(record_lines, max_size=4),
        st.lists(junk_lines, max_size=2),
        st.sampled_from([b"\n", b"\r\n"]),
        draws,
        st.integers(0, 20),
        steps,
    )
    def check(records, junk, end, draw, torn, cut) -> None:
        lines = [*records, *junk]
        if draw.random() < 0.3:
            draw.shuffle(lines)
        content = b"".join(line + end for line in lines)
        content = content[: len(content) - torn] if draw.random() < 0.5 else content
        path.write_bytes(content)
        result, expected = cases.attempt(lambda: run.raw_lines(METRICS)), read_obviously(content)
        assert same(result, expected)
        if type(cut) is int:
            cases.attempt(lambda: run.truncate_after(cut))
            if expected is None:
                assert path.read_bytes() == content
            else:
                earlier = [record for record in expected if record["step"] <= cut]
                assert same(read_obviously(path.read_bytes()), earlier)
                assert path.read_bytes().endswith(b"\n") or not earlier

    check()


def same(one: object, other: object) -> bool:
    """Equality that tells 1, 1.0 and true apart."""
    return repr(one) == repr(other)


def test_any_json_is_read_as_by_python_or_refused(cases: Cases) -> None:
    @settings(max_examples=300)
    @given(values.map(json.dumps), draws, st.booleans())
    def check(text, draw, damaged) -> None:
        if damaged:
            text = damage(text.encode(), draw).decode("utf-8", errors="replace")
        cases.count += 1
        try:
            expected = (json.loads(text),)
        except (ValueError, RecursionError):
            expected = None
        try:
            result = (from_json(text),)
        except ValueError:
            result = None
        too_large = any(len(part) > 19 for part in "".join(c if c.isdigit() else " " for c in text).split())
        assert same(result, expected) or (result is None and (too_large or "\\ud" in text.lower()))

    check()


# Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Three checkpoints whose files are small, and their copy to start from."""
    for step in (8, 16, 24):
        folder = tmp_path / "whole" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        files = {name: f"{name} {step}".encode() * 10 for name in ("model.safetensors", "state.pt")}
        for name, content in files.items():
            (folder / name).write_bytes(content)
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        (folder / "manifest.json").write_text(json.dumps({"step": step, "sha256": hashes}))
    return tmp_path / "whole"


def is_whole(folder: Path) -> bool:
    """Whether the manifest of a checkpoint has the hashes of its two files."""
    try:
        hashes = from_json((folder / "manifest.json").read_bytes().decode())["sha256"]
        return all(
            hashes[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "state.pt")
        )
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return False


def test_the_newest_whole_checkpoint_is_found_however_others_are_damaged(
    cases: Cases, checkpoints: Path, tmp_path: Path
) -> None:
    place = tmp_path / "damaged"

    @settings(max_examples=300)
    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), values), min_size=1, max_size=4), draws)
    def check(changes, draw) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(checkpoints, place)
        folders = sorted(place.iterdir())
        for which, how, value in changes:
            manifest = folders[which] / "manifest.json"
            weights = folders[which] / draw.choice(["model.safetensors", "state.pt"])
            match how:
                case 0:
                    weights.unlink(missing_ok=True)
                case 1:
                    weights.write_bytes(damage(weights.read_bytes() if weights.exists() else b"", draw))
                case 2 | 3:
                    manifest.write_bytes(damage(manifest.read_bytes(), draw))
                case _:
                    tree = json.loads((checkpoints / folders[which].name / "manifest.json").read_text())
                    manifest.write_text(json.dumps(mutate(tree, draw, value)))
        whole = [folder for folder in folders if is_whole(folder)]
        assert [folder for folder in folders if verify_checkpoint(folder)] == whole
        notes: list[str] = []
        result = cases.attempt(lambda: newest_checkpoint(place, notes.append))
        assert result == (whole[-1] if whole else None)
        assert len(notes) == len(folders) - (folders.index(result) + 1 if result else 0)

    check()


# Files of a run


@pytest.fixture
def small_run(search_run: Run, tmp_path: Path) -> Run:
    """The small files of a search."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in search_run.folder.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    per_layer = {"s": 300.0, "f": 200.5, "i": 0.0}
    (folder / "costs.json").write_text(json.dumps({"metric": "macs", "per_layer": per_layer, "interleaved": 800.5}))
    trial = {"evaluation": "cache", "settings": "size 40", "loss": 2.5, "ppl": 12.2}
    tuned = {
        **{"arch": "sfs", "step": 24, "tgt_len": 8, "mem_len": 8, "split": "valid", "tokens": 100, "notes": ["a"]},
        **{"plain": {**trial, "evaluation": "plain"}, "trials": [trial]},
        "chosen": {"cache": {**trial, "cache": {"size": 40, "theta": 0.5, "weight": 0.1}}},
    }
    (folder / "tuned_eval.json").write_text(json.dumps(tuned))
    (folder / "arch.yaml").write_text(
        "arch: sfs\nmethod: argmax of pi\ncounts: {s: 2, f: 1}\nblocks:\n- {layer: s, margin: 0.5}\n"
    )
    return Run(folder)


def check_costs(costs: Any, tree: Any) -> None:
    assert all(costs.per_layer[name] == float(cost) >= 0 for name, cost in tree["per_layer"].items())
    assert costs.interleaved == float(tree["interleaved"]) > 0
    assert costs.metric == tree["metric"]


def check_equal(result: Record, tree: Any) -> None:
    assert from_json(to_json(result.to_dict())) == json.loads(json.dumps(tree), parse_constant=lambda _: None)


def check_reranked(result: Any, tree: Any) -> None:
    untargeted = [each for each in tree["networks"] if "target" not in each]
    assert result == {} or {Architecture.parse(each["arch"]).layers for each in untargeted} == set(result)


READERS: dict[str, tuple[Callable[[Run], Any], Callable[[Any, Any], None]]] = {
    "streams.json": (lambda run: StreamHeader.read(run.folder / "streams.json"), check_equal),
    "costs.json": (lambda run: read_costs(run.folder), check_costs),
    "environment.json": (Run.environment, check_equal),
    "summary.json": (Run.summary, check_equal),
    "rerank.json": (lambda run: read_rerank(run, 24), check_reranked),
    "tuned_eval.json": (Run.tuned_eval, check_equal),
}


@pytest.mark.parametrize("name", READERS)
def test_json_files_of_a_run_are_read_as_they_are_or_refused(cases: Cases, name: str, small_run: Run) -> None:
    path = small_run.folder / name
    whole = path.read_bytes()
    read, agree = READERS[name]

    @settings(max_examples=120)
    @given(draws, values, st.integers(0, 3))
    def check(draw, value, how) -> None:
        tree = mutate(json.loads(whole), draw, value)
        path.write_bytes(json.dumps(tree).encode() if how else damage(whole, draw))
        result = cases.attempt(lambda: read(small_run))
        if result is not None:
            agree(result, json.loads(path.read_bytes(), parse_constant=lambda _: None))

    check()


def test_an_arch_yaml_is_read_as_it_is_or_refused(cases: Cases, small_run: Run) -> None:
    path = small_run.folder / "arch.yaml"
    whole = path.read_bytes()

    @settings(max_examples=200)
    @given(draws, values, st.booleans())
    def check(draw, value, damaged) -> None:
        text = damage(whole, draw) if damaged else to_yaml(mutate(yaml_tree(whole), draw, value)).encode()
        path.write_bytes(text)
        result = cases.attempt(small_run.derivation)
        if result is not None:
            assert from_json(to_json(result.to_dict())) == yaml_tree(text)
            assert Architecture.parse(result.arch)

    check()


def yaml_tree(text: bytes) -> Any:
    """A YAML text as JSON has it."""
    return json.loads(json.dumps(read_yaml(text.decode(), "the text")))
