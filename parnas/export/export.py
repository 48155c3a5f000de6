"""`parnas export`: write a network in a form that others read, and check what was written against the network."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from parnas.errors import ParnasError
from parnas.export import decoder
from parnas.export.folder import (
    COMMON,
    describe_tensors,
    load_exported,
    write_common,
    write_readme,
    write_weights,
    written_target,
)
from parnas.export.onnx_file import MODEL, describe_onnx, run_onnx, write_onnx
from parnas.export.program import PROGRAM, describe_program, export_program, run_program, write_program
from parnas.export.segment import SegmentNetwork
from parnas.export.source import Source, open_source
from parnas.export.verify import Step, largest_difference, refuse_different
from parnas.files import folder_in_one_piece, write_json, write_text
from parnas.run import Run
from parnas.training.checkpoint import WEIGHTS

DECODER_README = """
`{snippet}` builds an `x_transformers.Decoder` with the same layers in the same order and of the same widths, and around
it a language model; `{shape}` has its arguments. No weights come with it: relative positions, the activation and the
softmax are others there, so the network is to be trained anew.
"""
WEIGHTS_README = """
## Use

    from parnas.export import load_exported

    exported = load_exported("FOLDER")
    print(exported.generate("The", tokens=40))

`{weights}` holds the weights in float32. Layers are numbered in the order of the string. Of `key_value`, the first half
of the rows are the keys of all heads, the second half the values; `u` and `v` [heads, width] are the biases of relative
attention (Dai et al. 2019, section 3.3); of an adaptive softmax, `head.tables.0` and `head.cluster_weight` are scored
together, each later table behind the logit of its cluster. The embedding is multiplied by the root of the width.

{tensors}"""


@dataclass(frozen=True)
class Export:
    """What was written, and how far it is from the network."""

    run: Path  # its folder
    folder: Path
    target: str
    architecture: str
    files: tuple[str, ...]  # in the folder
    difference: float | None  # largest of a log-probability, in nats; none where only the shape is exported

    def describe(self) -> str:
        """A line for people."""
        against = "" if self.difference is None else f", at most {self.difference:.1e} nats from the network"
        return f"exported {self.architecture} as {self.target}{against}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "run": str(self.run),
            "target": self.target,
            "arch": self.architecture,
            "difference": self.difference,
        }


class Target(NamedTuple):
    """A form: `write` fills a folder and returns the largest difference from the network, if there is any to tell."""

    write: Callable[[Source, Path], float | None]
    what: str
    files: frozenset[str]  # besides those of every export


def to_safetensors(source: Source, folder: Path) -> float:
    """Weights and settings, for parnas and whoever reads tensors by name."""
    write_common(source, "safetensors", folder, {})
    write_weights(source, folder)
    write_readme(source, folder, WEIGHTS_README.format(weights=WEIGHTS, tensors=describe_tensors(source.network)))
    read_back = load_exported(folder).model

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output = read_back(tokens, state, inference=True)
        return read_back.log_probs(output.hidden), output.memory

    return largest_difference(source.network, step, lambda _: None, source.loaded.config.data.tgt_len)


def to_x_transformers(source: Source, folder: Path) -> None:
    """The order and shape of the layers."""
    config = source.loaded.config.model
    arguments = decoder.decoder_arguments(source.architecture, config)
    decoder.refuse_other_layers(decoder.build_decoder(source.architecture, config), source.architecture)
    write_common(source, "x-transformers", folder, {})
    write_json(folder / decoder.SHAPE, arguments)
    snippet = decoder.write_snippet(
        arguments, source.network.vocab_size, source.loaded.config.data.tgt_len, config.mem_len
    )
    write_text(folder / decoder.SNIPPET, snippet)
    write_readme(source, folder, DECODER_README.format(snippet=decoder.SNIPPET, shape=decoder.SHAPE))


def to_pt2(source: Source, folder: Path) -> float:
    """A program of torch.export."""
    path = write_program(export_program(source), folder)
    write_common(source, "pt2", folder, _describe_memory(source))
    write_readme(source, folder, describe_program(source))
    return _difference(source, run_program(path))


def to_onnx(source: Source, folder: Path) -> float:
    """A model for runtimes of ONNX."""
    path = write_onnx(source, folder)
    write_common(source, "onnx", folder, _describe_memory(source))
    write_readme(source, folder, describe_onnx(source))
    return _difference(source, run_onnx(path))


TARGETS = {
    "safetensors": Target(to_safetensors, "weights and settings", frozenset({WEIGHTS})),
    "x-transformers": Target(
        to_x_transformers, "the order and shape of the layers", frozenset({decoder.SNIPPET, decoder.SHAPE})
    ),
    "pt2": Target(to_pt2, "a program of torch.export", frozenset({PROGRAM})),
    "onnx": Target(to_onnx, "a model for onnxruntime and others", frozenset({MODEL, f"{MODEL}.data"})),
}


def export_run(run: Run | str | Path, target: str, out: str | Path | None = None, best: bool = False) -> Export:
    """Write the network of a run as one of `TARGETS`, and check what was written against the network.

    Of a search it is the derived network, with the SuperNet's weights. out: a folder that is new or empty, or an export
    to be replaced, or a link to one; by default `RUN/exports/TARGET`. best: the weights of the least validation loss.

    Raises `ParnasError` for a target that is not known or not possible for these layers, a package that is missing, a
    folder that holds anything else, and where a log-probability differs by more than 1e-4 nats; nothing is written.
    """
    if target not in TARGETS:
        raise ParnasError(f"The target (--to) is {target!r}; give {', '.join(TARGETS)}.")
    opened = run if isinstance(run, Run) else Run(run)
    folder = opened.folder / "exports" / target if out is None else Path(out)
    place = folder.resolve()
    refuse_used(place)
    source = open_source(opened, best)
    place.parent.mkdir(parents=True, exist_ok=True)
    with folder_in_one_piece(place) as beside:
        difference = TARGETS[target].write(source, beside)
        if difference is not None:
            refuse_different(difference, target)
    files = tuple(sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()))
    return Export(opened.folder, folder, target, str(source.architecture), files, difference)


def refuse_used(folder: Path) -> None:
    """Raise where an export cannot take a folder's place: it is in use, or holds what no export has written."""
    if Path.cwd().is_relative_to(folder):
        raise ParnasError(f"{folder} is where this program works, and would be replaced; name a new folder inside it.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    target = written_target(folder)
    if target not in TARGETS:
        raise ParnasError(f"{folder} holds something else than an export; choose another folder (--out).")
    known = TARGETS[target].files | COMMON
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if more := sorted(held - known):
        raise ParnasError(
            f"{folder} is an export that holds something else besides, such as {more[0]}; move that away, or choose "
            "another folder (--out)."
        )


def _difference(source: Source, step: Step) -> float:
    network = SegmentNetwork(source.network, source.architecture)
    return largest_difference(source.network, step, network.empty, source.loaded.config.data.tgt_len)


def _describe_memory(source: Source) -> dict[str, Any]:
    """What the settings say of inputs and outputs."""
    network = SegmentNetwork(source.network, source.architecture)
    return {"memory": {"mem_len": network.mem_len, "widths": network.widths()}}
