"""pt2 and onnx: the network as a program that runs without parnas."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parnas.errors import ParnasError, says_out_of_memory
from parnas.export.folder import Source, require_package, write_common
from parnas.export.segment import SegmentNetwork, SegmentState, Step, largest_difference

PROGRAM, ONNX = "network.pt2", "network.onnx"
MAX_SIZE = 2**24  # rows or tokens; without a bound, torch 2.6 rejects the largest integer
_OUTPUTS_README = """
`log_probs` [rows, length, {vocab_size}] are natural logarithms of the probabilities of the token after each. {state}
into the next call; a row begins a new text where its `lengths` is set to 0. Computed in float32.
"""
_PT2_README = (
    """
## Use

    import torch

    program = torch.export.load("{file}").module()
    lengths = torch.zeros(rows, dtype=torch.int64)  # filled positions of memory, for each row
    memory = tuple(torch.zeros(rows, {mem_len}, width) for width in {widths})
    log_probs, lengths, memory = program(tokens, lengths, memory)  # tokens [rows, any length] int64
"""
    + _OUTPUTS_README
)
_ONNX_README = (
    """
## Use

    import numpy, onnxruntime

    session = onnxruntime.InferenceSession("{file}")
    state = {{"lengths": numpy.zeros(rows, "int64")}}  # filled positions of memory, for each row
    for name, width in zip({names}, {widths}):
        state[name] = numpy.zeros((rows, {mem_len}, width), "float32")
    log_probs, *rest = session.run(None, {{"tokens": tokens, **state}})  # tokens [rows, any length] int64
    state = dict(zip(state, rest))
"""
    + _OUTPUTS_README
)


def to_pt2(source: Source, folder: Path) -> float:
    """Export a program of torch.export; returns the largest difference from the network in nats."""
    path = write_program(source, folder)
    return _finish(source, "pt2", path, _PT2_README, "`lengths` and `memory` go", run_program(path))


def to_onnx(source: Source, folder: Path) -> float:
    """Export a model for ONNX runtimes; returns the largest difference from the network in nats."""
    path = write_onnx(source, folder)
    return _finish(source, "onnx", path, _ONNX_README, "The state goes", run_onnx(path))


def _finish(source: Source, target: str, path: Path, readme: str, state: str, step: Step) -> float:
    """Write the common files beside a program, and compare it with the network."""
    network = SegmentNetwork(source.network, source.architecture)
    widths = network.widths()
    text = readme.format(
        file=path.name,
        names=_memory_names(len(widths)),
        widths=widths,
        mem_len=network.mem_len,
        vocab_size=source.network.vocab_size,
        state=state,
    )
    write_common(source, target, path.parent, text, {"memory": {"mem_len": network.mem_len, "widths": widths}})
    return largest_difference(source.network, step, network.empty, source.loaded.config.data.tgt_len)


def trace(source: Source) -> torch.export.ExportedProgram:
    """Trace the network for any number of rows and tokens; raises `ParnasError` for layers that cannot be traced."""
    network = SegmentNetwork(source.network, source.architecture).eval()
    state = network.empty(2)
    rows, tgt_len = (torch.export.Dim(name, min=1, max=MAX_SIZE) for name in ("batch", "segment"))
    shapes = ({0: rows, 1: tgt_len}, {0: rows}, tuple({0: rows} for _ in state.memory))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    hint = "Where a layer of yours has shapes that depend on values, export the weights alone: --to safetensors."
    with exporter(f"torch.export cannot trace {source.architecture}", hint), torch.no_grad():
        return torch.export.export(network, (tokens, *state), dynamic_shapes=shapes, strict=False)


def write_program(source: Source, folder: Path) -> Path:
    """Write the program of torch.export."""
    program = trace(source)
    with quiet():
        torch.export.save(program, folder / PROGRAM)
    return folder / PROGRAM


def run_program(path: Path) -> Step:
    """Return the step function of a written program."""
    with quiet():
        module = torch.export.load(path).module()

    def step(tokens: Tensor, state: SegmentState) -> tuple[Tensor, SegmentState]:
        log_probs, lengths, memory = module(tokens, *state)
        return log_probs, SegmentState(lengths, tuple(memory))

    return step


def _memory_names(count: int) -> list[str]:
    """Return the input names of the memory of each self-attention layer; outputs have the prefix `next_`."""
    return [f"memory_{number}" for number in range(1, count + 1)]


def write_onnx(source: Source, folder: Path) -> Path:
    """Write the ONNX model; raises `ParnasError` where a package is missing, or the exporter fails."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package, "onnx")
    program = trace(source)
    names = _memory_names(len(SegmentNetwork(source.network, source.architecture).widths()))
    options: dict[str, Any] = {
        "input_names": ["tokens", "lengths", *names],
        "output_names": ["log_probs", "next_lengths", *(f"next_{name}" for name in names)],
        "dynamic_shapes": ({0: "batch", 1: "segment"}, {0: "batch"}, tuple({0: "batch"} for _ in names)),
    }
    with exporter(f"torch.onnx cannot write {source.architecture}", "Try --to pt2."):
        model = torch.onnx.export(program, dynamo=True, verbose=False, **options)
        assert model is not None
        model.save(str(folder / ONNX))
    return folder / ONNX


def run_onnx(path: Path) -> Step:
    """Return the step function of a written model, run by onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    input_names = {each.name for each in session.get_inputs()}  # without lengths, where there is no memory

    def step(tokens: Tensor, state: SegmentState) -> tuple[Tensor, SegmentState]:
        names = _memory_names(len(state.memory))
        inputs = {"tokens": tokens, "lengths": state.lengths, **dict(zip(names, state.memory, strict=True))}
        outputs = session.run(None, {name: value.numpy() for name, value in inputs.items() if name in input_names})
        log_probs, lengths, *memory = map(torch.from_numpy, outputs)
        return log_probs, SegmentState(lengths, tuple(memory))

    return step


@contextmanager
def exporter(failure: str, hint: str) -> Iterator[None]:
    """Silence an exporter, and raise its errors, of whatever type, as `ParnasError`."""
    try:
        with quiet():
            yield
    except Exception as error:
        if says_out_of_memory(error):
            raise
        raise ParnasError(f"{failure} ({type(error).__name__}: {' '.join(str(error).split()):.300}). {hint}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of the exporters, which are about their internals."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
