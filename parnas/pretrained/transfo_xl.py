"""A trained Transformer-XL in files, of `transformers` (TransfoXL) or of the original PyTorch code (Dai et al. 2019).

Both name their weights alike, but order the logits of the softmax's tails differently. One of their decoder layers is
two layers here, attention `s` and feed-forward `f`, so a model of N layers is `(sf)*N`. Shapes are read from the
weights. Lengths, dropout, and the cutoffs of an embedding with one table are not in them; `config.json`, as
`transformers` writes it, has them. Models that would not be reproduced exactly are refused, and so are files that can
run code.

Shapes: D model width, H heads, E head width.
"""

import errno
import json
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from parnas.config.loader import Config
from parnas.errors import ParnasError, says_out_of_memory
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import expand_user
from parnas.training.loaded_run import run_architecture

__all__ = ["read_transfo_xl"]

_PREFIX = "transformer."  # of names in `transformers`; the original code has none
_FILES = ("model.safetensors", "pytorch_model.bin", "model.pt")
_EMBEDDING, _SOFTMAX = "word_emb.emb_layers.{}.weight", "crit.out_layers.{}.weight"
_PROJECTIONS = ("crit.out_projs.{}", "word_emb.emb_projs.{}")
_BIASES = ("r_w_bias", "r_r_bias")  # u and v
_BIAS_OF_LAYER = re.compile(r"layers\.\d+\.dec_attn\.r_[wr]_bias")
_MOST_LISTED = 5  # weights in a message

_REQUIRED: dict[str, Any] = {"pre_lnorm": False, "attn_type": 0, "ext_len": 0, "layer_norm_epsilon": 1e-5}
"""Keys of `config.json` with the only value that is reproduced here, which is also their default."""

_LENGTHS = {"mem_len": "model.mem_len", "same_length": "model.same_length", "tgt_len": "data.tgt_len"}
_DROPOUTS = {"dropout": "model.dropout", "dropatt": "model.attention_dropout"}


class Shapes(NamedTuple):
    """What the shapes and values of the weights say about a model."""

    layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_inner: int
    vocab_size: int
    tails: int  # clusters after the head
    cutoffs: tuple[int, ...] | None  # `None` if the weights do not say them
    div_val: int
    share_biases: bool
    tie_weights: bool

    def settings(self) -> dict[str, Any]:
        """Return the settings that are fixed by the weights, by dotted key."""
        settings = {f"model.{name}": getattr(self, name) for name in _OF_MODEL}
        if self.cutoffs is not None:
            settings["model.cutoffs"] = self.cutoffs
        return settings | {
            "model.arch": f"(sf)*{self.layers}",
            "model.pointer_len": 0,
            "model.subword_features": 0,
            "model.proj_factor": None,
            "model.proj_dims": None,
            "data.tokenizer.kind": "word",
            "data.tokenizer.vocab_size": None,
            "train.inherit": None,
            "train.teachers": (),
            "search.parent": None,
        }


_OF_MODEL = ("d_model", "n_heads", "d_head", "d_inner", "div_val", "share_biases", "tie_weights")


@dataclass(frozen=True)
class TransfoXL:
    """The weights and settings of a trained Transformer-XL."""

    file: Path
    weights: Mapping[str, Tensor]  # by name without the prefix `transformer.`, in float32; tails in order
    description: Mapping[str, Any] | None  # the content of config.json
    shapes: Shapes

    def described(self) -> dict[str, Any]:
        """Return the settings that `config.json` adds to those of the weights, by dotted key."""
        given = self.description
        if given is None:
            return {}
        settings = {ours: given[key] for key, ours in (_LENGTHS | _DROPOUTS).items() if given.get(key) is not None}
        if "clamp_len" in given:
            clamp_len = given["clamp_len"]
            settings["model.clamp_len"] = None if isinstance(clamp_len, int) and clamp_len <= 0 else clamp_len
        if self.shapes.cutoffs is None and "cutoffs" in given:
            settings["model.cutoffs"] = given["cutoffs"]
        return settings | {"model.norm": "post"}


def read_transfo_xl(path: str | Path) -> TransfoXL:
    """Read a trained model; nothing in its files is executed.

    Args:
        path: a file with weights, or a folder with one of `model.safetensors`, `pytorch_model.bin` and `model.pt`, and
            perhaps with `config.json`.

    Raises:
        ParnasError: there are no such files, they hold a pickled module or other code, the model is of another kind, or
            it cannot be reproduced exactly.
    """
    folder = expand_user(str(path))
    found = [folder] if folder.is_file() else [folder / name for name in _FILES if (folder / name).is_file()]
    if not found:
        raise ParnasError(
            f"{path} has no weights; give a file, or a folder with {', '.join(_FILES[:-1])} or {_FILES[-1]}."
        )
    description = _read_description(found[0].parent / "config.json")
    weights = _read_weights(found[0])
    shapes = _read_shapes(weights, description, found[0])
    if description is not None:
        _compare(shapes, weights, description, found[0].parent / "config.json")
    return TransfoXL(found[0], weights, description, shapes)


