"""The findings of `parnas doctor`."""

import json
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers.command_helpers import run_command

from parnas.cli import doctor
from parnas.cli.doctor import Finding, examine


def finding(name: str) -> Finding:
    return next(each for each in examine() if each.name == name)


def test_it_says_what_a_training_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("doctor", "--json") == 0
    findings = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["torch"]["value"] == torch.__version__
    assert findings["device"]["value"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert findings["precision"]["value"] in ("fp32", "bf16")
    assert findings["threads"]["value"] == torch.get_num_threads()
    assert run_command("doctor") == 0
    text = capsys.readouterr().out
    assert "would be used" in text
    assert torch.__version__ in text


def test_it_names_caches_and_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "cache"))
    assert finding("cache").value == str(tmp_path / "cache")
    assert finding("in the cache").value == "0.00 GB"
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "sparse").open("wb") as file:
        file.truncate(3_000_000_000)
    assert finding("in the cache").value == "3.00 GB"


def test_it_knows_which_corpora_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path))
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    assert finding("corpora here").value == "pydoc"
    assert finding("PARNAS_DATA").advice == "there is no such folder; create it or unset the variable"
    (tmp_path / "data" / "enwik8").mkdir(parents=True)
    assert finding("corpora here").value == "enwik8, pydoc"
    assert finding("PARNAS_DATA").advice is None


def test_it_advises_where_room_or_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("free for runs here").advice is None
    monkeypatch.setattr(doctor, "free_gb", lambda _: 0.4)
    assert "free some space" in str(finding("free for runs here").advice)
    extra = "no-such-package>=1; extra == 'export'"
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2", extra, "pytest; extra == 'dev'"])
    asked = "for parnas export --to onnx or x-transformers: pip install -e '.[export]' in its repository"
    assert finding("no-such-package") == Finding("versions", "no-such-package", None, asked)
    assert not any(each.name == "pytest" for each in examine())


def test_it_advises_where_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("cache").advice is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "PARNAS_CACHE" in str(finding("cache").advice)
