"""Export to x-transformers: the same layers in the same order for that library's Decoder, without weights.

Attention in x-transformers encodes positions differently from Transformer-XL, its feed-forward layer has another
activation (GELU) and its softmax is not adaptive, so an exported network must be trained from scratch.
"""

from pathlib import Path
from typing import Any

from parnas.architecture import ATTENTION, FEED_FORWARD, Architecture, LayerName
from parnas.config.schema import ModelConfig
from parnas.errors import ParnasError
from parnas.export.folder import Source, require_package, write_common
from parnas.model.layers import resize_heads
from parnas.runs.files import write_json, write_text

DECODER_PROGRAM, DECODER_ARGUMENTS = "decoder.py", "decoder.json"
_LAYER_TYPES = {ATTENTION: "a", FEED_FORWARD: "f"}
_README = f"""
`{DECODER_PROGRAM}` builds an `x_transformers.Decoder` with the same layers in the same order and of the same widths, in
a language model; `{DECODER_ARGUMENTS}` has its arguments. There are no weights: x-transformers has other relative
positions, another activation and another softmax, no pointer and no subword features, so the network must be trained
from scratch.
"""


def to_x_transformers(source: Source, folder: Path) -> None:
    """Write `decoder.py`, which builds the layers of a network in x-transformers, and its arguments, `decoder.json`.

    Raises:
        ParnasError: x-transformers is not installed, cannot build these layers (see `decoder_arguments`), or builds
            other layers than these.
    """
    config = source.loaded.config
    arguments = decoder_arguments(source.architecture, config.model)
    built = build_decoder(source.architecture, config.model).layer_types
    if tuple(built) != arguments["custom_layers"]:
        raise ParnasError(
            f"x-transformers built the layers {''.join(built)} instead of {''.join(arguments['custom_layers'])} for "
            f"{source.architecture} (a attention, f feed-forward); install version 2.31."
        )
    write_common(source, "x-transformers", folder, _README)
    write_json(folder / DECODER_ARGUMENTS, arguments)
    listed = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    write_text(
        folder / DECODER_PROGRAM,
        f"from x_transformers import Decoder, TransformerWrapper\n\ndecoder = Decoder(\n{listed})\n"
        f"network = TransformerWrapper(\n    num_tokens={source.network.vocab_size},\n"
        f"    max_seq_len={config.data.tgt_len},\n    max_mem_len={config.model.mem_len},\n"
        "    use_abs_pos_emb=False,\n    attn_layers=decoder,\n)\n",
    )


def decoder_arguments(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `x_transformers.Decoder` for an architecture of the layers `s`, `f` and identity.

    Self-attention `s` becomes the layer type `a`, feed-forward `f` the type `f`; identity is left out.

    Raises:
        ParnasError: The architecture has other layers, or attention layers that differ in their number of heads.
    """
    layers = [LayerName.parse(name) for name in architecture.canonical()]
    if unknown := [
        str(each)
        for each in layers
        if each.letter not in _LAYER_TYPES or not {"window", "kv_heads"}.isdisjoint(dict(each.options))
    ]:
        raise ParnasError(
            f"{unknown[0]} cannot become a layer of x-transformers, only f, and s without window or kv_heads, can; "
            "export the weights instead: --to safetensors."
        )
    options = [(layer.letter, dict(layer.options)) for layer in layers]
    attention = [resize_heads(config, **given) for letter, given in options if letter == ATTENTION] or [config]
    widths = [given.get("d_inner", config.d_inner) for letter, given in options if letter == FEED_FORWARD]
    heads, *others = sorted({layer.n_heads for layer in attention})
    if others:
        raise ParnasError(
            f"The attention layers have {heads} and {' and '.join(map(str, others))} heads, but an x-transformers "
            "Decoder has one number for all; export the weights instead: --to safetensors."
        )
    return {
        "dim": config.d_model,
        "depth": len(layers),
        "heads": heads,
        "attn_dim_head": _one_or_each([layer.head_width for layer in attention]),
        "ff_mult": _one_or_each([_factor(width, config.d_model) for width in widths or [config.d_inner]]),
        "attn_dropout": config.attention_dropout,
        "ff_dropout": config.dropout,
        "pre_norm": config.norm == "pre",
        "rel_pos_bias": True,
        **({"attn_project_out": True} if heads == 1 else {}),  # by default left out for one head
        "custom_layers": tuple(_LAYER_TYPES[layer.letter] for layer in layers),
    }


def build_decoder(architecture: Architecture | str, config: ModelConfig) -> Any:
    """Build an `x_transformers.Decoder` with the layers of an architecture and random weights.

    Raises:
        ParnasError: x-transformers is not installed, or cannot build these layers (see `decoder_arguments`).
    """
    require_package("x_transformers", "x-transformers")
    from x_transformers import Decoder

    parsed = Architecture.parse(architecture) if isinstance(architecture, str) else architecture
    return Decoder(**decoder_arguments(parsed, config))


def _factor(width: int, dim: int) -> float:
    """Return a factor for which `int(dim * factor)`, the feed-forward width in x-transformers, equals `width`."""
    exact = width / dim
    return exact if int(dim * exact) == width else (width + 0.5) / dim


def _one_or_each(values: list[Any]) -> Any:
    """Return one value if all are equal, else a tuple with one per layer; x-transformers accepts both."""
    return values[0] if len(set(values)) == 1 else tuple(values)