@torch.no_grad()
def convert(model: TransfoXL, config: Config) -> TransformerXL:
    """Return the network of a configuration with the weights of a model.

    Raises:
        ParnasError: weights are missing, of other shapes, or of names that the network does not have.
    """
    with torch.random.fork_rng(devices=[]):  # its initial weights are not used
        network = TransformerXL.build(config.model, run_architecture(config), model.shapes.vocab_size)
    shared = {name for name in model.weights if network.u is not None and _BIAS_OF_LAYER.fullmatch(name)}  # copies
    problems, used = [], set(shared)
    for name, tensor in network.state_dict().items():
        if not tensor.numel():  # of tails, where there are none
            continue
        source = _source(name, network, model)
        used.add(source.name)
        if source.name not in model.weights:
            problems.append(f"{source.name} is missing")
            continue
        whole = model.weights[source.name]
        found = whole[source.rows] if whole.dim() else whole
        if found.shape != tensor.shape:
            problems.append(f"{source.name} has the shape {list(found.shape)}, not {list(tensor.shape)}")
            continue
        tensor.copy_(found)
    problems += [f"{name} is not a weight of this network" for name in model.weights if name not in used]
    if problems:
        more = f" and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        listed = "; ".join(dict.fromkeys(problems[:_MOST_LISTED]))
        raise ParnasError(f"{model.file} does not hold the weights of {config.model.arch}: {listed}{more}.")
    return network.eval()


class Source(NamedTuple):
    """Where a weight comes from: a weight of the model, and the rows of it."""

    name: str
    rows: slice = slice(None)


_ATTENTION = {"position": "r_net", "output": "o_net", "layer_norm": "layer_norm"}
_FEED_FORWARD = {"inner": "CoreNet.0", "outer": "CoreNet.3", "layer_norm": "layer_norm"}


def _source(name: str, network: TransformerXL, model: TransfoXL) -> Source:
    """Return where a weight of the network comes from."""
    part, _, rest = name.partition(".")
    if part in ("u", "v"):
        bias = _BIASES["uv".index(part)]
        return Source(bias if bias in model.weights else f"layers.0.dec_attn.{bias}")
    if part == "blocks":
        number, _, key = rest.partition(".")
        return _source_in_layer(*divmod(int(number), 2), key, network)
    kind, _, cluster = rest.partition(".")
    if part == "embedding":
        return Source(f"word_emb.emb_projs.{cluster}" if kind == "projections" else _EMBEDDING.format(cluster))
    return _source_in_head(kind, cluster, network, model)


def _source_in_layer(layer: int, is_feed_forward: int, key: str, network: TransformerXL) -> Source:
    """Return where a weight of a block comes from; `layer` is the number of the decoder layer."""
    if is_feed_forward:
        part, _, kind = key.rpartition(".")
        return Source(f"layers.{layer}.pos_ff.{_FEED_FORWARD[part]}.{kind}")
    prefix = f"layers.{layer}.dec_attn."
    if key in ("u", "v"):
        return Source(prefix + _BIASES["uv".index(key)])
    inner = network.config.n_heads * network.config.head_width
    # One matrix for queries, keys and values, [3·H·E, D].
    rows = {"query.weight": slice(inner), "key_value.weight": slice(inner, None)}
    if key in rows:
        return Source(f"{prefix}qkv_net.weight", rows[key])
    part, _, kind = key.rpartition(".")
    return Source(f"{prefix}{_ATTENTION[part]}.{kind}")


