"""Small networks with weights that hide nothing, for the tests of the model."""

import torch

from parnas.architecture import Architecture
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.sections import ModelConfig

VOCABULARY = 20


def model_config(**changes):
    """A tiny network without dropout."""
    return ModelConfig(**{"d_model": 8, "n_heads": 2, "d_inner": 12, "mem_len": 6, "dropout": 0.0, **changes})


def randomise(module, seed=0, std=0.4):
    """Give every parameter, biases and norms too, values so large that each of them counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else std * noise)
    return module


def make_network(arch="sfsf", seed=0, vocab_size=VOCABULARY, **changes):
    """A plain network with random weights, in evaluation mode."""
    return randomise(TransformerXL.build(model_config(**changes), Architecture.parse(arch), vocab_size), seed).eval()


def make_supernet(blocks=3, space=("s", "f", "i"), seed=0, vocab_size=VOCABULARY, **changes):
    """A SuperNet with random weights and alphas, in evaluation mode."""
    return randomise(SuperNet(model_config(**changes), space, blocks, vocab_size), seed).eval()


def random_ids(batch, length, seed=0, vocab_size=VOCABULARY):
    """Token ids [B, T]."""
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def read_in_segments(network, ids, tgt_len, **settings):
    """Hidden states [B, T, D] and the last memory of a text that is read segment by segment."""
    hidden, memory = [], None
    for segment in ids.split(tgt_len, dim=1):
        output, memory = network(segment, memory, **settings)
        hidden.append(output)
    return torch.cat(hidden, dim=1), memory
