"""Small searches and trainings give the recorded figures, bit for bit."""

import json
from typing import Any

import pytest

from golden.recording import CASES, FILE, environment, record

GOLDEN = json.loads(FILE.read_text())


def without_hashes(value: Any) -> Any:
    """Return what other processors and versions of torch should reproduce, up to rounding."""
    if isinstance(value, dict):
        return {key: without_hashes(each) for key, each in value.items() if not key.endswith("sha256")}
    return [without_hashes(each) for each in value] if isinstance(value, list) else value


def rounded(value: Any) -> Any:
    """Return a value with which numbers compare equal if they differ in rounding only."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value


def test_every_case_is_recorded() -> None:
    assert GOLDEN["cases"].keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_recorded(name: str) -> None:
    found, expected = json.loads(json.dumps(record(name))), GOLDEN["cases"][name]
    if environment() == GOLDEN["environment"]:
        assert found == expected
    else:
        assert without_hashes(found) == rounded(without_hashes(expected))
