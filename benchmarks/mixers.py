"""Measure what each layer costs: `python benchmarks/mixers.py`.

In the shapes of benchmarks/comparison.yaml:

* latency of inference and of a training step, in bf16 and fp32, relative to attention `s` in the same run;
* the same in bf16 for `mem_len` up to 4,096 positions;
* bytes that each layer keeps between tokens in generation, after texts of up to 16,384 tokens.

What the layers are worth is measured by `benchmarks/variants.py layers`.
"""

from collections.abc import Sequence
from typing import Any

import comparison
import harness
import torch
from trainings import read_study

from parnas.config.loader import Config
from parnas.config.schema import ModelConfig
from parnas.model.layers import make_layer
from parnas.model.memory import count_numbers
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.latency_table import profile
from parnas.training.progress import Silent

LAYERS = ("s", "s:kv_heads=2", "s:window=64", "s:window=32", "k", "r", "f", "g")
MEMORIES = (1024, 4096)  # positions, beside the configured 256
TEXTS = (1024, 4096, 16_384)  # tokens
SEGMENT = 512


def measure_latency(config: Config, rounds: int, memories: Sequence[int]) -> list[dict[str, Any]]:
    """Return the latency of each layer relative to attention, by precision, memory length and mode."""
    settings = [(precision, config.model.mem_len) for precision in ("bf16", "fp32")]
    settings += [("bf16", mem_len) for mem_len in memories]
    records = []
    for precision, mem_len in dict.fromkeys(settings):
        changes = {"runtime__precision": precision, "model__mem_len": mem_len}
        changes |= {"search__space": LAYERS, "search__blocks": 2}
        measured = profile(config.replace(**changes), Silent(), rounds=rounds, check=0)
        for mode, table in (("inference", measured.inference), ("training step", measured.training)):
            assert table is not None
            ms = {name: table.layers[name].median_ms for name in LAYERS}
            record = {"precision": precision, "memory": mem_len, "mode": mode, "s, ms": round(ms["s"], 2)}
            records.append(record | {name: ms[name] / ms["s"] for name in LAYERS[1:]})
    return records


def measure_generation_memory(config: ModelConfig, texts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the bytes of memory of one layer after texts of `texts` tokens, for one row in fp32.

    `mem_len` is the longest of these lengths: attention sees the whole text.
    """
    config = config.model_copy(update={"mem_len": max(texts), "cutoffs": (), "proj_factor": None})
    records = []
    for name in LAYERS:
        network = TransformerXL(config, [make_layer(name, config)], vocab_size=2).eval()
        kept, memory, done = {}, None, 0
        for length in texts:
            with torch.inference_mode():
                while done < length:  # in segments: the memory is the same as token by token
                    tokens = torch.zeros(1, min(SEGMENT, length - done), dtype=torch.long)
                    memory, done = network(tokens, memory, inference=True).memory, done + tokens.shape[1]
            kept[length] = 4 * count_numbers(memory)  # float32
        records.append({"layer": name} | {f"{length:,} tokens": number for length, number in kept.items()})
    return records


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__, ["tiny"], ["corpus"]).parse_args(arguments)
    tiny = parsed.size == "tiny"
    config, _ = read_study(comparison.CONFIG, parsed, comparison.TINY, {})
    device = harness.choose(parsed.device, config.runtime.precision)
    rounds, memories, texts = (2, (), (16, 32)) if tiny else (20, MEMORIES, TEXTS)
    latency = measure_latency(config, rounds, memories)
    harness.print_table("Latency of a layer relative to attention", latency)
    memory = measure_generation_memory(config.model, texts)
    harness.print_table("Bytes that a layer keeps in generation", memory)
    payload = {"precisions": ["bf16", "fp32"], "latency": latency, "generation_bytes": memory}
    harness.write_result("mixers", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
