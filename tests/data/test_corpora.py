"""Corpora: where named ones are looked for, what is refused, and the embedded one."""

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.data_helpers import WIKITEXT_2, english, needs_wikitext_2, write_corpus

from parnas.data import datasets, pydoc_text
from parnas.data.corpora import Corpus, find_corpus
from parnas.data.datasets import DATASETS, Dataset, DatasetFile
from parnas.errors import ParnasError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PARNAS_DATA", raising=False)


def content(corpus: Corpus) -> dict[str, bytes]:
    return {split: b"".join(text.blocks()) for split, text in corpus.splits.items()}


# Paths


def test_a_folder_is_its_three_files(tmp_path: Path) -> None:
    corpus = find_corpus(str(write_corpus(tmp_path / "mine", "a\nb\n", "c\n", "d")))
    assert content(corpus) == {"train": b"a\nb\n", "valid": b"c\n", "test": b"d"}


def test_the_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    same = [find_corpus(str(write_corpus(tmp_path / name, "a\n", "b\n", "c\n"))) for name in ("one", "two")]
    swapped = find_corpus(str(write_corpus(tmp_path / "three", "a\n", "c\n", "b\n")))
    assert same[0].fingerprint == same[1].fingerprint != swapped.fingerprint


@pytest.mark.parametrize("lines, shares", [(3, (1, 1, 1)), (40, (36, 2, 2)), (1000, (900, 50, 50))])
@pytest.mark.parametrize("last_end", ["\n", ""])
def test_a_file_is_split_by_lines(tmp_path: Path, lines: int, shares: tuple[int, ...], last_end: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"lïne {number}" for number in range(lines)) + last_end, encoding="utf-8")
    corpus = find_corpus(str(path))
    splits = content(corpus)
    assert b"".join(splits.values()) == path.read_bytes()
    assert tuple(len(text.splitlines()) for text in splits.values()) == shares
    assert splits["train"].endswith(b"\n")
    assert {text.path for text in corpus.splits.values()} == {path}


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "is empty"),
        (b"one line", "too short.*1 line"),
        (b"one\ntwo\n", "too short.*2 line"),
        (b"a\nb\nc\n\0d\n", "NUL at byte 6"),
        (english(90_000).encode() + b"caf\xe9 \n", r"byte [\d,]+ is 0xE9"),
        (b"a\nb\nc\nd\xc3", "byte 7 is 0xC3"),
        ("a\nb\nc\nd\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(text)
    with pytest.raises(ParnasError, match=message) as raised:
        find_corpus(str(path))
    assert str(path) in str(raised.value)
    if "0xE9" in message:
        assert f"byte {text.index(0xE9):,} is" in str(raised.value)


def test_a_bad_folder_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "mine")
    (folder / "valid.txt").write_bytes(b"\xff")
    with pytest.raises(ParnasError, match=r"valid\.txt.*byte 0 is 0xFF"):
        find_corpus(str(folder))
    (folder / "valid.txt").write_bytes(b"")
    with pytest.raises(ParnasError, match=r"valid\.txt"):
        find_corpus(str(folder))
    (folder / "valid.txt").unlink()
    (folder / "test.txt").unlink()
    with pytest.raises(ParnasError, match=r"valid\.txt.*test\.txt"):
        find_corpus(str(folder))


@pytest.mark.parametrize("name, near", [("wikitext2", "wikitext-2"), ("no/such/file.txt", None)])
def test_an_unknown_name_lists_the_known(name: str, near: str | None) -> None:
    with pytest.raises(ParnasError, match="wikitext-103, enwik8, text8, tiny-shakespeare, pydoc") as raised:
        find_corpus(name)
    assert (f"Did you mean {near}?" in str(raised.value)) == (near is not None)


