"""The corpora known by name: where they come from, what they hash to, and how they are fetched and checked."""

import hashlib
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import IO

from parnas.data.cache import Note, cache_dir, locked, silent
from parnas.data.remembered import remember
from parnas.data.text import TextSlice
from parnas.errors import ParnasError
from parnas.files import expand_user, folder_in_one_piece

SPLITS = ("train", "valid", "test")
LARGEST_FILE = 1 << 30
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class KnownFile:
    """A text file of a corpus.

    names: what it may be called, the name we give it first. hash: `algorithm:hexdigest`, where it was published.
    lines: its number of line ends, checked where no hash is known.
    """

    names: tuple[str, ...]
    hash: str | None = None
    lines: int | None = None


@dataclass(frozen=True)
class KnownCorpus:
    """An archive on the web and its text files: one for each split, or a single one cut at byte offsets.

    hash: of the zip archive. byte_split: bytes of train, valid and test where `files` holds one file.
    """

    name: str
    url: str
    hash: str
    files: tuple[KnownFile, ...]
    byte_split: tuple[int, int, int] | None = None

    @property
    def archive_name(self) -> str:
        """File name of the archive."""
        return PurePosixPath(self.url).name

    def slices(self, paths: list[Path]) -> dict[str, TextSlice]:
        """The three splits, given the path of each of `files`."""
        if self.byte_split is None:
            return {split: TextSlice.whole(path) for split, path in zip(SPLITS, paths, strict=True)}
        stops = list(accumulate(self.byte_split))
        starts = [0, *stops[:-1]]
        return {
            split: TextSlice(paths[0], start, stop) for split, start, stop in zip(SPLITS, starts, stops, strict=True)
        }


def _wikitext(name: str, archive_md5: str, checks: Mapping[str, tuple[str | None, int]]) -> KnownCorpus:
    files = tuple(KnownFile(split_names(split), *checks[split]) for split in SPLITS)
    return KnownCorpus(name, f"https://wikitext.smerity.com/{name}-v1.zip", f"md5:{archive_md5}", files)


def _hutter(name: str, archive_sha256: str, file_hash: str) -> KnownCorpus:
    return KnownCorpus(
        name,
        f"http://mattmahoney.net/dc/{name}.zip",
        f"sha256:{archive_sha256}",
        (KnownFile((name,), file_hash),),
        (90_000_000, 5_000_000, 5_000_000),
    )


def split_names(split: str) -> tuple[str, str]:
    """The file names under which a split is looked for."""
    return f"{split}.txt", f"wiki.{split}.tokens"


