"""Cached facts about a file, which hold as long as the file stays the same."""

import os
import time
from pathlib import Path

import pytest
from helpers.data_helpers import english, write_corpus

from parnas.data import cache
from parnas.data.cache import cached_value, locked
from parnas.data.corpora import find_corpus
from parnas.errors import ParnasError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file counts as unchanged for long at once."""
    monkeypatch.setattr(cache, "RECENT_NS", -10_000_000_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("one")
    return tmp_path / "text.txt"


class Reader:
    """Reads a file and counts how often."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, 0

    def __call__(self) -> str:
        self.times += 1
        return self.path.read_text()


@pytest.mark.usefixtures("old")
def test_a_file_that_stays_is_read_once_for_each_fact(path: Path) -> None:
    read = Reader(path)
    assert [cached_value(path, "text", read) for _ in range(3)] == ["one"] * 3
    assert read.times == 1
    assert cached_value(path, "other", read) == "one"
    assert read.times == 2


@pytest.mark.usefixtures("old")
def test_a_changed_file_is_noticed(path: Path) -> None:
    read = Reader(path)
    cached_value(path, "text", read)
    path.write_text("longer")
    assert cached_value(path, "text", read) == "longer"


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_change_that_puts_size_and_time_back_is_noticed(path: Path, in_place: bool) -> None:
    read, status = Reader(path), path.stat()
    cached_value(path, "text", read)
    time.sleep(0.02)  # more than a tick of the file system's clock
    if in_place:
        path.write_text("two")
    else:
        (path.parent / "new").write_text("two")
        (path.parent / "new").rename(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert cached_value(path, "text", read) == "two"


def test_of_a_file_just_written_nothing_is_cached(path: Path) -> None:
    read = Reader(path)
    assert [cached_value(path, "text", read) for _ in range(2)] == ["one"] * 2
    assert read.times == 2
    path.write_text("two")
    assert cached_value(path, "text", read) == "two"


@pytest.mark.usefixtures("old")
def test_of_a_file_that_changes_while_it_is_read_nothing_is_cached(path: Path) -> None:
    def read_and_change() -> str:
        text = path.read_text()
        path.write_text("two, longer")
        return text

    assert cached_value(path, "text", read_and_change) == "one"
    assert cached_value(path, "text", path.read_text) == "two, longer"


@pytest.mark.usefixtures("old")
def test_a_failure_is_not_cached_and_a_damaged_entry_is_replaced(path: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise ParnasError("no")

    for _ in range(2):
        with pytest.raises(ParnasError, match="no"):
            cached_value(path, "text", fail)
    read = Reader(path)
    cached_value(path, "text", read)
    (entry,) = (tmp_path / "cache" / "files").iterdir()
    for damage in ("{", "[]", '{"file": 1}'):
        entry.write_text(damage)
        assert cached_value(path, "text", read) == "one"
    assert read.times == 4


@pytest.mark.usefixtures("old")
def test_a_lock_is_free_after_an_error_whose_traceback_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path))
    notes: list[str] = []
    with pytest.raises(ParnasError, match="disk full") as kept, locked(tmp_path / "file", notes.append):
        raise OSError("disk full")
    with locked(tmp_path / "file", notes.append):
        pass
    assert kept.value.__traceback__ is not None
    assert not notes, "the second call did not wait for the first"


def test_a_cache_that_cannot_be_written_only_forgets(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "file"))
    read = Reader(path)
    assert [cached_value(path, "text", read) for _ in range(2)] == ["one"] * 2
    assert read.times == 2


@pytest.mark.usefixtures("old")
def test_a_corpus_that_changes_gets_another_fingerprint_and_is_checked_again(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "mine")
    first = find_corpus(str(folder))
    assert find_corpus(str(folder)) == first
    write_corpus(folder, valid=english(40, 7))
    assert find_corpus(str(folder)).fingerprint != first.fingerprint
    (folder / "valid.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ParnasError, match="UTF-8"):
        find_corpus(str(folder))


@pytest.mark.usefixtures("old")
def test_a_single_file_that_changes_is_cut_anew(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a\n" * 20)
    assert find_corpus(str(path)).splits["valid"].start == 36
    assert find_corpus(str(path)).splits["valid"].start == 36
    path.write_text("bb\n" * 40)
    assert find_corpus(str(path)).splits["valid"].start == 108
