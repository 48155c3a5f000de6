"""The runs of a comparison: loaded, checked to be comparable, and ready to be measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from parnas.config import check_config
from parnas.data.corpora import SPLITS
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.model.estimators import ESTIMATORS
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.run import Run, name_runs
from parnas.sections import Reach
from parnas.training.device import Device, choose_device
from parnas.training.perplexity import score_tokens
from parnas.training.phases import LoadedRun, flatten, load, refuse_other_text

BY_NAME = ("split", "tgt_len", *Reach._fields)
"""What of section `evaluation` a comparison is given by name."""
LENGTHS = tuple(f"evaluation.{name}" for name in BY_NAME[1:])
"""On what the choice of `parnas adapt` depends."""


@dataclass(frozen=True)
class Conditions:
    """How a comparison measures; none means as the runs were configured. Raises `ParnasError` for an unknown split."""

    split: str | None = None  # none: evaluation.split of the first run
    tgt_len: int | None = None
    mem_len: int | None = None
    cmem_len: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None
    best: bool = False  # the weights of the least validation loss, not the last ones
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the configurations, such as evaluation.stride
    adapted: bool = False  # in the ways besides, too, that `parnas adapt` chose for each run

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", flatten(self.changes))
        if foreign := [key for key in self.changes if not key.startswith("evaluation.")]:
            raise ParnasError(f"{foreign[0]} is settled in a run; only settings of evaluation may be changed here.")
        for key in self.changes:
            name = key.removeprefix("evaluation.")
            if name in BY_NAME and getattr(self, name) is not None:
                raise ParnasError(f"{key} is given as {name} (--{name.replace('_', '-')}), too; give one of them.")
        if self.split not in (None, *SPLITS):
            raise ParnasError(f"split (--split) is {self.split!r}; give {', '.join(SPLITS[:-1])} or {SPLITS[-1]}.")

    def overrides(self) -> list[tuple[str, Any]]:
        """All that differs from the configurations, by dotted key."""
        told = [(f"evaluation.{name}", getattr(self, name)) for name in BY_NAME]
        return [*self.changes.items(), *(each for each in told if each[1] is not None)]

    def given(self) -> dict[str, Any]:
        """What is not left to the configurations."""
        unless_set = ("best", "changes", "adapted")
        told = asdict(self).items()
        return {key: value for key, value in told if value or (value is not None and key not in unless_set)}


@dataclass(frozen=True)
class Entry:
    """One run: what is scored, on which text, where, and with which lengths."""

    name: str  # as the table shows it
    run: Run
    loaded: LoadedRun
    network: TransformerXL
    streams: TokenStreams
    device: Device
    tgt_len: int
    reach: Reach

    def score(self, split: str, reach: Reach | None = None) -> Tensor:
        """Nats of each token of a split [N], with the lengths of the entry or with another reach."""
        return score_tokens(
            self.network,
            self.streams.tokens(split),
            self.streams.tokenizer.eos_id,
            self.device,
            batch_size=self.loaded.config.evaluation.batch_size,
            tgt_len=self.tgt_len,
            reach=reach or self.reach,
        )

    @property
    def tokenizer_identity(self) -> str:
        """Equal for runs whose tokens are the same."""
        header = self.loaded.header
        return repr((header.fingerprint, header.tokenizer, header.vocab_size))

    @property
    def lost(self) -> str:
        """What the tokenizer does not keep of the text, with the number of unknown tokens in each split."""
        header = self.loaded.header
        unknown = ", ".join(f"{counts.unknown} in {split}" for split, counts in header.splits.items())
        return ", ".join({"unknown": f"unknown words ({unknown})"}.get(kind, kind) for kind in header.loses)


def open_entries(folders: Sequence[Path], conditions: Conditions) -> list[Entry]:
    """Load the runs; raises `ParnasError` for runs that cannot be compared or whose text is not here."""
    if not folders:
        raise ParnasError("There is no run to compare; name one or more.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ParnasError("A run is given twice; name each one once.")
    runs = [Run(folder) for folder in folders]
    loaded = [changed(load(folder, best=conditions.best), conditions) for folder in folders]
    if len({each.header.fingerprint for each in loaded}) > 1:
        listed = "".join(f"\n  - {run.folder}: {of.header.corpus}" for run, of in zip(runs, loaded, strict=True))
        raise ParnasError(f"The runs were trained on different texts and cannot be compared:{listed}")
    threads = loaded[0].config.runtime.threads  # one number for all runs, since it holds for the whole process
    entries = [open_entry(name, run, of, threads) for name, run, of in zip(name_runs(runs), runs, loaded, strict=True)]
    if several_tokenizers(entries) and len({entry.lost for entry in entries}) > 1:
        listed = "".join(f"\n  - {entry.name}: {entry.lost or 'nothing'}" for entry in entries)
        raise ParnasError(
            "The runs' tokenizers lose different information, so neither words nor bytes are comparable; "
            f"compare those that lose the same by themselves:{listed}"
        )
    return entries


def changed(loaded: LoadedRun, conditions: Conditions) -> LoadedRun:
    """A run with the changes of its configuration; raises `ParnasError` with all mistakes in them."""
    overrides = conditions.overrides()
    if not overrides:
        return loaded
    return replace(loaded, config=check_config(loaded.config.model_dump(), "The changed configuration", overrides))


def open_entry(name: str, run: Run, loaded: LoadedRun, threads: int | None) -> Entry:
    """Prepare text, device and network of one run."""
    device = choose_device(loaded.config.runtime.model_copy(update={"threads": threads}))
    streams = prepare(loaded.config.data)
    refuse_other_text(streams.header, loaded.header, name)
    network = network_of(loaded).to(device.device)
    return Entry(name, run, loaded, network, streams, device, *loaded.config.evaluated_lengths)


def network_of(loaded: LoadedRun) -> TransformerXL:
    """What is scored: the network, or of a search the SuperNet by pi (the derived one where gates are one-hot)."""
    if isinstance(loaded.model, SuperNet) and ESTIMATORS[loaded.config.search.estimator].one_hot:
        return loaded.discrete()
    return loaded.model


def several_tokenizers(entries: Sequence[Entry]) -> bool:
    """Whether the runs' tokens differ, so that figures per token do not compare."""
    return len({entry.tokenizer_identity for entry in entries}) > 1