KNOWN: dict[str, KnownCorpus] = {
    corpus.name: corpus
    for corpus in (
        _wikitext(
            "wikitext-2",
            "542ccefacc6c27f945fb54453812b3cd",
            {
                "train": ("sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", 36_718),
                "valid": ("sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", 3_760),
                "test": ("sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", 4_358),
            },
        ),
        _wikitext(
            "wikitext-103",
            "9ddaacaf6af0710eda8c456decff7832",
            {"train": (None, 1_801_350), "valid": (None, 3_760), "test": (None, 4_358)},
        ),
        _hutter(
            "enwik8",
            "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        ),
        _hutter(
            "text8",
            "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            "md5:3bea1919949baf155f99411df5fada7e",
        ),
    )
}


def find_known(corpus: KnownCorpus, note: Note = silent) -> dict[str, TextSlice]:
    """The splits of a known corpus, checked: from `$PARNAS_DATA/<name>/`, else from the cache, else from the web.

    Raises `ParnasError` for a missing file, a wrong hash, no network or no room on the disk.
    """
    if data := os.environ.get("PARNAS_DATA"):
        given = expand_user(data) / corpus.name
        if given.is_dir():
            return _given_corpus(corpus, given, note)
    return _unpacked(corpus, None, note)


def _given_corpus(corpus: KnownCorpus, folder: Path, note: Note) -> dict[str, TextSlice]:
    paths = [first_file(folder, file.names) for file in corpus.files]
    if found := [path for path in paths if path is not None]:
        if len(found) == len(paths):
            return _checked(corpus, found)
    elif (archive := folder / corpus.archive_name).is_file():
        return _unpacked(corpus, archive, note)
    wanted = ", ".join(" or ".join(file.names) for file in corpus.files)
    raise ParnasError(
        f"{folder} does not hold {corpus.name}: put {wanted} there, or the archive {corpus.archive_name} "
        "(or unset PARNAS_DATA to download it)."
    )


def _unpacked(corpus: KnownCorpus, archive: Path | None, note: Note) -> dict[str, TextSlice]:
    """The splits in the cache, unpacked there from `archive` or from the web where they are missing."""
    folder = cache_dir() / "corpora" / corpus.name
    with locked(folder, note):
        if not folder.is_dir():
            _unpack(corpus, _fetch(corpus, note) if archive is None else archive, folder)
    return _checked(corpus, [folder / file.names[0] for file in corpus.files])


def _fetch(corpus: KnownCorpus, note: Note) -> Path:
    """Download the archive into the cache, or find it there."""
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    note(f"fetching {corpus.url}")
    folder = cache_dir() / "downloads"
    by_hand = f"Or fetch it yourself into DIR/{corpus.name}/ and set PARNAS_DATA=DIR."
    try:
        return Path(
            pooch.retrieve(
                corpus.url,
                known_hash=corpus.hash,
                fname=corpus.archive_name,
                path=folder,
                downloader=pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS),
            )
        )
    except RequestException as error:
        raise ParnasError(
            f"{corpus.url} could not be fetched ({error}). Check the network and try again. {by_hand}"
        ) from error
    except ValueError as error:
        raise ParnasError(
            f"{corpus.url} sent something else than {corpus.name} as published (wrong hash). Try again later. {by_hand}"
        ) from error


def _unpack(corpus: KnownCorpus, archive: Path, folder: Path) -> None:
    """Copy the files that we know out of a zip archive, under names of our own, into a new `folder`."""
    _check_hash(archive, corpus.hash)
    try:
        with zipfile.ZipFile(archive) as zipped, folder_in_one_piece(folder) as beside:
            members = {PurePosixPath(name).name: name for name in zipped.namelist()}
            for file in corpus.files:
                member = next(members[name] for name in file.names if name in members)
                with zipped.open(member) as source, (beside / file.names[0]).open("wb") as target:
                    _copy_at_most(source, target, LARGEST_FILE)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ParnasError(f"{archive} is not the zip archive of {corpus.name}; delete it and try again.") from error


def _copy_at_most(source: IO[bytes], target: IO[bytes], limit: int) -> None:
    while chunk := source.read(1 << 20):
        if target.tell() + len(chunk) > limit:
            raise ParnasError(f"The archive holds a file larger than {limit:,} bytes; it is not what was published.")
        target.write(chunk)


def _checked(corpus: KnownCorpus, paths: list[Path]) -> dict[str, TextSlice]:
    for file, path in zip(corpus.files, paths, strict=True):
        if not path.is_file():
            raise ParnasError(f"{path} is missing; delete the folder {path.parent}, and it is made anew.")
        if file.hash is not None:
            _check_hash(path, file.hash)
        elif file.lines is not None:
            lines = remember(path, "number of line ends", partial(_count_line_ends, path))
            if lines != file.lines:
                raise ParnasError(
                    f"{path} is not part of {corpus.name} as published: it has {lines:,} lines, not {file.lines:,}. "
                    "Replace or delete it; to use it as it is, give its folder as data.corpus."
                )
    return corpus.slices(paths)


def file_hash(path: Path, algorithm: str) -> str:
    """Hex digest of a file, computed once as long as the file stays the same."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()

    return str(remember(path, algorithm, compute))


def _count_line_ends(path: Path) -> int:
    return sum(block.count(b"\n") for block in TextSlice.whole(path).blocks())


def _check_hash(path: Path, expected: str) -> None:
    algorithm, _, digest = expected.partition(":")
    found = file_hash(path, algorithm)
    if found != digest:
        raise ParnasError(
            f"{path} is not the file that was published: its {algorithm} is {found}, not {digest}. "
            "Replace or delete it; to use a text as it is, give its folder as data.corpus."
        )


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)
