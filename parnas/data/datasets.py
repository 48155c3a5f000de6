"""Datasets on the web: their addresses, files and published hashes, and the functions that download and check them."""

import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from parnas.data.cache import Note, cache_dir, cached_value, file_hash, locked, silent
from parnas.data.text import TextSlice
from parnas.errors import ParnasError
from parnas.runs.files import atomic_folder, expand_user

__all__ = ["SPLITS"]

SPLITS = ("train", "valid", "test")
_TIMEOUT_SECONDS = 30
_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True)
class DatasetFile:
    """A text file of a dataset.

    Attributes:
        names: Accepted file names; in the cache, the file has the first of these names.
        hash: Published hash of the file, as `algorithm:hexdigest`.
        lines: Number of line ends in the file, checked if no hash is published.
    """

    names: tuple[str, ...]
    hash: str | None = None
    lines: int | None = None


@dataclass(frozen=True)
class Dataset:
    """A download with a text file for each split, or with one file whose splits are ranges of bytes.

    Attributes:
        url: Address of a zip archive with the files, or of the only file.
        hash: Published hash of the download, as `algorithm:hexdigest`.
        ranges: First byte of train, valid and test, and the byte after the last one, if `files` holds one file.
    """

    name: str
    url: str
    hash: str
    files: tuple[DatasetFile, ...]
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def archive_name(self) -> str:
        """File name of the download, from its address."""
        return PurePosixPath(self.url).name

    def slices(self, paths: list[Path]) -> dict[str, TextSlice]:
        """Return the three splits, given the paths of `files` in the same order."""
        if self.ranges is None:
            return {split: TextSlice.whole(path) for split, path in zip(SPLITS, paths, strict=True)}
        return {split: TextSlice(paths[0], *cut) for split, cut in zip(SPLITS, self.ranges, strict=True)}


def _wikitext(name: str, archive_md5: str, checks: Mapping[str, tuple[str | None, int]]) -> Dataset:
    files = tuple(DatasetFile(split_names(split), *checks[split]) for split in SPLITS)
    return Dataset(name, f"https://wikitext.smerity.com/{name}-v1.zip", f"md5:{archive_md5}", files)


def _hutter(name: str, archive_sha256: str, file_hash: str) -> Dataset:
    return Dataset(
        name,
        f"http://mattmahoney.net/dc/{name}.zip",
        f"sha256:{archive_sha256}",
        (DatasetFile((name,), file_hash),),
        ((0, 90_000_000), (90_000_000, 95_000_000), (95_000_000, 100_000_000)),
    )


def split_names(split: str) -> tuple[str, str]:
    """Return the accepted file names of a split: `SPLIT.txt`, and `wiki.SPLIT.tokens` as in WikiText."""
    return f"{split}.txt", f"wiki.{split}.tokens"


DATASETS: dict[str, Dataset] = {
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
        # The literature divides it into 90 % and 10 % of the characters, without a test split: here test equals valid.
        Dataset(
            "tiny-shakespeare",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            f"sha256:{_SHAKESPEARE_SHA256}",
            (DatasetFile(("input.txt",), f"sha256:{_SHAKESPEARE_SHA256}"),),
            ((0, 1_003_854), (1_003_854, 1_115_394), (1_003_854, 1_115_394)),
        ),
    )
}


def find_dataset(dataset: Dataset, note: Note = silent) -> dict[str, TextSlice]:
    """Return the checked splits of a dataset, from `$PARNAS_DATA/<name>/`, else from the cache, else from the web.

    Raises:
        ParnasError: A file is missing or has a wrong hash, or there is no network or no room on the disk.
    """
    if data := os.environ.get("PARNAS_DATA"):
        given = expand_user(data) / dataset.name
        if given.is_dir():
            return _read_given(dataset, given, note)
    return _unpacked(dataset, None, note)


