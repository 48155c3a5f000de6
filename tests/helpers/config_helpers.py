"""Configurations from texts, for the tests of what is read and what is refused."""

import pytest

from parnas.config.loader import load_config
from parnas.errors import ParnasError


@pytest.fixture
def load(tmp_path):
    """Load a text as a configuration file, with overrides."""

    def load_text(text, *overrides):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load_text


@pytest.fixture
def complaints(load):
    """The lines of complaint about a file."""

    def lines(text, *overrides):
        with pytest.raises(ParnasError) as caught:
            load(text, *overrides)
        title, *found = str(caught.value).splitlines()
        assert f"has {len(found)} error(s):" in title
        assert "config.yaml" in title
        return [line.removeprefix("  - ") for line in found]

    return lines
