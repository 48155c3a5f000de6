"""onnx: the network for runtimes of that format."""

from pathlib import Path

import torch
from torch import Tensor

from parnas.errors import ParnasError, says_out_of_memory
from parnas.export.program import export_program, quiet
from parnas.export.segment import SegmentNetwork, State
from parnas.export.source import Source, need
from parnas.export.verify import Step

MODEL = "network.onnx"
README = """
## Use

    import numpy, onnxruntime

    session = onnxruntime.InferenceSession("{file}")
    state = {{"lengths": numpy.zeros(rows, "int64")}}  # filled positions of memory, for each row
    for name, width in zip({names}, {widths}):
        state[name] = numpy.zeros((rows, {mem_len}, width), "float32")
    log_probs, *rest = session.run(None, {{"tokens": tokens, **state}})  # tokens [rows, any length] int64
    state = dict(zip(state, rest))

`log_probs` [rows, length, {vocab_size}] are natural logarithms of the probabilities of the token after each. The state
goes into the next call; a row begins a new text where its `lengths` is set to 0. Computed in float32.
"""


def memory_names(count: int) -> list[str]:
    """Inputs of the memory of each self-attention layer; the outputs are called `next_` and this."""
    return [f"memory_{number}" for number in range(1, count + 1)]


def write_onnx(source: Source, folder: Path) -> Path:
    """Write the network; raises `ParnasError` where a package is missing, or the exporter fails."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "onnx")
    program = export_program(source)
    names = memory_names(len(SegmentNetwork(source.network, source.architecture).widths()))
    axes = ({0: "batch", 1: "segment"}, {0: "batch"}, tuple({0: "batch"} for _ in names))
    try:
        with quiet():
            model = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=["tokens", "lengths", *names],
                dynamic_shapes=axes,
                output_names=["log_probs", "next_lengths", *(f"next_{name}" for name in names)],
            )
            assert model is not None
            model.save(str(folder / MODEL))
    except Exception as error:  # the exporter has many of its own
        if says_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ParnasError(
            f"torch.onnx cannot write {source.architecture} ({type(error).__name__}: {reason}); try --to pt2."
        ) from error
    return folder / MODEL


def run_onnx(path: Path) -> Step:
    """The step of a file that was written, by onnxruntime on the CPU, for `verify`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = {each.name for each in session.get_inputs()}

    def step(tokens: Tensor, state: State) -> tuple[Tensor, State]:
        names = memory_names(len(state.memory))
        given = {"tokens": tokens, "lengths": state.lengths, **dict(zip(names, state.memory, strict=True))}
        found = session.run(None, {name: value.numpy() for name, value in given.items() if name in wanted})
        log_probs, lengths, *memory = map(torch.from_numpy, found)
        return log_probs, State(lengths, tuple(memory))

    return step


def describe_onnx(source: Source) -> str:
    """What the README says."""
    network = SegmentNetwork(source.network, source.architecture)
    widths = network.widths()
    return README.format(
        file=MODEL,
        names=memory_names(len(widths)),
        widths=widths,
        mem_len=network.mem_len,
        vocab_size=source.network.vocab_size,
    )