def _read_given(dataset: Dataset, folder: Path, note: Note) -> dict[str, TextSlice]:
    """Return the splits in the user's folder, or in an archive there; raise `ParnasError` if it has neither."""
    paths = [path for file in dataset.files if (path := first_file(folder, file.names)) is not None]
    if len(paths) == len(dataset.files):
        return _checked(dataset, paths)
    if not paths and (archive := folder / dataset.archive_name).is_file():
        return _unpacked(dataset, archive, note)
    wanted = ", ".join(" or ".join(file.names) for file in dataset.files)
    raise ParnasError(
        f"{folder} does not hold {dataset.name}: put {wanted} there, or the archive {dataset.archive_name} "
        "(or unset PARNAS_DATA to download it)."
    )


def _unpacked(dataset: Dataset, archive: Path | None, note: Note) -> dict[str, TextSlice]:
    """Return the splits from the cache; if they are missing, first unpack `archive` into it (`None`: download one)."""
    folder = cache_dir() / "corpora" / dataset.name
    with locked(folder, note):
        if not folder.is_dir():
            _unpack(dataset, archive or _download(dataset, note), folder)
    return _checked(dataset, [folder / file.names[0] for file in dataset.files])


def _download(dataset: Dataset, note: Note) -> Path:
    """Return the path of the archive in the cache; download it first if it is missing."""
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    note(f"fetching {dataset.url}")
    advice = f"Or fetch it yourself into DIR/{dataset.name}/ and set PARNAS_DATA=DIR."
    try:
        return Path(
            pooch.retrieve(
                dataset.url,
                known_hash=dataset.hash,
                fname=dataset.archive_name,
                path=cache_dir() / "downloads",
                downloader=pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS),
            )
        )
    except RequestException as error:
        raise ParnasError(
            f"{dataset.url} could not be fetched ({error}). Check the network and try again. {advice}"
        ) from error
    except ValueError as error:
        raise ParnasError(
            f"{dataset.url} is not {dataset.name} as published (wrong hash). Try again later. {advice}"
        ) from error


def _unpack(dataset: Dataset, archive: Path, folder: Path) -> None:
    """Copy the files of a dataset from its download, a zip archive or the only file, into a new folder in the cache."""
    _check_hash(archive, dataset.hash)  # after this check, sizes in the archive can be trusted
    if archive.suffix != ".zip":
        with atomic_folder(folder) as unfinished:
            shutil.copyfile(archive, unfinished / dataset.files[0].names[0])
        return
    try:
        with zipfile.ZipFile(archive) as zipped, atomic_folder(folder) as unfinished:
            members = {PurePosixPath(name).name: name for name in zipped.namelist()}
            for file in dataset.files:
                member = next(members[name] for name in file.names if name in members)
                with zipped.open(member) as source, (unfinished / file.names[0]).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ParnasError(f"{archive} is not the zip archive of {dataset.name}; delete it and try again.") from error


def _checked(dataset: Dataset, paths: list[Path]) -> dict[str, TextSlice]:
    """Return the splits in `paths`; raise `ParnasError` if a hash or number of lines is not as published."""
    for file, path in zip(dataset.files, paths, strict=True):
        if not path.is_file():
            raise ParnasError(f"{path} is missing; delete the folder {path.parent} to have it made again.")
        if file.hash is not None:
            _check_hash(path, file.hash)
        elif file.lines is not None:
            lines = cached_value(path, "number of line ends", partial(_count_line_ends, path))
            if lines != file.lines:
                raise ParnasError(
                    f"{path} is not part of {dataset.name} as published: it has {lines:,} lines, not {file.lines:,}. "
                    "Replace or delete it; to use it as it is, give its folder as data.corpus."
                )
    return dataset.slices(paths)


def _count_line_ends(path: Path) -> int:
    return sum(block.count(b"\n") for block in TextSlice.whole(path).blocks())


def _check_hash(path: Path, expected: str) -> None:
    """Raise `ParnasError` if a file does not have the hash `expected`, written as `algorithm:hexdigest`."""
    algorithm, _, digest = expected.partition(":")
    actual = file_hash(path, algorithm)
    if actual != digest:
        raise ParnasError(
            f"{path} is not the file that was published: its {algorithm} is {actual}, not {digest}. "
            "Replace or delete it; to use a text as it is, give its folder as data.corpus."
        )


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the path of the first of `names` that is a file in `folder`; `None` if none of them is."""
    return next((folder / name for name in names if (folder / name).is_file()), None)