def _source_in_head(kind: str, cluster: str, network: TransformerXL, model: TransfoXL) -> Source:
    """Return where a weight of the softmax comes from."""
    if kind.startswith("cluster_"):
        return Source(f"crit.{kind}")
    if kind == "projections":
        own = f"crit.out_projs.{cluster}"
        return Source(own if own in model.weights else f"word_emb.emb_projs.{cluster}")
    # Without div_val, theirs has one table and one bias for all clusters, ours a bias for each, and a table for each
    # unless it is that of the embedding.
    whole = model.shapes.div_val == 1
    is_divided = whole and (kind == "biases" or len(network.head.tables) > 1)
    start, stop = list(pairwise(network.head.bounds))[int(cluster)]
    rows = slice(start, stop) if is_divided else slice(None)
    own = _SOFTMAX.format(0 if whole else cluster)
    if kind == "biases":
        return Source(own.replace("weight", "bias"), rows)
    return Source(own if own in model.weights else _EMBEDDING.format(0 if whole else cluster), rows)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file as in `TransfoXL`, on the CPU; code in the file is not executed."""
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the version of pickled data
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ParnasError(
            f"{path} holds a pickled module or other code, which is not read. Where you trust it, write its weights "
            f"with the code of the model: torch.save(torch.load({path.name!r}, weights_only=False).state_dict(), "
            "'weights.pt'), and import weights.pt."
        ) from error
    except Exception as error:  # arbitrary bytes can make the unpickler raise anything
        if says_out_of_memory(error) or (isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)):
            raise
        kind = "safetensors" if isinstance(error, SafetensorError) else "torch.save"
        reason = str(error).partition("\n")[0][:200]
        raise ParnasError(f"{path} is not an intact file of {kind} ({type(error).__name__}: {reason}).") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(each, Tensor) for name, each in content.items()
    ):
        raise ParnasError(f"{path} holds no state_dict, which has a tensor for each name; write model.state_dict().")
    content = {name.removeprefix("module."): each for name, each in content.items()}
    is_original = not any(name.startswith(_PREFIX) for name in content)
    weights = {name.removeprefix(_PREFIX): each for name, each in content.items()}
    weights.pop("pos_emb.inv_freq", None)  # a constant
    for name, each in weights.items():
        if not each.is_floating_point() or each.layout is not torch.strided or not bool(each.isfinite().all()):
            raise ParnasError(f"{path}: {name} has values that are not finite numbers; restore the file.")
    weights = {name: each.float() for name, each in weights.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if is_original and name in weights:  # its log p(tail i) is column -i of the head, so the last tail comes first
            weights[name] = weights[name].flip(0) if weights[name].dim() else weights[name]
    return weights


def _read_description(path: Path) -> dict[str, Any] | None:
    """Return the content of `config.json`, `None` if there is none; raise `ParnasError` for models of other kinds."""
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParnasError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(given, dict) or given.get("model_type", "transfo-xl") != "transfo-xl":
        raise ParnasError(f"{path} does not describe a Transformer-XL, which has the model_type transfo-xl.")
    wrong = [f"{key} {given[key]}" for key, value in _REQUIRED.items() if given.get(key, value) not in (value, None)]
    sampled = given.get("sample_softmax")
    if isinstance(sampled, int) and sampled > 0:
        wrong.append(f"sample_softmax {sampled}")
    if wrong:
        raise ParnasError(f"A Transformer-XL with {' and '.join(wrong)} ({path}) cannot be reproduced exactly here.")
    return given


def _read_shapes(weights: Mapping[str, Tensor], given: Mapping[str, Any] | None, path: Path) -> Shapes:
    """Return what the weights say; raise `ParnasError` for models that have no equal here."""
    layers = 1 + max((int(m[1]) for name in weights if (m := re.match(r"layers\.(\d+)\.", name))), default=-1)
    shared = all(name in weights for name in _BIASES)
    first = "" if shared else "layers.0.dec_attn."
    needed = [
        *(_EMBEDDING.format(0), "layers.0.dec_attn.qkv_net.weight", "layers.0.pos_ff.CoreNet.0.weight"),
        *(first + name for name in _BIASES),
    ]
    if any("r_emb" in name or ".kv_net." in name for name in weights):
        raise ParnasError(f"{path} has another kind of attention (attn_type), which cannot be reproduced exactly here.")
    if "out_layer.weight" in weights:
        raise ParnasError(f"{path} has a sampled softmax (sample_softmax), which cannot be reproduced exactly here.")
    if absent := [name for name in needed if name not in weights]:
        raise ParnasError(f"{path} holds no Transformer-XL with a language model's softmax: {absent[0]} is missing.")
    matrices = [*needed, *(name for name in weights if name.startswith("word_emb."))]
    if odd := [name for name in matrices if weights[name].dim() != 2]:
        raise ParnasError(f"{path}: {odd[0]} is no matrix, but has the shape {list(weights[odd[0]].shape)}.")
    tables: list[Tensor] = []
    while (name := _EMBEDDING.format(len(tables))) in weights:
        tables.append(weights[name])
    sizes, widths = [len(table) for table in tables], [table.shape[-1] for table in tables]
    d_model, divided = weights[needed[1]].shape[1], len(tables) > 1
    if widths[0] != d_model or (not divided and "word_emb.emb_projs.0" in weights):
        raise ParnasError(
            f"{path} has embeddings of width {widths[0]} that are projected to {d_model}; this is read only with "
            "d_embed = d_model, and with div_val and cutoffs for narrower clusters."
        )
    tails = weights.get("crit.cluster_bias", torch.empty(0)).numel()
    # Shared biases are stored once, or once more in each layer.
    of_layers = [name for name in weights if _BIAS_OF_LAYER.fullmatch(name)]
    shared = shared or len(of_layers) < 2 * layers or (given or {}).get("untie_r") is False
    if shared:
        _check_shared(weights, of_layers, path)
    n_heads, d_head = weights[needed[3]].shape
    return Shapes(
        layers=layers,
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_head,
        d_inner=len(weights[needed[2]]),
        vocab_size=sum(sizes),
        tails=tails,
        cutoffs=tuple(accumulate(sizes[:-1])) if divided or not tails else None,
        div_val=max(1, widths[0] // max(1, widths[1])) if divided else 1,
        share_biases=shared,
        tie_weights=_tables_are_tied(weights) and _projections_are_tied(weights),
    )


def _check_shared(weights: Mapping[str, Tensor], of_layers: Sequence[str], path: Path) -> None:
    """Raise `ParnasError` if biases that all layers share differ; `of_layers` are the names of their copies."""
    for name in of_layers:
        kind = name.rpartition(".")[2]
        one = weights.get(kind, weights.get(f"layers.0.dec_attn.{kind}"))
        if one is None or not torch.equal(one, weights[name]):
            raise ParnasError(f"{path}: {name} differs from that of other layers, but all layers share it (untie_r).")


def _compare(shapes: Shapes, weights: Mapping[str, Tensor], given: Mapping[str, Any], path: Path) -> None:
    """Raise `ParnasError` if `config.json` describes another model than that of the weights."""
    own: dict[str, Any] = shapes._asdict() | {"untie_r": not shapes.share_biases, "d_embed": shapes.d_model}
    names = {"n_layer": "layers", "n_head": "n_heads"}
    keys = ("vocab_size", "n_layer", "n_head", "d_model", "d_embed", "d_head", "d_inner", "div_val", "untie_r")
    wrong = [
        f"{key} is {given[key]!r:.40}, but the weights have {own[names.get(key, key)]}"
        for key in keys
        if given.get(key) is not None and given[key] != own[names.get(key, key)]
    ]
    cutoffs = given.get("cutoffs")
    if isinstance(cutoffs, list) and (
        len(cutoffs) != shapes.tails or (shapes.cutoffs is not None and cutoffs != list(shapes.cutoffs))
    ):
        expected = f"{shapes.tails} of them" if shapes.cutoffs is None else list(shapes.cutoffs)
        wrong.append(f"cutoffs is {cutoffs}, but the weights have {expected}")
    # `transformers` ties weights after it has read them, whatever the file has.
    tables = bool(given.get("tie_word_embeddings", given.get("tie_weight", True)))
    projections = given.get("tie_projs")
    if not isinstance(projections, list):
        projections = [False] + [bool(given.get("proj_share_all_but_first", True))] * shapes.tails
    for ties, (name, tied) in [
        *((tables, each) for each in _pairs(weights, _SOFTMAX, _EMBEDDING)),
        *zip(projections, _pairs(weights, *_PROJECTIONS), strict=False),
    ]:
        if ties and not tied:
            wrong.append(f"{name} is tied to the embedding, but the weights differ")
        if not ties and name not in weights:
            wrong.append(f"{name} is not tied to the embedding, but it is missing")
    if wrong:
        raise ParnasError(f"{path} does not fit the weights: {'; '.join(wrong[:_MOST_LISTED])}.")


def _pairs(weights: Mapping[str, Tensor], own: str, other: str) -> Iterator[tuple[str, bool]]:
    """Yield the name of each weight of the softmax that may be tied, and whether it is; it may be stored once."""
    number = 0
    while (name := other.format(number)) in weights:
        mine = weights.get(own.format(number))
        yield own.format(number), mine is None or torch.equal(mine, weights[name])
        number += 1


def _tables_are_tied(weights: Mapping[str, Tensor]) -> bool:
    return all(tied for _, tied in _pairs(weights, _SOFTMAX, _EMBEDDING))


def _projections_are_tied(weights: Mapping[str, Tensor]) -> bool:
    """Return whether the softmax has the projections of the embedding; that of the head is never tied here."""
    return all(tied for _, tied in list(_pairs(weights, *_PROJECTIONS))[1:])