# Corpora by name


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a web server that serves the folder `tmp_path / "web"`."""
    (tmp_path / "web").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        thread = threading.Thread(target=partial(http_server.serve_forever, poll_interval=0.01))
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def zipped(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    return archive.getvalue()


TEXTS = {"train": b"ab\ncd\n", "valid": b"ef\n", "test": b"gh\n"}
WIKI_ZIP = zipped({f"wikitext-2/wiki.{split}.tokens": text for split, text in TEXTS.items()})
BYTES_ZIP = zipped({"enwik8": b"0123456789"})

Declare = Callable[..., Dataset]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch, server: str, tmp_path: Path) -> Declare:
    """Put a small version of a dataset on the web server and into `DATASETS`; `changes` go into its entry."""

    def declare_one(name: str, archive: bytes = WIKI_ZIP, **changes: object) -> Dataset:
        (tmp_path / "web" / f"{name}.zip").write_bytes(archive)
        hashes = {"url": f"{server}/{name}.zip", "hash": "sha256:" + hashlib.sha256(archive).hexdigest()}
        if name == "enwik8":
            file = DatasetFile((name,), "md5:" + hashlib.md5(b"0123456789").hexdigest())
            entry = replace(DATASETS[name], files=(file,), ranges=((0, 6), (6, 9), (9, 10)), **hashes)
        else:
            files = tuple(
                DatasetFile(datasets.split_names(split), "sha256:" + hashlib.sha256(text).hexdigest())
                for split, text in TEXTS.items()
            )
            entry = replace(DATASETS[name], files=files, **hashes)
        entry = replace(entry, **changes)
        monkeypatch.setitem(DATASETS, name, entry)
        return entry

    return declare_one


def test_a_known_corpus_is_fetched_once(declare: Declare, tmp_path: Path) -> None:
    declare("wikitext-2")
    notes: list[str] = []
    corpus = find_corpus("wikitext-2", notes.append)
    assert content(corpus) == TEXTS
    assert len(notes) == 1
    assert "fetching http" in notes[0]
    (tmp_path / "web" / "wikitext-2.zip").unlink()
    assert find_corpus("wikitext-2", notes.append) == corpus
    assert len(notes) == 1


def test_enwik8_is_cut_at_bytes(declare: Declare) -> None:
    declare("enwik8", BYTES_ZIP)
    assert content(find_corpus("enwik8")) == {"train": b"012345", "valid": b"678", "test": b"9"}


def test_the_table_is_what_the_literature_uses() -> None:
    assert list(DATASETS) == ["wikitext-2", "wikitext-103", "enwik8", "text8", "tiny-shakespeare"]
    for name in ("enwik8", "text8"):
        slices = DATASETS[name].slices([Path("x")])
        assert [(text.start, text.stop) for text in slices.values()] == [
            (0, 90_000_000),
            (90_000_000, 95_000_000),
            (95_000_000, 100_000_000),
        ]


def test_a_download_may_be_the_text_itself(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"0123456789"
    (tmp_path / "web" / "input.txt").write_bytes(text)
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    dataset = DATASETS["tiny-shakespeare"]
    changes = {"url": f"{server}/input.txt", "hash": digest, "files": (DatasetFile(("input.txt",), digest),)}
    monkeypatch.setitem(DATASETS, dataset.name, replace(dataset, ranges=((0, 9), (9, 10), (9, 10)), **changes))
    assert content(find_corpus("tiny-shakespeare")) == {"train": b"012345678", "valid": b"9", "test": b"9"}


@pytest.mark.skipif(
    not (WIKITEXT_2.parent / "tiny-shakespeare").is_dir(), reason="the corpus is not beside the project"
)
def test_tiny_shakespeare_is_divided_as_in_the_literature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_DATA", str(WIKITEXT_2.parent))
    corpus = find_corpus("tiny-shakespeare")
    assert {split: text.bytes for split, text in corpus.splits.items()} == {
        "train": 1_003_854,
        "valid": 111_540,
        "test": 111_540,
    }


def test_a_download_with_a_wrong_hash_is_refused(declare: Declare, tmp_path: Path) -> None:
    declare("wikitext-2", hash="md5:" + "0" * 32)
    with pytest.raises(ParnasError, match=r"hash.*PARNAS_DATA"):
        find_corpus("wikitext-2")
    assert not (tmp_path / "cache" / "corpora" / "wikitext-2").exists()


def test_without_a_network_the_hint_names_parnas_data(declare: Declare) -> None:
    declare("wikitext-2", url="http://127.0.0.1:9/wikitext-2.zip")
    with pytest.raises(ParnasError, match="PARNAS_DATA"):
        find_corpus("wikitext-2")


def test_a_missing_page_is_an_error_with_its_status(declare: Declare, server: str) -> None:
    declare("wikitext-2", url=f"{server}/gone.zip")
    with pytest.raises(ParnasError, match=r"404.*PARNAS_DATA"):
        find_corpus("wikitext-2")


@pytest.mark.parametrize("archive", [b"no zip", zipped({"other.txt": b"x"})])
def test_an_archive_without_the_files_is_refused(declare: Declare, tmp_path: Path, archive: bytes) -> None:
    declare("wikitext-2", archive)
    with pytest.raises(ParnasError, match=r"wikitext-2\.zip"):
        find_corpus("wikitext-2")
    assert not (tmp_path / "cache" / "corpora" / "wikitext-2").exists()


def test_members_land_under_our_names_whatever_theirs(declare: Declare, tmp_path: Path) -> None:
    declare("wikitext-2", zipped({f"../../{split}.txt": text for split, text in TEXTS.items()}))
    assert content(find_corpus("wikitext-2")) == TEXTS
    assert not list(tmp_path.glob("*.txt"))
    assert {path.name for path in (tmp_path / "cache/corpora/wikitext-2").iterdir()} == {
        "train.txt",
        "valid.txt",
        "test.txt",
    }


def test_a_cache_that_cannot_be_written_is_an_error(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare("wikitext-2")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ParnasError, match="PARNAS_CACHE"):
        find_corpus("wikitext-2")


@pytest.mark.parametrize("names", [("train.txt", "valid.txt", "test.txt"), ("wiki.{}.tokens",) * 3])
def test_parnas_data_comes_first(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    declare("wikitext-2", url="http://127.0.0.1:9/never.zip")
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    for name, (split, text) in zip(names, TEXTS.items(), strict=True):
        (folder / name.format(split)).write_bytes(text)
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    corpus = find_corpus("wikitext-2")
    assert content(corpus) == TEXTS
    assert all(text.path.parent == folder for text in corpus.splits.values())


@pytest.mark.parametrize("file, text", [("enwik8", b"0123456789"), ("enwik8.zip", BYTES_ZIP)])
def test_parnas_data_may_hold_the_raw_file_or_the_archive(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: bytes
) -> None:
    declare("enwik8", BYTES_ZIP, url="http://127.0.0.1:9/enwik8.zip")
    (tmp_path / "data" / "enwik8").mkdir(parents=True)
    (tmp_path / "data" / "enwik8" / file).write_bytes(text)
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    assert content(find_corpus("enwik8"))["valid"] == b"678"


@pytest.mark.parametrize("change", [{"train.txt": b"altered\n"}, {"valid.txt": b"gh\n"}])
def test_an_altered_file_is_refused(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, bytes]
) -> None:
    declare("wikitext-2")
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    for split, text in TEXTS.items():
        (folder / f"{split}.txt").write_bytes(change.get(f"{split}.txt", text))
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    with pytest.raises(ParnasError, match=r"\.txt .*sha256"):
        find_corpus("wikitext-2")


def test_wikitext_103_without_hashes_is_checked_by_its_lines(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple(DatasetFile(datasets.split_names(split), None, 2) for split in TEXTS)
    declare("wikitext-103", files=files)
    write_corpus(tmp_path / "data" / "wikitext-103", "a\nb\n", "c\nd\n", "e\nf\ng\n")
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    with pytest.raises(ParnasError, match=r"test\.txt.*3 .*2"):
        find_corpus("wikitext-103")


def test_a_folder_for_a_corpus_without_its_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text8").mkdir()
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path))
    with pytest.raises(ParnasError, match=r"text8\.zip"):
        find_corpus("text8")


@needs_wikitext_2
def test_the_real_wikitext_2_passes_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_DATA", str(WIKITEXT_2.parent))
    assert find_corpus("wikitext-2").splits["train"].bytes == 10_797_148


# The embedded corpus


def test_pydoc_is_english_prose_shared_out_without_repetition() -> None:
    corpus = find_corpus("pydoc")
    lines = {split: text.decode().splitlines() for split, text in content(corpus).items()}
    everything = [line for split in lines.values() for line in split]
    assert len(set(everything)) == len(everything)
    size = sum(map(len, everything))
    assert size > 1_000_000
    for split, share in pydoc_text.SHARES.items():
        assert sum(map(len, lines[split])) == pytest.approx(share * size, rel=0.2)
    text = " ".join(everything)
    assert sum(character.isalpha() or character == " " for character in text) > 0.93 * len(text)
    assert text.lower().count(" the ") > 0.03 * len(text.split())
    assert ">>>" not in text


def test_pydoc_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pydoc_text, "_documents", lambda: iter([(str(n), f"this is the page {'x' * n}") for n in range(40)])
    )
    first = find_corpus("pydoc")
    monkeypatch.setattr(pydoc_text, "_documents", lambda: pytest.fail("gathered again"))
    assert find_corpus("pydoc") == first


def test_pydoc_without_sources_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pydoc_text, "_documents", lambda: iter([]))
    with pytest.raises(ParnasError, match=r"data\.corpus"):
        find_corpus("pydoc")
    assert not list((tmp_path / "cache" / "corpora").glob("pydoc-*/"))


def test_prose_keeps_sentences_and_leaves_code() -> None:
    text = """Return the sum of
    both numbers.

    >>> add(1, 2)
    3

    add_stmt ::= "add" expression and so on

    =======  ====================
    Name     What it is good for
    =======  ====================

    abs(a) -> the absolute value of it

    {1: 2} == [3] != (4) and x[5]

    Short line."""
    assert list(pydoc_text.prose(text)) == ["Return the sum of both numbers."]
