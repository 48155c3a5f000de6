"""The time of a probe of a model of the size of GPT-2, 124 million parameters: `python benchmarks/probe.py`.

Weights and text are random, since the time does not depend on them; the folder is as `transformers` writes it. The time
is that of `parnas.probe` with its defaults, from reading the folder to the files of the result.
"""

import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import torch

import parnas
from parnas.errors import ParnasError
from parnas.pretrained.probe_model import PROBE_TOKENS
from parnas.training.device import Device

TINY: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 64, "vocab_size": 60}
TINY_TOKENS = 128


def write_gpt2(folder: Path, changes: dict[str, Any]) -> int:
    """Write GPT-2 with random weights and a tokenizer of numbered words; return its number of parameters."""
    try:
        import tokenizers
        import transformers
    except ImportError as error:
        raise ParnasError(f"pip install -e '.[transformers]' brings what this needs ({error}).") from error
    torch.manual_seed(1)
    config = transformers.GPT2Config(**changes)
    model = transformers.GPT2LMHeadModel(config)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder, safe_serialization=True)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return int(sum(each.numel() for each in model.parameters()))


def measure(device: Device, changes: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return sizes and seconds of a probe."""
    with tempfile.TemporaryDirectory(prefix="parnas-probe-") as place:
        folder = Path(place)
        parameters = write_gpt2(folder / "model", changes)
        ids = harness.draw_ids(changes.get("vocab_size", 50_257), tokens + 1)
        (folder / "text.txt").write_text(" ".join(f"w{number}" for number in ids), encoding="utf-8")
        runtime = {"runtime.device": str(device.device), "runtime.precision": device.precision}
        began = time.perf_counter()
        findings = parnas.probe(
            folder / "model", folder / "text.txt", tokens=tokens, overrides=runtime, out=folder / "out"
        )
        seconds = time.perf_counter() - began
    replacements = sum(len(changes) for changes in findings.probe.changes)
    sizes = {"parameters": parameters, "tokens": findings.probe.tokens, "layers": len(findings.probe.layers)}
    return {**sizes, "precision": device.precision, "replacements": replacements, "seconds": seconds}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("--precision", default="bf16", help="fp32 or bf16")
    parsed: Namespace = parser.parse_args(arguments)
    quick = parsed.size == "tiny"
    device = harness.choose(parsed.device, parsed.precision)
    record = measure(device, TINY if quick else {}, TINY_TOKENS if quick else PROBE_TOKENS)
    harness.print_table("A probe of GPT-2", [record | {"minutes": record["seconds"] / 60}])
    harness.write_result("probe", device, {"precisions": [device.precision], "probe": record}, parsed)


if __name__ == "__main__":
    harness.run(main)
