"""x-transformers: the order and the shape of the layers for that library's Decoder; no weights go with them.

Its attention knows positions otherwise than by the sinusoids and biases of Transformer-XL, its feed-forward layer is
another one (GELU) and its softmax is not adaptive: a network of that shape is to be trained anew.
"""

from typing import Any

from parnas.architecture import ATTENTION, FEED_FORWARD, Architecture, LayerName
from parnas.errors import ParnasError
from parnas.export.source import need
from parnas.model.layers import resize_heads
from parnas.sections import ModelConfig

LAYERS = {ATTENTION: "a", FEED_FORWARD: "f"}
SNIPPET, SHAPE = "decoder.py", "decoder.json"


def decoder_arguments(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """The arguments of `x_transformers.Decoder`: a layer `a` for each `s`, `f` for each `f`, nothing for identity.

    Raises `ParnasError` for other layers, and for attention layers that differ in their number of heads.
    """
    names = [LayerName.parse(name) for name in architecture.canonical()]
    if other := [str(name) for name in names if name.letter not in LAYERS]:
        raise ParnasError(f"x-transformers has no layer like {other[0]}; export the weights: --to safetensors.")
    shapes = [resize_heads(config, **dict(name.options)) for name in names if name.letter == ATTENTION]
    inner = [dict(name.options).get("d_inner", config.d_inner) for name in names if name.letter == FEED_FORWARD]
    heads = {shape.n_heads for shape in shapes} or {config.n_heads}
    if len(heads) > 1:
        raise ParnasError(
            f"The attention layers have {' and '.join(map(str, sorted(heads)))} heads, but all of an x-transformers "
            "Decoder have the same number."
        )
    count = heads.pop()
    single = {"attn_project_out": True} if count == 1 else {}  # which it leaves out there
    return {
        "dim": config.d_model,
        "depth": len(names),
        "heads": count,
        "attn_dim_head": _one_or_each([shape.head_width for shape in shapes] or [config.head_width]),
        "ff_mult": _one_or_each([_factor(width, config.d_model) for width in inner or [config.d_inner]]),
        "attn_dropout": config.attention_dropout,
        "ff_dropout": config.dropout,
        "pre_norm": config.norm == "pre",
        "rel_pos_bias": True,
        **single,
        "custom_layers": tuple(LAYERS[name.letter] for name in names),
    }


def build_decoder(architecture: Architecture | str, config: ModelConfig) -> Any:
    """An `x_transformers.Decoder` with the layers of an architecture, and weights at random.

    Raises `ParnasError` where x-transformers is missing, or has no such layers.
    """
    need("x_transformers", "x-transformers")
    from x_transformers import Decoder

    given = Architecture.parse(architecture) if isinstance(architecture, str) else architecture
    return Decoder(**decoder_arguments(given, config))


def refuse_other_layers(decoder: Any, architecture: Architecture) -> None:
    """Raise where a Decoder has other layers than the architecture, which another version might build."""
    found = "".join(decoder.layer_types)
    expected = "".join(LAYERS[name[0]] for name in architecture.canonical())
    if found != expected:
        raise ParnasError(f"x-transformers built {found} for {architecture}; install another version of it, 2.31.")


def write_snippet(arguments: dict[str, Any], vocab_size: int, tgt_len: int, mem_len: int) -> str:
    """A program that builds the network."""
    listed = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    return (
        f"from x_transformers import Decoder, TransformerWrapper\n\ndecoder = Decoder(\n{listed})\n"
        f"network = TransformerWrapper(\n    num_tokens={vocab_size},\n    max_seq_len={tgt_len},\n"
        f"    max_mem_len={mem_len},\n    use_abs_pos_emb=False,\n    attn_layers=decoder,\n)\n"
    )


def _factor(width: int, dim: int) -> float:
    """By which x-transformers multiplies `dim`, rounding down, to get `width`."""
    exact = width / dim
    return exact if int(dim * exact) == width else (width + 0.5) / dim


def _one_or_each(values: list[Any]) -> Any:
    """A value that all layers share, or a tuple with that of each."""
    return values[0] if len(set(values)) == 1 else tuple(values)
