"""x-transformers: the order and shape of the layers for that library's Decoder, without weights.

Its attention encodes positions differently from Transformer-XL, its feed-forward layer has another activation (GELU)
and its softmax is not adaptive, so a network of that shape must be trained from scratch.
"""

from pathlib import Path
from typing import Any

from parnas.architecture import ATTENTION, FEED_FORWARD, Architecture, LayerName
from parnas.config.schema import ModelConfig
from parnas.errors import ParnasError
from parnas.export.folder import Source, require_package, write_common
from parnas.model.layers import resize_heads
from parnas.runs.files import write_json, write_text

LAYERS = {ATTENTION: "a", FEED_FORWARD: "f"}
SNIPPET, SHAPE = "decoder.py", "decoder.json"
README = f"""
`{SNIPPET}` builds an `x_transformers.Decoder` with the same layers in the same order and of the same widths, and around
it a language model; `{SHAPE}` has its arguments. There are no weights: x-transformers has other relative positions,
another activation and another softmax, so the network must be trained from scratch.
"""


def to_x_transformers(source: Source, folder: Path) -> None:
    """Export the order and shape of the layers."""
    config, tgt_len = source.loaded.config.model, source.loaded.config.data.tgt_len
    arguments = decoder_arguments(source.architecture, config)
    _refuse_other_layers(build_decoder(source.architecture, config), source.architecture)
    write_common(source, "x-transformers", folder, README)
    write_json(folder / SHAPE, arguments)
    write_text(folder / SNIPPET, _make_snippet(arguments, source.network.vocab_size, tgt_len, config.mem_len))


def decoder_arguments(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `x_transformers.Decoder`: a layer `a` for each `s`, `f` for each `f`, none for identity.

    Raises:
        ParnasError: another layer, or attention layers that differ in their number of heads.
    """
    names = [LayerName.parse(name) for name in architecture.canonical()]
    if unknown := [str(name) for name in names if name.letter not in LAYERS]:
        raise ParnasError(f"x-transformers has no layer like {unknown[0]}; export the weights: --to safetensors.")
    shapes = [resize_heads(config, **dict(name.options)) for name in names if name.letter == ATTENTION]
    inner = [dict(name.options).get("d_inner", config.d_inner) for name in names if name.letter == FEED_FORWARD]
    head_counts = {shape.n_heads for shape in shapes} or {config.n_heads}
    if len(head_counts) > 1:
        raise ParnasError(
            f"The attention layers have {' and '.join(map(str, sorted(head_counts)))} heads, but an x-transformers "
            "Decoder has one number for all; export the weights: --to safetensors."
        )
    heads = head_counts.pop()
    projection = {"attn_project_out": True} if heads == 1 else {}  # by default left out for one head
    return {
        "dim": config.d_model,
        "depth": len(names),
        "heads": heads,
        "attn_dim_head": _one_or_each([shape.head_width for shape in shapes] or [config.head_width]),
        "ff_mult": _one_or_each([_factor(width, config.d_model) for width in inner or [config.d_inner]]),
        "attn_dropout": config.attention_dropout,
        "ff_dropout": config.dropout,
        "pre_norm": config.norm == "pre",
        "rel_pos_bias": True,
        **projection,
        "custom_layers": tuple(LAYERS[name.letter] for name in names),
    }


def build_decoder(architecture: Architecture | str, config: ModelConfig) -> Any:
    """Build an `x_transformers.Decoder` with the layers of an architecture and random weights.

    Raises:
        ParnasError: x-transformers is not installed, or has no such layers.
    """
    require_package("x_transformers", "x-transformers")
    from x_transformers import Decoder

    parsed = Architecture.parse(architecture) if isinstance(architecture, str) else architecture
    return Decoder(**decoder_arguments(parsed, config))


def _refuse_other_layers(decoder: Any, architecture: Architecture) -> None:
    """Raise `ParnasError` if a Decoder has other layers than the architecture; another version might build them."""
    built = "".join(decoder.layer_types)
    if built != "".join(LAYERS[name[0]] for name in architecture.canonical()):
        raise ParnasError(f"x-transformers built {built} for {architecture}; install another version of it, 2.31.")


def _make_snippet(arguments: dict[str, Any], vocab_size: int, tgt_len: int, mem_len: int) -> str:
    """Return a Python program that builds the network."""
    listed = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    return (
        f"from x_transformers import Decoder, TransformerWrapper\n\ndecoder = Decoder(\n{listed})\n"
        f"network = TransformerWrapper(\n    num_tokens={vocab_size},\n    max_seq_len={tgt_len},\n"
        f"    max_mem_len={mem_len},\n    use_abs_pos_emb=False,\n    attn_layers=decoder,\n)\n"
    )


def _factor(width: int, dim: int) -> float:
    """Return the factor by which x-transformers multiplies `dim`, rounding down, to get `width`."""
    exact = width / dim
    return exact if int(dim * exact) == width else (width + 0.5) / dim


def _one_or_each(values: list[Any]) -> Any:
    """Return the value that all layers share, or a tuple with that of each."""
    return values[0] if len(set(values)) == 1 else tuple(values)
