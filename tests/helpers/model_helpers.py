"""Small networks with large random weights, for the tests of the model."""

import math
import os

import pytest
import torch
from reference import load_transformers

from parnas.architecture import Architecture
from parnas.config.schema import SUBWORD_KINDS, ModelConfig, Reach
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL

VOCABULARY = 20


def model_config(**changes):
    """A tiny network without dropout."""
    return ModelConfig(**{"d_model": 8, "n_heads": 2, "d_inner": 12, "mem_len": 6, "dropout": 0.0, **changes})


def randomise(module, seed=0, std=0.4):
    """Set all parameters, also biases and norms, to random values so large that each changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else std * noise)
    return module


def make_network(arch="sfsf", seed=0, vocab_size=VOCABULARY, **changes):
    """A plain network with random weights, in evaluation mode."""
    network = TransformerXL.build(model_config(**changes), Architecture.parse(arch), vocab_size)
    if rows := network.config.subword_features:
        network.embedding.set_features(random_ids(vocab_size, SUBWORD_KINDS, seed + 1, rows).int())
    return randomise(network, seed).eval()


def make_supernet(blocks=3, space=("s", "f", "i"), seed=0, vocab_size=VOCABULARY, **changes):
    """A SuperNet with random weights and alphas, in evaluation mode."""
    return randomise(SuperNet(model_config(**changes), space, blocks, vocab_size), seed).eval()


def reach(mem_len=6, cmem_len=0, **more):
    """Return how far attention looks back."""
    return Reach(mem_len, cmem_len, **more)


def random_ids(batch, length, seed=0, vocab_size=VOCABULARY):
    """Token ids [B, T]."""
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_memories(memory):
    """Return the memory of each block; all candidates of a stochastic block must have the same."""
    found = []
    for kept in memory:
        parts = [part for part in kept if part is not None] if isinstance(kept, tuple) else [kept]
        assert all(torch.equal(part, parts[0]) for part in parts[1:])
        found.append(parts[0])
    return found


def read_in_segments(network, ids, tgt_len, **settings):
    """Read a text in segments; return the hidden states [B, T, D] and the last memory."""
    hidden, memory = [], None
    for segment in ids.split(tgt_len, dim=1):
        output = network(segment, memory, **settings)
        memory = output.memory
        hidden.append(output.hidden)
    return torch.cat(hidden, dim=1), memory


def sinusoids(distance, width):
    """Return the encoding of one distance: sines by frequency, decreasing from 1, then cosines."""
    angles = [distance / 10000 ** (2 * j / width) for j in range(math.ceil(width / 2))]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])[:width]


def near(found, expected, atol=1e-5):
    """Assert that tensors are equal but for rounding."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


def require_parity():
    """Skip the tests of a module without the extra `parity`; in CI (CI=true) they fail."""
    try:
        load_transformers()
    except ParnasError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI has to run this test: {error}")
        pytest.skip(str(error))
