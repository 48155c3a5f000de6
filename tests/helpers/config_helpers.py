"""Fixtures that load configurations from texts."""

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
    """Return the errors in a configuration file, one per line of the message."""

    def lines(text, *overrides):
        with pytest.raises(ParnasError) as caught:
            load(text, *overrides)
        title, *found = str(caught.value).splitlines()
        assert f"has {len(found)} error(s):" in title
        assert "config.yaml" in title
        return [line.removeprefix("  - ") for line in found]

    return lines
