"""pt2: the network as a program of torch.export, which runs without parnas."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from parnas.errors import ParnasError, says_out_of_memory
from parnas.export.segment import SegmentNetwork, State
from parnas.export.source import Source
from parnas.export.verify import Step

PROGRAM = "network.pt2"
MOST = 2**24  # rows or tokens; without a bound, torch 2.6 finds that the largest integer would not do
README = """
## Use

    import torch

    program = torch.export.load("{file}").module()
    lengths = torch.zeros(rows, dtype=torch.int64)  # filled positions of memory, for each row
    memory = tuple(torch.zeros(rows, {mem_len}, width) for width in {widths})
    log_probs, lengths, memory = program(tokens, lengths, memory)  # tokens [rows, any length] int64

`log_probs` [rows, length, {vocab_size}] are natural logarithms of the probabilities of the token after each. `lengths`
and `memory` go into the next call; a row begins a new text where its `lengths` is set to 0. Computed in float32.
"""


def export_program(source: Source) -> torch.export.ExportedProgram:
    """The program, with any number of rows and tokens; raises `ParnasError` for layers that cannot be traced."""
    network = SegmentNetwork(source.network, source.architecture).eval()
    state = network.empty(2)
    rows, tgt_len = (torch.export.Dim(name, min=1, max=MOST) for name in ("batch", "segment"))
    shapes = ({0: rows, 1: tgt_len}, {0: rows}, tuple({0: rows} for _ in state.memory))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(network, (tokens, *state), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export has many of its own, and own layers may raise anything
        if says_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ParnasError(
            f"torch.export cannot trace {source.architecture} ({type(error).__name__}: {reason}). Where a layer of "
            "yours has shapes that depend on values, export the weights alone: --to safetensors."
        ) from error


def write_program(program: torch.export.ExportedProgram, folder: Path) -> Path:
    """Write the program."""
    with quiet():
        torch.export.save(program, folder / PROGRAM)
    return folder / PROGRAM


def run_program(path: Path) -> Step:
    """The step of a program that was written, for `verify`."""
    with quiet():
        module = torch.export.load(path).module()

    def step(tokens: Tensor, state: State) -> tuple[Tensor, State]:
        log_probs, lengths, memory = module(tokens, *state)
        return log_probs, State(lengths, tuple(memory))

    return step


def describe_program(source: Source) -> str:
    """What the README says."""
    network = SegmentNetwork(source.network, source.architecture)
    return README.format(
        file=PROGRAM, mem_len=network.mem_len, widths=network.widths(), vocab_size=source.network.vocab_size
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' warnings, which are about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
