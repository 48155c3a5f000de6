"""What every exported folder holds: `config.json`, the tokenizer and a README; and loading one of them back."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import save_model

from parnas.architecture import Architecture
from parnas.data.pieces import MODEL_FILE
from parnas.data.tokenizers import SETTINGS_FILE, Tokenizer, load_tokenizer
from parnas.errors import ParnasError
from parnas.export.source import Source
from parnas.files import read_json_object, refuse_foreign_links, write_json, write_text
from parnas.inputs import plain
from parnas.model.transformer_xl import TransformerXL
from parnas.run import package_version
from parnas.sections import ModelConfig
from parnas.training.checkpoint import WEIGHTS, load_weights, refuse_larger
from parnas.training.phases import continue_text

CONFIG, README, TOKENIZER = "config.json", "README.md", "tokenizer"
COMMON = {CONFIG, README, TOKENIZER, *(f"{TOKENIZER}/{name}" for name in (SETTINGS_FILE, MODEL_FILE))}
"""What an export of any target may hold."""
KEYS = {"target", "vocab_size", "eos_id", "tgt_len", "model", "trained", "parnas"}
"""By which settings are known as ours."""


@dataclass(frozen=True)
class Exported:
    """A network and its tokenizer, from an exported folder alone."""

    model: TransformerXL  # in evaluation mode, on the CPU, in float32
    tokenizer: Tokenizer
    architecture: Architecture
    config: dict[str, Any]  # the content of config.json

    def generate(self, prompt: str, tokens: int = 100, temperature: float = 1.0, top_k: int | None = None) -> str:
        """Continue a text by so many sampled tokens."""
        return continue_text(self.model, self.tokenizer, prompt, tokens, temperature, top_k)


def write_common(source: Source, target: str, folder: Path, more: dict[str, Any]) -> None:
    """Write settings and tokenizer; `more` is what the target adds to the settings."""
    loaded = source.loaded
    arch = str(source.architecture)
    settings = {
        "target": target,
        "arch": arch,
        "vocab_size": loaded.tokenizer.vocab_size,
        "eos_id": loaded.tokenizer.eos_id,
        "tgt_len": loaded.config.data.tgt_len,
        "model": {**loaded.config.model.model_dump(mode="json"), "arch": arch},
        "trained": {"run": source.run.name, "kind": source.run.kind(), "steps": loaded.step},
        "parnas": package_version("parnas"),
    }
    write_json(folder / CONFIG, {**settings, **more})
    (folder / TOKENIZER).mkdir()
    loaded.tokenizer.save(folder / TOKENIZER)


def write_readme(source: Source, folder: Path, text: str) -> None:
    """Say what is in the folder; `text` is what the target has to say."""
    loaded, name = source.loaded, source.run.name
    searched = source.run.kind() == "search"
    origin = f"Derived by the search `{name}`, with the SuperNet's weights" if searched else f"Trained as `{name}`"
    about = (
        f"{origin} ({loaded.step:,} steps): a Transformer-XL of {len(source.architecture)} layers, width "
        f"{loaded.config.model.d_model}, {loaded.tokenizer.vocab_size:,} symbols. `{CONFIG}` has its settings, "
        f"`{TOKENIZER}/` its tokenizer, which parnas reads. Written by parnas {package_version('parnas')}."
    )
    write_text(folder / README, f"# {source.architecture}\n\n{about}\n{text}")


def write_weights(source: Source, folder: Path) -> Path:
    """Write the weights, each once where tables are shared."""
    save_model(source.network, str(folder / WEIGHTS), {"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # which safetensors leaves unreadable for others
    return folder / WEIGHTS


def describe_tensors(network: TransformerXL) -> str:
    """A table of names and shapes, those that share their weights in one row."""
    rows: dict[int, tuple[list[str], list[int]]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        rows.setdefault(id(parameter), ([], list(parameter.shape)))[0].append(f"`{name}`")
    listed = "".join(f"| {', '.join(names)} | {shape} |\n" for names, shape in rows.values())
    return f"| tensor (those in one row are the same) | shape |\n| --- | --- |\n{listed}"


def written_target(folder: Path) -> str | None:
    """The target whose settings lie in a folder; none for the settings of other programs, or where there are none."""
    try:
        content = read_json_object(folder / CONFIG)
    except (ParnasError, OSError):
        return None
    return str(content["target"]) if content.keys() >= KEYS else None


def load_exported(folder: str | Path) -> Exported:
    """Rebuild the network of a folder that `parnas export --to safetensors` wrote; nothing in it is executed.

    Raises `ParnasError` where the folder is not whole, or has the settings of another network than its weights.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file() or not (path / WEIGHTS).is_file():
        raise ParnasError(f"{folder} has no {CONFIG} or no {WEIGHTS}; parnas export RUN --to safetensors writes both.")
    refuse_foreign_links(path)
    content = read_json_object(path / CONFIG)
    try:
        config = ModelConfig.model_validate(plain(content["model"]))
        architecture = Architecture.parse(content["arch"])
    except (KeyError, ValidationError, ParnasError) as error:
        reason = error if isinstance(error, ParnasError) else f"{type(error).__name__}: {error!s:.300}"
        raise ParnasError(
            f"{path / CONFIG} is not what an export wrote ({reason}); restore it, or export anew."
        ) from error
    tokenizer = load_tokenizer(path / TOKENIZER)

    def build() -> TransformerXL:
        return TransformerXL.build(config, architecture, tokenizer.vocab_size)

    refuse_larger(build, path)
    model = build()
    load_weights(path, model)
    return Exported(model.eval(), tokenizer, architecture, content)
