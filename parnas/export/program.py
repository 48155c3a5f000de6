"""Export to pt2 and onnx: the network as a program that runs without parnas."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from parnas.errors import ParnasError, says_out_of_memory
from parnas.export.folder import Source, require_package, write_common
from parnas.export.segment import SegmentNetwork, SegmentState, Step, largest_difference

PT2, ONNX = "network.pt2", "network.onnx"
_MAX_SIZE = 2**24  # largest number of rows or tokens; torch 2.6 requires a bound below the largest integer
_OUTPUTS_README = """
`log_probs` [rows, length, {vocab_size}] are the natural logarithms of the next token's probabilities, after each token.
Pass the returned lengths and memory to the next call; set a row's `lengths` to 0 to begin a new text in it. Computed in
float32.
"""
_PT2_README = (
    """
## Use

    import torch

    program = torch.export.load("network.pt2").module()
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

    session = onnxruntime.InferenceSession("network.onnx")
    state = {{"lengths": numpy.zeros(rows, "int64")}}  # filled positions of memory, for each row
    for name, width in zip({names}, {widths}):
        state[name] = numpy.zeros((rows, {mem_len}, width), "float32")
    log_probs, *rest = session.run(None, {{"tokens": tokens, **state}})  # tokens [rows, any length] int64
    state = dict(zip(state, rest))
"""
    + _OUTPUTS_README
)


def to_pt2(source: Source, folder: Path) -> float:
    """Write the network as a torch.export program; return its `largest_difference` from the network, in nats."""
    network = SegmentNetwork(source.network, source.architecture)
    write_pt2(trace(network), folder / PT2)
    return _finish(source, network, "pt2", folder, _PT2_README, load_pt2(folder / PT2))


def to_onnx(source: Source, folder: Path) -> float:
    """Write the network as an ONNX model; return its `largest_difference` from the network, in nats.

    Raises:
        ParnasError: A package for ONNX is missing, or a layer cannot be exported.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package, "onnx")
    network = SegmentNetwork(source.network, source.architecture)
    write_onnx(trace(network), folder / ONNX, len(network.widths()))
    return _finish(source, network, "onnx", folder, _ONNX_README, load_onnx(folder / ONNX))


def _finish(source: Source, network: SegmentNetwork, target: str, folder: Path, readme: str, step: Step) -> float:
    """Write the files that every target has, and compare the written program with the network.

    `step` runs the written program. Returns the `largest_difference` between program and `source.network`, in nats.
    """
    widths = network.widths()
    memory = {"mem_len": network.mem_len, "widths": widths}
    text = readme.format(names=_memory_names(len(widths)), vocab_size=source.network.vocab_size, **memory)
    write_common(source, target, folder, text, {"memory": memory})
    return largest_difference(source.network, step, network.empty, source.loaded.config.data.tgt_len)


def trace(network: SegmentNetwork) -> ExportedProgram:
    """Trace a network with torch.export, for any batch size and segment length.

    Raises:
        ParnasError: torch.export cannot trace one of the layers.
    """
    state = network.empty(2)
    rows, tgt_len = (torch.export.Dim(name, min=1, max=_MAX_SIZE) for name in ("batch", "segment"))
    shapes = ({0: rows, 1: tgt_len}, {0: rows}, tuple({0: rows} for _ in state.memory))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    hint = "If a registered layer has shapes that depend on values, export the weights alone: --to safetensors."
    with _exporter(f"torch.export cannot trace {network.architecture}", hint), torch.no_grad():
        return torch.export.export(network.eval(), (tokens, *state), dynamic_shapes=shapes, strict=False)


def write_pt2(program: ExportedProgram, path: Path) -> None:
    """Write a traced network to `path` as a program of torch.export."""
    with _exporter("torch.export cannot write the program", "Try --to safetensors."):
        torch.export.save(program, path)


def load_pt2(path: Path) -> Step:
    """Load a program that `write_pt2` wrote, and return it as a `Step` function with a `SegmentState`."""
    with _exporter(f"torch.export cannot read {path}", "Try --to safetensors."):
        module = torch.export.load(path).module()

    def step(tokens: Tensor, state: SegmentState) -> tuple[Tensor, SegmentState]:
        log_probs, lengths, memory = module(tokens, *state)
        return log_probs, SegmentState(lengths, tuple(memory))

    return step


def write_onnx(program: ExportedProgram, path: Path, memories: int) -> None:
    """Write a traced network as an ONNX model with `memories` inputs for memory, one per self-attention layer."""
    names = _memory_names(memories)
    with _exporter("torch.onnx cannot write the program", "Try --to pt2."):
        model = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=["tokens", "lengths", *names],
            output_names=["log_probs", "next_lengths", *(f"next_{name}" for name in names)],
            dynamic_shapes=({0: "batch", 1: "segment"}, {0: "batch"}, tuple({0: "batch"} for _ in names)),
        )
        assert model is not None
        model.save(str(path))


def load_onnx(path: Path) -> Step:
    """Load a model that `write_onnx` wrote, and return it as a `Step` function; onnxruntime runs it on the CPU."""
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


def _memory_names(count: int) -> list[str]:
    """Return the names of the `count` memory inputs, one per self-attention layer; output names add `next_`."""
    return [f"memory_{number}" for number in range(1, count + 1)]


@contextmanager
def _exporter(failure: str, hint: str) -> Iterator[None]:
    """Hide the warnings of torch's exporters, which concern their internals, and turn errors into `ParnasError`.

    The message of the error consists of `failure`, the original error in brackets, and `hint`, the advice.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if says_out_of_memory(error):
            raise
        raise ParnasError(f"{failure} ({type(error).__name__}: {' '.join(str(error).split()):.300}). {hint}") from error
    finally:
        logging.disable(disabled)
