"""`parnas export`: write the network of a run for other programs, and compare the export's outputs with it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_model
from torch import Tensor

from parnas.errors import ParnasError
from parnas.export.decoder import DECODER_ARGUMENTS, DECODER_PROGRAM, to_x_transformers
from parnas.export.folder import COMMON_FILES, CONFIG, Source, load_exported, read_target, write_common
from parnas.export.program import ONNX, PT2, to_onnx, to_pt2
from parnas.export.segment import largest_difference
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import atomic_folder
from parnas.runs.run import Run
from parnas.training.checkpoints import WEIGHTS
from parnas.training.loaded_run import load

_MAX_DIFFERENCE = 1e-4
"""Largest accepted difference, in nats, between a log-probability from an export and from the network.

Rounding of float32 causes far smaller differences."""
_WEIGHTS_README = """
## Use

    from parnas.export import load_exported

    exported = load_exported("FOLDER")
    print(exported.generate("The", tokens=40))

`{weights}` holds the weights in float32. Layers are numbered in the order of the architecture. The first half of the
rows of `key_value` are the keys of all heads, the second half the values; with `kv_heads`, consecutive heads of queries
share one of keys and values. `u` and `v` [heads, width] are the biases of
relative attention (Dai et al. 2019, section 3.3). An adaptive softmax has its frequent tokens and its clusters in one
softmax (`head.tables.0` and `head.cluster_weight`), and one more softmax for the tokens of each cluster (the other
tables). The embedding is multiplied by the square root of the width. With `subword_features`, the vector of a token in
embedding and softmax is its row of `embedding.tables.0` plus the rows of `embedding.shared` that `embedding.features`
names. With `pointer_len`, the softmax is mixed with a pointer (Merity et al. 2017, arXiv 1609.07843).

{tensors}"""


def _to_safetensors(source: Source, folder: Path) -> float:
    """Write weights and settings; return the `largest_difference` of the export from the network, in nats."""
    readme = _WEIGHTS_README.format(weights=WEIGHTS, tensors=_describe_tensors(source.network))
    write_common(source, "safetensors", folder, readme)
    save_model(source.network, str(folder / WEIGHTS), {"format": "pt"})  # writes tied weights once
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors makes the file unreadable for other users
    model = load_exported(folder).model

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output = model(tokens, state, inference=True)
        return model.log_probs(output), output.memory

    return largest_difference(source.network, step, lambda _: None, source.loaded.config.data.tgt_len)


def _describe_tensors(network: TransformerXL) -> str:
    """Return a Markdown table of tensor names and shapes; all names of a tied tensor are in one row."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(f"`{name}`")
    rows = "".join(f"| {', '.join(shared)} | {list(tensor.shape)} |\n" for tensor, shared in names.items())
    return f"| tensor (those in one row are the same) | shape |\n| --- | --- |\n{rows}"


class _Target(NamedTuple):
    """An export format: the function that writes it, and the names of its files."""

    write: Callable[[Source, Path], float | None]  # fills a folder; returns `ExportResult.difference`
    files: frozenset[str]  # besides `COMMON_FILES`


TARGETS = {
    "safetensors": _Target(_to_safetensors, frozenset({WEIGHTS})),
    "x-transformers": _Target(to_x_transformers, frozenset({DECODER_PROGRAM, DECODER_ARGUMENTS})),
    "pt2": _Target(to_pt2, frozenset({PT2})),
    "onnx": _Target(to_onnx, frozenset({ONNX, f"{ONNX}.data"})),
}


@dataclass(frozen=True)
class ExportResult:
    """The files of an export, and the largest difference of its outputs from those of the network."""

    run: Path  # run folder
    folder: Path
    target: str
    architecture: str
    files: tuple[str, ...]  # in the folder
    difference: float | None  # see `largest_difference`, in nats; `None` for an export without weights

    def describe(self) -> str:
        """Return a line of text that names the architecture, the target and the difference of outputs."""
        difference = (
            "" if self.difference is None else f", log-probabilities differ by at most {self.difference:.1e} nats"
        )
        return f"exported {self.architecture} as {self.target}{difference}"

    def to_dict(self) -> dict[str, Any]:
        """Return run, target, architecture and difference of outputs for JSON."""
        arch = self.architecture
        return {"run": str(self.run), "target": self.target, "arch": arch, "difference": self.difference}


def export_run(run: Run | str | Path, target: str, out: str | Path | None = None, best: bool = False) -> ExportResult:
    """Write the network of a run in another format; check that an export with weights has the same log-probabilities.

    Args:
        run: A retraining, or a search, of which the derived network with the shared weights is exported.
        target: `safetensors`, `x-transformers`, `pt2` or `onnx`.
        out: A new or empty folder, an earlier export to replace, or a link to one; by default `RUN/exports/TARGET`.
        best: Export the weights with the lowest validation loss, instead of the last ones.

    Raises:
        ParnasError: The target is unknown or not possible for these layers, a package is missing, the folder contains
            other files, or a log-probability of the export differs from the network's by more than 1e-4 nats. In all
            these cases the folder stays unchanged.
    """
    if target not in TARGETS:
        raise ParnasError(f"The target (--to) is {target!r}; give {', '.join(TARGETS)}.")
    run = run if isinstance(run, Run) else Run(run)
    folder = run.folder / "exports" / target if out is None else Path(out)
    resolved = folder.resolve()
    _refuse_used(resolved)
    loaded = load(run.folder, best=best)
    source = Source(run, loaded, loaded.discrete().float(), loaded.architecture.canonical())
    resolved.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(resolved) as temporary:
        difference = TARGETS[target].write(source, temporary)
        if difference is not None and difference > _MAX_DIFFERENCE:
            raise ParnasError(
                f"A log-probability of the {target} export differs from the network's by {difference:.2g} nats, "
                f"more than {_MAX_DIFFERENCE:g}; the export was removed. Try another version of torch or "
                "onnxruntime, or --to safetensors."
            )
    files = tuple(sorted(path.relative_to(resolved).as_posix() for path in resolved.rglob("*") if path.is_file()))
    return ExportResult(run.folder, folder, target, str(source.architecture), files, difference)


def _refuse_used(folder: Path) -> None:
    """Raise `ParnasError` unless a folder does not exist, is empty, or holds an earlier export and no other files."""
    if Path.cwd().is_relative_to(folder):
        raise ParnasError(f"{folder} is or contains the current folder and cannot be replaced; choose another (--out).")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    target = read_target(folder)
    if target not in TARGETS:
        raise ParnasError(f"{folder} is neither empty nor an earlier export to replace; choose another folder (--out).")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if others := sorted(files - TARGETS[target].files - COMMON_FILES):
        raise ParnasError(
            f"{folder} holds an earlier export to replace, but also other files, such as {others[0]}; move them away, "
            "or choose another folder (--out)."
        )
