"""Loading of the runs to evaluate or compare, with checks that their losses are comparable."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from parnas.config.loader import check_config
from parnas.config.schema import Reach, Shape
from parnas.data.datasets import SPLITS
from parnas.data.streams import TokenStreams
from parnas.errors import ParnasError
from parnas.model.estimators import ESTIMATORS
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.run import Run, name_runs
from parnas.training.device import Device, choose_device
from parnas.training.loaded_run import LoadedRun, load
from parnas.training.perplexity import score_tokens
from parnas.training.session import flatten

__all__ = ["LENGTHS", "EvalOptions"]

_NAMED_SETTINGS = ("split", "tgt_len", *Reach._fields)
"""Settings of the section `evaluation` that have a field of the same name in `EvalOptions`."""
LENGTHS = tuple(f"evaluation.{name}" for name in _NAMED_SETTINGS[1:])
"""Settings that decide which protocol settings are best; after a change, `parnas tune-eval` must be repeated."""
_MACHINE = ("runtime.device", "runtime.precision", "runtime.threads")
"""Settings outside the section `evaluation` that may differ from those of the training."""


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation: each replaces a setting of the runs; `None` keeps the setting of each run."""

    split: str | None = None  # `None`: evaluation.split of the first run
    tgt_len: int | None = None
    mem_len: int | None = None
    cmem_len: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None
    pointer_len: int | None = None
    best: bool = False  # evaluate the weights with the lowest validation loss instead of the last weights
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings by dotted key, such as evaluation.stride
    tuned: bool = False  # also score by the protocols that were tuned for each run

    def __post_init__(self) -> None:
        """Check the split and the keys of `changes`; raise `ParnasError` if one of them is not allowed."""
        object.__setattr__(self, "changes", flatten(self.changes))
        for key in self.changes:
            section, _, name = key.partition(".")
            if section != "evaluation" and key not in _MACHINE:
                raise ParnasError(
                    f"{key} is not a setting of an evaluation; give keys that begin with 'evaluation.', or "
                    f"{', '.join(_MACHINE[:-1])} or {_MACHINE[-1]}."
                )
            if name in _NAMED_SETTINGS and getattr(self, name) is not None:
                raise ParnasError(f"{key} is also given as {name} (--{name.replace('_', '-')}); give one of the two.")
        if self.split not in (None, *SPLITS):
            raise ParnasError(f"split (--split) is {self.split!r}; give {', '.join(SPLITS[:-1])} or {SPLITS[-1]}.")

    def overrides(self) -> list[tuple[str, Any]]:
        """Return dotted key and value of every setting that these options replace in the configuration of a run."""
        named = [(f"evaluation.{name}", getattr(self, name)) for name in _NAMED_SETTINGS]
        return [*self.changes.items(), *(setting for setting in named if setting[1] is not None)]

    def to_dict(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        defaults = asdict(EvalOptions())
        return {key: value for key, value in asdict(self).items() if value != defaults[key]}


@dataclass(frozen=True)
class EvalRun:
    """A run that is ready to be scored: its network, text, device, batch size, segment length and memory lengths."""

    name: str  # as in tables
    source: Run
    loaded: LoadedRun
    network: TransformerXL
    streams: TokenStreams
    device: Device
    shape: Shape

    def score(self, split: str, reach: Reach | None = None) -> Tensor:
        """Return the loss of each token of a split in nats, [N]; `reach` replaces the memory lengths of the run."""
        shape = self.shape._replace(reach=reach or self.shape.reach)
        tokens, eos_id = self.streams.tokens(split), self.streams.tokenizer.eos_id
        return score_tokens(self.network, tokens, eos_id, self.device, shape)

    @property
    def tokenizer_identity(self) -> str:
        """A key that is equal for runs with the same text and tokenizer, thus the same tokens, and for no others."""
        header = self.loaded.header
        return repr((header.fingerprint, header.tokenizer, header.vocab_size))

    @property
    def lost_information(self) -> str:
        """The kinds of information that the tokenizer loses, as text, with the unknown words in each split counted."""
        header = self.loaded.header
        unknown = ", ".join(f"{counts.unknown} in {split}" for split, counts in header.splits.items())
        return ", ".join({"unknown": f"unknown words ({unknown})"}.get(kind, kind) for kind in header.loses)


def open_runs(folders: Sequence[Path], options: EvalOptions) -> list[EvalRun]:
    """Load the runs, each with the settings that `options` replace, and check that they can be compared.

    Raises:
        ParnasError: there is no run, or a run is given twice; the runs have different corpora, or tokenizers that lose
            different information; a text has changed since training; or a setting is invalid.
    """
    if not folders:
        raise ParnasError("There is no run to evaluate; name one or more run folders.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ParnasError("A run folder is given more than once; give each folder once.")
    runs = [Run(folder) for folder in folders]
    all_loaded = [_load_with_options(folder, options) for folder in folders]
    if len({loaded.header.fingerprint for loaded in all_loaded}) > 1:
        corpora = zip(folders, all_loaded, strict=True)
        listed = "".join(f"\n  - {folder}: {loaded.header.corpus}" for folder, loaded in corpora)
        raise ParnasError(f"The runs have different texts and cannot be compared; give only runs of one text:{listed}")
    threads = all_loaded[0].config.runtime.threads  # one number for the whole process, so for all runs
    eval_runs = [
        _open_run(name, run, loaded, threads)
        for name, run, loaded in zip(name_runs(runs), runs, all_loaded, strict=True)
    ]
    if several_tokenizers(eval_runs) and len({run.lost_information for run in eval_runs}) > 1:
        listed = "".join(f"\n  - {run.name}: {run.lost_information or 'nothing'}" for run in eval_runs)
        raise ParnasError(
            "The runs' tokenizers lose different information, so losses per word and per byte are not comparable; "
            f"give only runs whose tokenizers lose the same:{listed}"
        )
    return eval_runs


def _load_with_options(folder: Path, options: EvalOptions) -> LoadedRun:
    """Load a run and replace the settings of its configuration that the options change."""
    loaded = load(folder, best=options.best)
    config = check_config(loaded.config.model_dump(), "The changed configuration", options.overrides())
    return replace(loaded, config=config)


def _open_run(name: str, run: Run, loaded: LoadedRun, threads: int | None) -> EvalRun:
    """Prepare the text, the device and the network of a loaded run for scoring.

    A search is scored by its SuperNet, or by its derived network if the estimator has one-hot gates. `threads` is the
    number of CPU threads. Raises `ParnasError` if the text has changed since training.
    """
    device = choose_device(loaded.config.runtime.model_copy(update={"threads": threads}))
    streams = loaded.prepare_text(name)
    derived = isinstance(loaded.model, SuperNet) and ESTIMATORS[loaded.config.search.estimator].one_hot
    network = loaded.discrete() if derived else loaded.model
    return EvalRun(name, run, loaded, network.to(device.device), streams, device, loaded.config.evaluation_shape)


def several_tokenizers(runs: Sequence[EvalRun]) -> bool:
    """Return whether the runs have different tokens, so that their losses per token are not comparable."""
    return len({run.tokenizer_identity for run in runs}) > 1
