"""Parents from a folder with a causal language model of `transformers`: the families of GPT-2 and Llama.

Each block of such a model is two layers here, attention `s` and feed-forward `f`, each with its norm and residual
connection. To run one of them, the block runs with the other one replaced by zeros. Arguments such as masks and rotary
embeddings are those with which the model itself called the block, so that this does not depend on the version of
`transformers`.

Shapes: R rows of text, L tokens of a row, D model width, I inner width, H heads, E head width.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from parnas.architecture import ATTENTION, FEED_FORWARD, IDENTITY, LayerName
from parnas.errors import ParnasError
from parnas.pretrained.cut import Importance, channels_of
from parnas.pretrained.parent import CUTS, Parent


class Names(NamedTuple):
    """Names of the parts of a family's blocks."""

    attention: str
    feed_forward: str
    attention_output: str  # the last linear map of the attention
    feed_forward_output: str


_FAMILIES = {
    "gpt2": Names("attn", "mlp", "c_proj", "c_proj"),
    "llama": Names("self_attn", "mlp", "o_proj", "down_proj"),
}


class Zeros(nn.Module):
    """Returns zeros in place of a part of a block, in the form of the part's own output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.length = len(output) if isinstance(output, tuple) else 0

    def forward(self, *arguments: Tensor, **named: Any) -> Any:
        """Return zeros like the first argument; with `None` for the other outputs, such as attention weights."""
        zeros = torch.zeros_like(arguments[0] if arguments else named["hidden_states"])
        return (zeros, *[None] * (self.length - 1)) if self.length else zeros


class TransformersParent(Parent):
    """A causal language model of `transformers`.

    Args:
        model: the model; it is set to evaluation mode.
        tokens: L, the tokens of each row that it reads.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.model: Any = model.eval()
        base: Any = model.transformer if hasattr(model, "transformer") else model.model
        is_gpt2 = hasattr(base, "h")
        self.base: nn.Module = base  # without the softmax
        self.blocks: nn.ModuleList = base.h if is_gpt2 else base.layers
        self.names = _FAMILIES["gpt2" if is_gpt2 else "llama"]
        config: Any = model.config
        self.layers = (ATTENTION, FEED_FORWARD) * len(self.blocks)
        self.window = tokens // 4
        heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        whole = groups or heads
        attention = [f"s:heads={heads // cut}" for cut in CUTS if heads % cut == 0 and whole % cut == 0]
        width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
        cheaper = (
            (*attention, f"s:window={self.window}", IDENTITY),
            (*(f"f:d_inner={width // cut}" for cut in CUTS), IDENTITY),
        )
        self.alternatives = cheaper * len(self.blocks)
        self.replacements: list[dict[str, nn.Module]] = [{} for _ in self.layers]
        for block in base.h if is_gpt2 else ():
            if type(block.mlp.act).__name__ == "NewGELUActivation":  # the same function in seven operations
                block.mlp.act = nn.GELU(approximate="tanh")
        self.final_norm: nn.Module = base.ln_f if is_gpt2 else base.norm
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # arguments of each block but the hidden states
        self.zeros: dict[str, Zeros] = {}

    def embed(self, ids: Tensor) -> Tensor:
        """See `Parent.embed`; also notes the arguments with which the model calls its blocks for text of this shape."""
        found: list[Tensor] = []
        self.calls.clear()

        def note_call(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = list(arguments)
            hidden = given.pop(0) if given else named["hidden_states"]
            found.append(hidden)
            self.calls.append((tuple(given), {key: value for key, value in named.items() if key != "hidden_states"}))

        def note_output(name: str) -> Callable[..., None]:
            def note(_: nn.Module, __: Any, output: Any) -> None:
                self.zeros.setdefault(name, Zeros(output))

            return note

        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(note_call, with_kwargs=True).remove)
            for name in self.names[:2]:
                part = getattr(self.blocks[0], name)
                stack.callback(part.register_forward_hook(note_output(name)).remove)
            self.base(ids, use_cache=False)
        return found[0]

    def run(self, number: int, x: Tensor, name: str | None = None) -> Tensor:
        """See `Parent.run`; rows must have the shape of those that `embed` has read."""
        if name == IDENTITY:
            return x
        index, is_feed_forward = divmod(number, 2)
        own, other = self.names[is_feed_forward], self.names[1 - is_feed_forward]
        block, (arguments, named) = self.blocks[index], self.calls[index]
        parts: dict[str, nn.Module] = {other: self.zeros[other]}
        if name is not None:
            parts[own] = self.replacements[number][name]
        with replaced(block, parts):
            output = block(x, *arguments, **named)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def finish(self, x: Tensor) -> Tensor:
        """See `Parent.finish`."""
        hidden: Tensor = self.final_norm(x)
        return hidden

    def logits(self, hidden: Tensor, cluster: int) -> Tensor:  # noqa: ARG002
        """See `Parent.logits`."""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def logit_changes(self, change: Tensor, cluster: int) -> Tensor:  # noqa: ARG002
        """See `Parent.logit_changes`."""
        return nn.functional.linear(change, self.model.lm_head.weight)

    def by_cluster(self, targets: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        """See `Parent.by_cluster`."""
        return [(0, None, targets)]

    def measure_importance(self, ids: Tensor) -> None:
        """See `Parent.measure_importance`."""
        maps = [
            getattr(getattr(block, part), output)
            for block in self.blocks
            for part, output in ((self.names.attention, self.names.attention_output), self.names[1::2])
        ]
        with ExitStack() as stack:
            found = [stack.enter_context(closing(Importance(each))) for each in maps]
            self.base(ids, use_cache=False)
        for number, (names, measured) in enumerate(zip(self.alternatives, found, strict=True)):
            part = getattr(self.blocks[number // 2], self.names[number % 2])
            for name in names:
                if name != IDENTITY:
                    self.replacements[number][name] = self.cut(part, name, measured.scores())

    def cut(self, part: nn.Module, name: str, importance: Tensor) -> nn.Module:
        """Return a cheaper copy of an attention or feed-forward part, by the importance of its channels."""
        ((option, size),) = LayerName.parse(name).options
        if option == "window":
            return Windowed(part, self.window)
        part = copy.deepcopy(part)
        if option == "d_inner":
            kept = importance.topk(size).indices.sort().values
            for child, linear in part.named_children():
                if child == self.names.feed_forward_output:
                    keep(linear, inputs=kept)
                elif linear_width(linear):
                    keep(linear, outputs=kept)
            return part
        cut_attention(part, size, importance)
        return part


@contextmanager
def replaced(block: nn.Module, parts: dict[str, nn.Module]) -> Iterator[None]:
    """Replace parts of a block within the context."""
    before = {name: getattr(block, name) for name in parts}
    try:
        for name, part in parts.items():
            setattr(block, name, part)
        yield
    finally:
        for name, part in before.items():
            setattr(block, name, part)


class Windowed(nn.Module):
    """Attention in which a query sees the last `window` positions only."""

    def __init__(self, attention: nn.Module, window: int) -> None:
        super().__init__()
        self.attention, self.window = attention, window

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the attention with a mask that excludes keys that are `window` or more positions before the query."""
        hidden = arguments[0] if arguments else named["hidden_states"]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        behind = places[:, None] - places
        masked = (behind < 0) | (behind >= self.window)
        least = torch.finfo(hidden.dtype).min
        mask = torch.zeros(masked.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(masked, least)
        return self.attention(*arguments, **{**named, "attention_mask": mask.expand(len(hidden), 1, -1, -1)})


def cut_attention(attention: Any, heads: int, importance: Tensor) -> None:
    """Keep the most important heads of the attention of GPT-2, or the most important groups of heads of Llama's."""
    width = attention.head_dim
    before = len(importance) // width
    groups = before // getattr(attention, "num_key_value_groups", 1)  # heads of keys and values
    size = before // groups  # heads that use the same keys and values
    kept = importance.view(groups, -1).norm(dim=1).topk(heads // size).indices.sort().values
    channels = channels_of(kept, size * width)  # of queries and of the output
    keys = channels_of(kept, width)
    if hasattr(attention, "c_attn"):
        whole = before * width
        keep(attention.c_attn, outputs=torch.cat([channels, whole + channels, 2 * whole + channels]))
        keep(attention.c_proj, inputs=channels)
        attention.split_size = len(channels)
    else:
        keep(attention.q_proj, outputs=channels)
        for linear in (attention.k_proj, attention.v_proj):
            keep(linear, outputs=keys)
        keep(attention.o_proj, inputs=channels)
        attention.hidden_size, attention.num_key_value_heads = len(channels), len(kept)
    attention.num_heads = heads


def linear_width(module: nn.Module) -> int:
    """Return the number of outputs of a linear map, `nn.Linear` or `Conv1D` of transformers; 0 for other modules."""
    return int(getattr(module, "out_features", 0) or getattr(module, "nf", 0))


def keep(linear: Any, outputs: Tensor | None = None, inputs: Tensor | None = None) -> None:
    """Remove all but some outputs or inputs of a linear map, in place."""
    transposed = hasattr(linear, "nf")  # Conv1D has weights [in, out]
    weight = linear.weight.detach().t() if transposed else linear.weight.detach()
    if outputs is not None:
        weight = weight[outputs]
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias.detach()[outputs])
    if inputs is not None:
        weight = weight[:, inputs]
    linear.weight = nn.Parameter((weight.t() if transposed else weight).contiguous())
    if transposed:
        linear.nf = weight.shape[0]
    else:
        linear.out_features, linear.in_features = weight.shape


def load_transformers(folder: Path) -> tuple[nn.Module, Any]:
    """Return the causal language model in a folder, and its tokenizer; nothing is downloaded.

    Raises:
        ParnasError: `transformers` is not installed; the folder holds no model of a known family, or its weights are
            not stored as safetensors or have other shapes than `config.json` says; or the tokenizer has more tokens
            than the model.
    """
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParnasError(
            f"{folder} is neither a parnas run nor the folder of a language model: it has no config.json with a "
            "model_type."
        ) from error
    if kind == "transfo-xl":
        raise ParnasError(f"{folder} holds a Transformer-XL; make a run of it by parnas import, and probe the run.")
    if kind not in _FAMILIES:
        raise ParnasError(f"{folder} holds a model of type {kind!r}; probe reads the types {' and '.join(_FAMILIES)}.")
    if not list(folder.glob("*.safetensors")):
        raise ParnasError(
            f"{folder} has no *.safetensors file; other formats of weights can run code and are not read."
        )
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-untyped]
    except ImportError as error:
        raise ParnasError(
            f"{folder} needs the package transformers; install it, in the clone of parnas, with: "
            "pip install -e '.[transformers]'."
        ) from error
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ParnasError(f"{folder} cannot be read by transformers: {error}") from error
    if missing := sorted(loading["missing_keys"]):  # transformers gives them random values
        raise ParnasError(f"{folder} lacks {len(missing)} weights of a {kind} language model, such as {missing[0]}.")
    if others := sorted(str(each[0]) for each in loading["mismatched_keys"]):  # and these
        raise ParnasError(
            f"{folder} has weights of other shapes than its config.json says, such as {others[0]}; restore both files."
        )
    if len(tokenizer) > (size := model.get_input_embeddings().num_embeddings):
        raise ParnasError(
            f"{folder} has a tokenizer of {len(tokenizer)} tokens, but its model knows {size}; restore its tokenizer."
        )
    return model, tokenizer
