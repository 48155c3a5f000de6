"""The sections of the configuration: every setting with its default, bounds, unit and meaning."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Literal, NamedTuple, Self, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from parnas.architecture import ATTENTION, IDENTITY, LETTERS, Architecture, LayerName
from parnas.errors import ParnasError

__all__ = [
    "AUTO_CLUSTERS",
    "SUBWORD_KINDS",
    "CacheConfig",
    "CostConfig",
    "DataConfig",
    "DistillConfig",
    "DynamicConfig",
    "EvaluationConfig",
    "ModelConfig",
    "Reach",
    "RuntimeConfig",
    "SearchConfig",
    "Shape",
    "Space",
    "TokenizerConfig",
    "TrainConfig",
    "spread_space",
    "unite",
]

_MAX_WIDTH = 999_999  # the largest number in the options of layer names
_MAX_CANDIDATES = 100  # per block
SUBWORD_KINDS = 7  # features of a token: prefixes, suffixes, lower-case form and shape
AUTO_CLUSTERS = 3  # clusters of the adaptive softmax where model.cutoffs is auto or min_macs


FieldError: TypeAlias = tuple[str, str]
"""One wrong setting: its dotted key, and what is wrong, with the given value and the allowed ones."""


class CrossFieldErrors(ValueError):
    """Error for settings of a section that contradict each other; pydantic's `ValidationError` holds it in `ctx`."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


class Section(BaseModel):
    """Base class of the sections: frozen, strictly typed, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def cross_field_errors(self) -> Iterator[FieldError]:
        """Yield an error for settings that are valid one by one but contradict each other."""
        return iter(())

    @model_validator(mode="after")
    def _check_across_fields(self) -> Self:
        too_large = [
            (key, f"is {value!r:.40}; give a number of at most 2^63 - 1")
            for key, value in self
            if isinstance(value, int) and value >= 2**63  # too large for int64 of numpy and torch
        ]
        if errors := too_large or list(self.cross_field_errors()):
            raise CrossFieldErrors(errors)
        return self


# data


class TokenizerConfig(Section):
    """Section `data.tokenizer`."""

    kind: Literal["sentencepiece", "word", "byte"] = Field(
        "sentencepiece", description="Tokens: sentencepiece pieces, words separated by white space, or bytes."
    )
    vocab_size: int | None = Field(
        None, ge=2, description="Number of sentencepiece pieces (null: 8000) or of words (null: all); null for bytes."
    )
    vocabulary: str | None = Field(
        None,
        min_length=1,
        description="Word list of a trained model, in place of the words of the text (kind word): a text file in UTF-8 "
        "with one word per line in the order of the ids, <eos> (line end) and <unk> among them, or the tokenizer.json "
        "of a run.",
    )
    model_type: Literal["unigram", "bpe"] = Field("unigram", description="Algorithm of sentencepiece.")
    lowercase: bool = Field(False, description="Fold case (sentencepiece: by NFKC_CF); this loses information.")
    user_symbols: tuple[str, ...] = Field(
        (), description="Strings that sentencepiece keeps as one piece, besides <unk>."
    )
    byte_fallback: bool = Field(
        True, description="Spell characters without a piece as bytes, so that no character is lost."
    )

    def cross_field_errors(self) -> Iterator[FieldError]:
        """Yield an error if the kind of tokenizer cannot have this `vocab_size` or this `vocabulary`."""
        size = self.vocab_size
        if self.vocabulary is not None and self.kind != "word":
            yield "vocabulary", f"is given, but the tokenizer is of kind {self.kind}; set data.tokenizer.kind: word"
        if self.vocabulary is not None and size is not None:
            yield "vocab_size", f"is {size}, but the word list of vocabulary decides it; leave out vocab_size"
        if size is not None and self.kind == "byte":
            yield "vocab_size", f"is {size}, but the vocabulary of a byte tokenizer is the bytes of its text; give null"
        if size is not None and size < 300 and self.kind == "sentencepiece" and self.byte_fallback:
            yield "vocab_size", f"is {size}, but byte_fallback alone takes 256 pieces; give 300 or more"


class DataConfig(Section):
    """Section `data`."""

    corpus: str = Field(
        "pydoc",
        min_length=1,
        description="wikitext-2, wikitext-103, enwik8, text8, tiny-shakespeare, pydoc, a text file, "
        "or a folder with train.txt, valid.txt and test.txt.",
    )
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="Conversion of text to tokens.")
    batch_size: int = Field(
        32, ge=1, description="Rows of a batch; each row continues where it ended in the previous batch."
    )
    tgt_len: int = Field(32, ge=1, description="Tokens of a segment, in each row.")
    shuffle: Literal["none", "partial"] = Field(
        "none",
        description="partial: in each epoch every row is rotated: it starts at a position drawn with runtime.seed, and "
        "its beginning follows after its end (Press 2019, arXiv 1903.04167).",
    )


# model


class Reach(NamedTuple):
    """How far attention and pointer look back."""

    mem_len: int = 0  # positions of memory
    cmem_len: int = 0  # positions of compressed memory, in layers that have one
    clamp_len: int | None = None  # larger distances between query and key are treated as this one
    same_length: bool = False  # every query attends to equally many positions
    pointer_len: int = 0  # positions whose followers the pointer may copy, besides those of the segment


class Shape(NamedTuple):
    """The size of a batch: `batch_size` rows of `tgt_len` tokens, read with the memory lengths `reach`."""

    batch_size: int
    tgt_len: int
    reach: Reach


class MemoryConfig(Section):
    """Section `model.memory`."""

    cmem_len: int = Field(
        32, ge=1, description="Positions of compressed memory that a layer c attends to besides memory."
    )
    ratio: int = Field(4, ge=2, description="Number of positions of memory that are compressed into one position.")
    function: Literal["max_pool", "mean_pool", "conv", "dilated_conv", "most_used"] = Field(
        "conv",
        description="Compression function (Rae et al. 2020, section 3.1): the maximum or mean of each feature, a "
        "convolution with a stride of its width, a dilated one of twice that span, or a copy of the positions that "
        "received most attention.",
    )
    loss: Literal["attention", "autoencode", "bptt"] = Field(
        "attention",
        description="Training signal of a convolution (section 3.2): attention over compressed memory reproduces "
        "attention over memory; a decoder reconstructs memory; or the loss of the next segment, without an auxiliary "
        "loss. The other functions have no weights.",
    )
    distance: Literal["slots", "tokens"] = Field(
        "slots",
        description="Distance to a compressed position: in positions that attention sees, as in the paper; or in "
        "tokens, as the mean over the positions that were compressed into it.",
    )


class ModelConfig(Section):
    """Section `model`."""

    arch: str | None = Field(None, description="Architecture that retrain trains if --arch is not given.")
    d_model: int = Field(128, ge=1, le=_MAX_WIDTH, description="Width of the network.")
    n_heads: int = Field(4, ge=1, le=_MAX_WIDTH, description="Attention heads.")
    d_head: int | None = Field(None, ge=1, le=_MAX_WIDTH, description="Width of a head; null: d_model / n_heads.")
    d_inner: int = Field(512, ge=1, le=_MAX_WIDTH, description="Inner width of a feed-forward layer.")
    mem_len: int = Field(32, ge=0, description="Positions of memory that attention sees besides the segment.")
    clamp_len: int | None = Field(
        None,
        ge=1,
        description="Larger distances between query and key are treated as this one, as in the code of Dai et al. "
        "2019; null: no limit.",
    )
    same_length: bool = Field(
        False,
        description="Every query attends to equally many positions: the last mem_len, its own included, and the "
        "compressed memory that the last query of the previous segment saw. If false, later queries of a segment "
        "attend to more.",
    )
    pointer_len: int = Field(
        0,
        ge=0,
        description="Positions before the segment from which a pointer may copy: the probability of a token is that of "
        "the softmax, mixed with weights on the tokens that followed similar positions (pointer sentinel mixture, "
        "Merity et al. 2017, arXiv 1609.07843). 0: no pointer.",
    )
    memory: MemoryConfig = Field(MemoryConfig(), description="Compressed memory of layers c.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout probability of embeddings and layer outputs.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of attention weights.")
    init_std: float | None = Field(
        0.02,
        gt=0,
        description="Standard deviation of the initial values of the linear maps in blocks; null: 1 / √n for a map of "
        "n inputs (LeCun et al. 1998), with which convolutions and recurrences learn faster at first, so that a short "
        "search ranks them better.",
    )
    norm: Literal["post", "pre"] = Field(
        "post", description="LayerNorm after each residual (Transformer-XL) or before each layer."
    )
    share_biases: bool = Field(
        True, description="One pair of relative biases u, v for all layers, or one pair per layer (untied)."
    )
    cutoffs: tuple[int, ...] | Literal["auto", "min_macs"] = Field(
        (),
        description="Token ids at which clusters of the adaptive softmax end, except the last; empty: full softmax; "
        "auto: three clusters, the fewest multiply-adds with a head that holds 75 % of the text's tokens and a last "
        "cluster that holds 6.25 % at most; min_macs: three clusters, the fewest multiply-adds, at a worse perplexity.",
    )
    proj_factor: int | None = Field(
        None, ge=1, description="Divisor of the width from each cluster of the softmax to the next; null: div_val."
    )
    proj_dims: tuple[int, ...] | None = Field(
        None, description="Widths of the clusters after the head, one for each cutoff; replaces proj_factor."
    )
    tie_weights: bool = Field(True, description="Share the weights of embedding and softmax.")
    subword_features: int = Field(
        0,
        ge=0,
        description="Number of vectors that tokens share by prefix, suffix, lower-case form or shape. In embedding and "
        f"softmax, a token's vector is its own plus the {SUBWORD_KINDS} of its features, so that rare words are learnt "
        "from related ones (Botha & Blunsom 2014, arXiv 1405.4273). 0: none.",
    )
    div_val: int = Field(1, ge=1, description="Divisor of the width from each cluster of the embedding to the next.")

    def without_clusters(self) -> Self:
        """Return the settings with one small softmax, tied to the embedding: for networks whose layers alone matter."""
        plain = {"cutoffs": (), "div_val": 1, "proj_factor": None, "proj_dims": None, "tie_weights": True}
        plain |= {"subword_features": 0, "pointer_len": 0}
        return self.model_copy(update=plain)

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def reach(self) -> Reach:
        """Lengths that determine how far attention and pointer look back in training."""
        return Reach(self.mem_len, self.memory.cmem_len, self.clamp_len, self.same_length, self.pointer_len)

    def embedding_dims(self) -> list[int]:
        """Return the embedding width of each cluster (Baevski & Auli 2019; `div_val` of Transformer-XL)."""
        return self._cluster_widths(self.div_val)

    def softmax_dims(self) -> list[int]:
        """Return the width of each cluster of the (adaptive) softmax, the head first."""
        if self.proj_dims is not None:
            return [self.d_model, *self.proj_dims]
        return self._cluster_widths(self.proj_factor or self.div_val)

    def _cluster_widths(self, factor: int) -> list[int]:
        """Return the width of each cluster: d_model for the first, then the previous width divided by `factor`."""
        return list(accumulate(self.cutoffs, lambda width, _: width // factor, initial=self.d_model))

    def cross_field_errors(self) -> Iterator[FieldError]:
        """Yield errors of the number of heads, the architecture, `same_length` and the clusters of the softmax."""
        if self.d_head is None and self.d_model % self.n_heads:
            problem = f"is {self.n_heads}, which does not divide d_model {self.d_model}; change one or give d_head"
            yield "n_heads", problem
        if self.arch is not None:
            try:
                Architecture.parse(self.arch).canonical()
            except ParnasError as error:
                yield "arch", f"is {self.arch[:40]!r}: {error}"
        if self.same_length and not self.mem_len:
            yield "same_length", "is true, but mem_len is 0, so attention would see nothing; change one"
        if 0 < self.subword_features <= SUBWORD_KINDS:
            yield "subword_features", f"is {self.subword_features}; give more than {SUBWORD_KINDS}, or 0"
        if self.subword_features and (self.div_val > 1 or not self.tie_weights):
            yield "subword_features", "needs one table for embedding and softmax; set tie_weights: true and div_val: 1"
        yield from self._cluster_errors()

    def _cluster_errors(self) -> Iterator[FieldError]:
        if self.cutoffs == ():
            for key in ("div_val", "proj_factor"):
                if (value := getattr(self, key) or 1) > 1:
                    yield key, f"is {value}, but without cutoffs there is one cluster; give cutoffs, or leave out {key}"
            if self.proj_dims is not None:
                yield "proj_dims", "is given without cutoffs; give one cutoff for each width"
            return
        if isinstance(self.cutoffs, str):
            tails = AUTO_CLUSTERS - 1
        else:
            tails = len(self.cutoffs)
            if self.cutoffs[0] < 1 or sorted(set(self.cutoffs)) != list(self.cutoffs):
                problem = f"is {list(self.cutoffs)}; give positive numbers that rise, without the vocabulary size"
                yield "cutoffs", problem
        if self.proj_dims is not None and (len(self.proj_dims) != tails or min(self.proj_dims) < 1):
            yield "proj_dims", f"is {list(self.proj_dims)}; give {tails} positive width(s), one for each cutoff"
            return
        sized = self.model_construct(**{**dict(self), "cutoffs": (1,) * tails})
        for key, dims in (("div_val", sized.embedding_dims()), ("proj_factor", sized.softmax_dims())):
            if min(dims) < 1:
                yield key, f"leaves a cluster without width: {dims}; lower it or use fewer cutoffs"
        if self.tie_weights and sized.embedding_dims() != sized.softmax_dims():
            widths = (
                f"embedding's clusters have widths {sized.embedding_dims()} and the softmax's {sized.softmax_dims()}"
            )
            cure = "make proj_factor equal to div_val, or set tie_weights: false"
            yield "tie_weights", f"is true, but the {widths}; {cure}"


# search

Space = Sequence[str] | Sequence[Sequence[str]]
"""Layer names that all blocks may choose from, or a list of them for each block."""


SPACES: dict[str, tuple[str, ...]] = {
    "par": ("s", "f", "i"),  # Pay Attention when Required, Mandava et al. 2020
    "hybrid": ("s", "k", "f", "i"),
}
"""Search spaces that `search.space` may name."""


def _read_space(value: object) -> object:
    """Return the layers of a space given by its name; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    if value not in SPACES:
        raise ValueError(f"give a list of layer names, or the name of a space: {', '.join(SPACES)}")
    return SPACES[value]


def spread_space(space: Space, blocks: int) -> tuple[tuple[str, ...], ...]:
    """Return the candidates of each block, given one list of layer names for all blocks or one list for each block.

    Options of the names are put into their standard order.

    Raises:
        ParnasError: A name is not valid, or a block has too many candidates.
    """
    shared = all(isinstance(name, str) for name in space)
    rows: Sequence[Sequence[str]] = [cast(Sequence[str], space)] if shared else space
    if (most := max(map(len, rows), default=0)) > _MAX_CANDIDATES:
        raise ParnasError(f"A block has {most} candidates; give {_MAX_CANDIDATES} at most.")
    spread = tuple(tuple(str(LayerName.parse(name)) for name in row) for row in rows)
    return spread * blocks if shared else spread


def unite(spaces: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the different candidates of all blocks, in order of first appearance."""
    return tuple(dict.fromkeys(name for space in spaces for name in space))


def _space_problem(space: Space, blocks: int) -> str | None:
    """Return the error of `search.space` for this number of blocks, with the allowed values; `None` if it is valid."""
    known = ", ".join(LETTERS)
    try:
        rows = spread_space(space, blocks)
    except ParnasError as error:
        hint = " Quote names that hold a comma: 's:heads=2,d_head=16'." if "=" in str(space) else ""
        return f"is {_show_space(space)}; give different letters among {known}: {error}{hint}"
    if not rows or not all(rows):
        return f"is {_show_space(space)}; give every block a candidate or more"
    if repeated := next((row for row in rows if len(set(row)) < len(row)), None):
        return f"is {_show_space(repeated)}; give different letters among {known}, or different options"
    if len(rows) != blocks:
        return f"has {len(rows)} lists, but search.blocks is {blocks}; give one list for each block, or one for all"
    if unite(rows) == (IDENTITY,):
        return "has identity alone, so there is nothing to train; add s or f"
    return None


def _show_space(space: Space) -> str:
    shown = str([row if isinstance(row, str) else list(row) for row in space])
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


class CostConfig(Section):
    """Section `search.cost`."""

    metric: Literal["latency", "macs", "parameters", "cache"] = Field(
        "latency",
        description="Measure of a layer's cost: inference latency on this device, multiply-adds, parameters, or the "
        "numbers that it keeps in memory in generation.",
    )
    target: float | None = Field(
        0.65,
        gt=0,
        description="Cost target: largest cost of the blocks, as a share of that of the interleaved network of the "
        "same depth or, in a trained network, of this network; null: no target.",
    )
    spend: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Least cost of the derived network as a share of the cost target, such as 0.9, where some network "
        "has it: a short search underrates costly layers.",
    )
    weight: float | None = Field(
        None,
        ge=0,
        description="Weight of the cost penalty in nats per token. The penalty is the square of the share by which the "
        "expected cost under pi exceeds the target (PLANER, section 3); null: 2, but 0 for the estimator uniform.",
    )
    ramp: float = Field(
        0.5, ge=0, le=1, description="Share of alpha's training over which the penalty's weight rises linearly from 0."
    )
    table: str | None = Field(
        None, description="Latency table of parnas profile; null: measured once per machine and shape."
    )


class SearchConfig(Section):
    """Section `search`."""

    blocks: int = Field(6, ge=1, le=1000, description="Blocks of the SuperNet, each of which chooses a layer.")
    space: Annotated[tuple[str, ...] | tuple[tuple[str, ...], ...], BeforeValidator(_read_space)] = Field(
        SPACES["par"],
        description="Candidate layers by name, such as s or 's:heads=2': one list for all blocks, or a list of lists, "
        "one for each block; or the name of a space: par is [s, f, i], hybrid is [s, k, f, i].",
    )
    share_slices: bool = Field(
        False,
        description="Whether a candidate that is a part of another, such as s:heads=2 of s or f:d_inner=256 of f, uses "
        "slices of its weights (weight entanglement, Chen et al. 2021, arXiv 2107.00651).",
    )
    parent: str | None = Field(
        None,
        description="Folder of a finished retraining: the search looks for cheaper layers for this network. Candidates "
        "of its kind of layer begin with its most important heads and features; all but its own layers are trained by "
        "local distillation (docs/pretrained.md). null: the SuperNet is trained from scratch.",
    )
    estimator: Literal["single_path", "gdas", "straight_through", "soft", "uniform"] = Field(
        "uniform",
        description="Gradient estimator of alpha. uniform: weights by uniform path sampling, alpha by a held-out split "
        "(Guo et al. 2020); soft: Gumbel-softmax gates; straight_through: one-hot gates with the soft gradient (Jang "
        "et al. 2017); gdas: runs only the sampled candidate (Dong & Yang 2019); single_path: also runs one other "
        "candidate, which removes the bias of gdas.",
    )
    steps: int = Field(2000, ge=1, description="Training steps of the SuperNet.")
    warmup_steps: int = Field(100, ge=0, description="Steps over which the learning rate of the weights rises.")
    lr: float = Field(2e-3, gt=0, description="Peak learning rate of the weights.")
    lr_decay: bool = Field(
        True,
        description="Whether the learning rate of the weights falls linearly to zero after the warm-up; false: it "
        "stays at its peak, for weights that a retraining inherits.",
    )
    share: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="With --one-run or --front: share of train.steps in which the search trains its SuperNet; in the "
        "other steps the derived network is trained, from these weights.",
    )
    alpha_start_step: int = Field(200, ge=0, description="Step from which alpha is trained too (FBNet, section 3).")
    alpha_lr: float = Field(
        0.02, gt=0, description="Initial learning rate of alpha; it falls linearly to zero while alpha is trained."
    )
    alpha_split: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of the training text held out for alpha, which the weights never see; 0: alpha learns from "
        "the batches of the weights; null: 0.1 for uniform, else 0.",
    )
    gate_samples: int | None = Field(
        None,
        ge=1,
        description="Samples of gates in each step, each for an equal part of the batch's rows; for uniform, paths "
        "that differ (as in FairNAS, Chu et al. 2019, arXiv 1907.01845). Fewer are drawn if they cannot divide the "
        "rows of a batch evenly; null: 2 for uniform, else 1.",
    )
    paths_within_target: bool | None = Field(
        None,
        description="For the estimator uniform with a cost target: sample costly layers less often, so that paths cost "
        "no more than the target on average. Steps are faster, and networks near the target are trained more; null: "
        "only with --one-run.",
    )
    block_ridge: float | None = Field(
        None,
        gt=0,
        description="For the estimator uniform: how strongly the estimated contribution of a candidate in a block is "
        "shrunk towards its mean over all blocks, counted as a number of additional pairs of evaluated paths; for "
        "short searches, whose pairs are too few for each block by itself; null: 100 with --one-run, else no "
        "shrinking.",
    )
    least_attention: int | None = Field(
        None,
        ge=0,
        description="Least number of attention layers of the derived network, variants of attention included. In short "
        "searches attention looks worse than it is, since it learns more slowly than convolutions; null: 1 with "
        "--one-run if the space has attention, else 0. A lower limit of attention (`parnas derive --max s=0`) replaces "
        "it.",
    )
    uniform_fraction: float = Field(
        0.6,
        gt=0,
        le=1,
        description="For the estimator uniform: fraction of the steps trained by uniform path sampling, in which alpha "
        "is trained too. Then alpha is frozen and the weights are fine-tuned on the selected path; a share tau of the "
        "blocks is still sampled from pi in each step.",
    )
    tau_start: float = Field(1.0, gt=0, description="Temperature tau at the first step.")
    tau_end: float = Field(0.1, gt=0, description="Temperature tau at the last step; the lower bound if learnable.")
    tau_schedule: Literal["exponential", "linear", "cosine", "learnable"] = Field(
        "exponential",
        description="Schedule from tau_start to tau_end; learnable: a parameter in this range, trained with alpha.",
    )
    alpha_every: int = Field(4, ge=1, description="Weight steps per architecture step, if alpha has a held-out split.")
    entropy_start: float = Field(
        0.02,
        ge=0,
        description="Weight of the entropy bonus of pi (Williams & Peng 1991) at the first architecture step, in nats "
        "per token.",
    )
    entropy_end: float = Field(
        0.02,
        ge=0,
        description="Weight of the entropy bonus at the last architecture step; linear in between. For the estimator "
        "uniform without a cost penalty, half of it is the weight of log pi in re-ranking. In a trained network, pi is "
        "the softmax of -KL / entropy_end, and has no weight there.",
    )
    rerank_top_k: int | None = Field(
        None,
        ge=0,
        description="Number N of networks to re-rank once alpha is frozen: an evolutionary search starts from the N "
        "most probable networks within the cost target, and the N best that it finds are compared by held-out loss "
        "with shared weights and by pi; derive returns the best. 0: derive returns the most probable network; null: 16 "
        "for uniform, else 0.",
    )
    rerank_tokens: int | None = Field(
        None,
        ge=64,
        description="Tokens of held-out text on which networks are re-ranked; the evolutionary search uses a quarter "
        "of them. null: 8,192 with --one-run, else 32,768, with which a difference of 0.005 nats per token "
        "is three times its standard error.",
    )
    evolution_steps: int | None = Field(
        None,
        ge=0,
        description="Number of networks that the evolutionary search evaluates with shared weights (Guo et al. 2020, "
        "section 3.4); null: 8 for each block. If rerank_top_k is 0, there is no evolutionary search.",
    )
    candidate_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability that a candidate of a block is left out of the sampling in a step, so that the other "
        "candidates are trained too (Bender et al. 2018, section 3.2).",
    )
    cost: CostConfig = Field(CostConfig(), description="Cost of an architecture and its target.")

    @property
    def block_spaces(self) -> tuple[tuple[str, ...], ...]:
        """The layer names of each block's candidates."""
        return spread_space(self.space, self.blocks)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The different candidates of all blocks, in order of first appearance: the columns of pi."""
        return unite(self.block_spaces)

    @property
    def alpha_share(self) -> float:
        """Share of the training text held out for alpha: `alpha_split` or, if it is `None`, the estimator's default."""
        if self.parent is not None:  # its weights have seen all of the training text
            return 0.0
        return (0.1 if self.estimator == "uniform" else 0.0) if self.alpha_split is None else self.alpha_split

    @property
    def cost_weight(self) -> float:
        """Weight of the cost penalty, in nats per token.

        The default is 2, but 0 for the estimator uniform, where derive alone enforces the cost target: with a penalty,
        pi would rank candidates by loss plus cost instead of by loss.
        """
        return (0.0 if self.estimator == "uniform" else 2.0) if self.cost.weight is None else self.cost.weight

    def samples_of_batch(self, rows: int) -> int:
        """Return the number of samples of gates in a step on a batch of `rows` rows.

        It is `gate_samples` or, if that is `None`, the estimator's default; fewer if the rows cannot be divided evenly.
        """
        default = 2 if self.estimator == "uniform" else 1
        return math.gcd(default if self.gate_samples is None else self.gate_samples, rows)

    @property
    def rerank_count(self) -> int:
        """Number of networks to re-rank: `rerank_top_k` or, if it is `None`, the estimator's default."""
        return (16 if self.estimator == "uniform" else 0) if self.rerank_top_k is None else self.rerank_top_k

    @property
    def rerank_token_count(self) -> int:
        """Tokens on which networks are re-ranked: `rerank_tokens` or, if it is `None`, 32,768."""
        return 32_768 if self.rerank_tokens is None else self.rerank_tokens

    @property
    def evolution_count(self) -> int:
        """Steps of the evolutionary search: `evolution_steps` or, if it is `None`, 8 for each block."""
        return 8 * self.blocks if self.evolution_steps is None else self.evolution_steps

    @property
    def rerank_pi_weight(self) -> float:
        """Weight of log pi in the re-ranking score, in nats per token (parnas/nas/rerank.py).

        It is 0 if a cost penalty also trained alpha, if the weights were trained on paths that depend on alpha, or in a
        trained network, where the loss alone ranks networks better.
        """
        estimates_loss = self.estimator == "uniform" and not self.cost_weight and self.parent is None
        return self.entropy_end / 2 if estimates_loss else 0.0

    @property
    def attention_blocks(self) -> int:
        """Number of blocks that have attention, or a variant of it, as a candidate."""
        return sum(any(name.partition(":")[0] == ATTENTION for name in block) for block in self.block_spaces)

    @property
    def least_layers(self) -> dict[str, int]:
        """Least number of blocks by layer name, as the knapsack counts them: attention, if any are demanded."""
        return {ATTENTION: self.least_attention} if self.least_attention else {}

    @property
    def alpha_end_step(self) -> int:
        """First step at which alpha is frozen; `steps` for estimators other than uniform, which never freeze it."""
        return round(self.uniform_fraction * self.steps) if self.estimator == "uniform" else self.steps

    def cross_field_errors(self) -> Iterator[FieldError]:
        """Yield errors of the search space, of settings that the estimator uniform excludes, and of schedules."""
        if problem := _space_problem(self.space, self.blocks):
            yield "space", problem
        if self.estimator == "uniform":
            yield from self._uniform_errors()
        if self.paths_within_target and (self.estimator != "uniform" or self.cost.target is None):
            problem = "is true, which is for estimator uniform with a cost target (search.cost.target)"
            yield "paths_within_target", problem
        if self.least_attention and self.least_attention > self.attention_blocks:
            problem = f"is {self.least_attention}, but {self.attention_blocks} block(s) have attention as a candidate"
            yield "least_attention", problem
        if self.block_ridge is not None and self.estimator != "uniform":
            yield "block_ridge", f"is {self.block_ridge:g}, which is for estimator uniform; leave it at null"
        if self.parent is not None and self.share_slices:
            yield "share_slices", "is true, but in a trained network (parent) each candidate has its own weights"
        if self.parent is not None and not self.entropy_end:
            yield "entropy_end", "is 0, but in a trained network (parent) pi is exp(-KL / entropy_end); set it to 0.02"
        if self.tau_end > self.tau_start:
            yield "tau_end", f"is {self.tau_end}, above tau_start {self.tau_start}; the temperature must not rise"
        if self.alpha_start_step >= self.alpha_end_step:
            end = f"alpha's training ends after {self.alpha_end_step} of {self.steps} steps"
            yield "alpha_start_step", f"is {self.alpha_start_step}, but {end}; lower it"

    def _uniform_errors(self) -> Iterator[FieldError]:
        if not self.alpha_share and self.parent is None:
            yield "alpha_split", "is 0, but estimator uniform trains alpha on a held-out split; set it to 0.1"
        if value := self.candidate_dropout:
            yield "candidate_dropout", f"is {value}, but estimator uniform samples uniformly; leave it at 0"
        if self.tau_start > 1:
            problem = f"is {self.tau_start}, but for estimator uniform tau is a share of the network; give at most 1"
            yield "tau_start", problem
        if self.tau_schedule == "learnable":
            problem = "is learnable, but estimator uniform has no gradient of tau; give exponential, linear or cosine"
            yield "tau_schedule", problem


# train


class DistillConfig(Section):
    """Section `train.distill`."""

    weight: float = Field(
        0.75, ge=0, le=1, description="Weight of the divergence from the teachers; 1 minus it is that of the loss."
    )
    temperature: float = Field(1.0, gt=0, description="Temperature at which the distributions are compared.")


class TrainConfig(Section):
    """Section `train`."""

    steps: int = Field(2000, ge=1, description="Training steps of the discrete network.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw: for all weights (Loshchilov & Hutter 2019); muon: orthogonalised momentum for the matrices "
        "of layers (Jordan et al. 2024), scaled to AdamW's learning rate (Liu et al. 2025, arXiv 2502.16982), and "
        "AdamW for the rest; both phases.",
    )
    lr: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(
        100,
        ge=0,
        description="Steps over which the learning rate rises. Then it falls linearly to zero, or stays constant if "
        "weights are averaged.",
    )
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices (Loshchilov & Hutter 2019); both phases."
    )
    clip: float = Field(
        1.0,
        gt=0,
        description="Largest norm of the gradient; both phases. With Muon it bounds the momentum, not the step.",
    )
    inherit: str | None = Field(
        None,
        description="Folder of a finished search or retraining: the training starts from the weights of its SuperNet, "
        "or of its network, of which model.arch may have a part (i in place of the other layers); null: from scratch. "
        "Retraining only.",
    )
    freeze_embedding: bool = Field(
        False,
        description="Embedding and softmax keep the inherited weights, and only the layers are trained: a step is "
        "faster where the vocabulary is large, and rare words are not learnt by heart. Only with inherit.",
    )
    teachers: tuple[str, ...] = Field(
        (),
        description="Folders of finished runs with the same text: the network is also trained to predict what these "
        "predict, on average (Hinton et al. 2015, arXiv 1503.02531). Retraining only.",
    )
    distill: DistillConfig = Field(DistillConfig(), description="Distillation from `teachers`.")
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the steps, at the end of training, over which the weights are averaged (Izmailov et al. "
        "2018, arXiv 1803.05407): validation and checkpoints use the mean. The learning rate then stays constant, so "
        "that the run can be lengthened without loss. 0: no averaging. Retraining only.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the target probability spread evenly over the classes of a softmax (Szegedy et al. 2016, "
        "arXiv 1512.00567, section 7); for an adaptive softmax, over the head and over the target's tail. It affects "
        "gradients only: losses are logged without it. Both phases.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        description="Micro-batches per batch, for gradient accumulation: the same gradients in less memory; both "
        "phases. If it does not divide the number of rows of a process, their greatest common divisor is used.",
    )
    max_skipped_steps: int = Field(
        0,
        ge=0,
        description="Number of steps with a non-finite loss or gradient that a run may skip before it stops with an "
        "error; memory is cleared after a skipped step; both phases. If only alpha's gradient is not finite, only "
        "alpha stays unchanged.",
    )
    log_every: int = Field(50, ge=1, description="Steps between two lines of metrics; both phases.")
    eval_every: int = Field(500, ge=1, description="Steps between two validations; both phases.")
    save_every: int = Field(500, ge=1, description="Steps between two checkpoints; both phases.")

    def cross_field_errors(self) -> Iterator[FieldError]:
        """Yield an error for random weights that would stay random."""
        if self.freeze_embedding and self.inherit is None:
            yield "freeze_embedding", "is true, but no weights are inherited; set inherit, or freeze_embedding to false"


# evaluation


class DynamicConfig(Section):
    """Section `evaluation.dynamic`."""

    lr: float | None = Field(
        None,
        ge=0,
        description="Learning rate of the update after each segment; null: no dynamic evaluation. `parnas tune-eval` "
        "finds a value.",
    )
    decay: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the distance to the trained weights by which weights return to them after each segment.",
    )
    update: Literal["rms", "sgd"] = Field(
        "rms",
        description="rms: gradients are divided by the root of their mean square in training, and weights with large "
        "gradients decay faster (Krause et al., section 5); sgd: plain gradients.",
    )
    epsilon: float = Field(
        1.0,
        gt=0,
        description="Added to the root of the mean square of a weight's gradients, which is small for rare tokens; a "
        "multiple of the mean root over all weights, so that it is comparable between networks.",
    )
    batches: int = Field(100, ge=1, description="Training batches from which mean squares of gradients are estimated.")


class CacheConfig(Section):
    """Section `evaluation.cache`."""

    size: int | None = Field(None, ge=1, description="Positions that the cache holds; null: no cache.")
    theta: float = Field(
        0.1, ge=0, description="Factor of the similarity of hidden states; 0: all positions weigh the same."
    )
    weight: float = Field(
        0.1, ge=0, lt=1, description="Weight of the cache's probability; 1 minus it is the weight of the network's."
    )


class EvaluationConfig(Section):
    """Section `evaluation`."""

    split: Literal["train", "valid", "test"] = Field("valid", description="Split of the text that evaluate reads.")
    tgt_len: int | None = Field(None, ge=1, description="Tokens of a segment; null: as trained.")
    mem_len: int | None = Field(None, ge=0, description="Positions of memory; null: as trained.")
    cmem_len: int | None = Field(None, ge=0, description="Positions of compressed memory; null: as trained.")
    clamp_len: int | None = Field(None, ge=1, description="Larger distances are treated as this one; null: as trained.")
    same_length: bool | None = Field(None, description="Queries attend to equally many positions; null: as trained.")
    pointer_len: int | None = Field(
        None, ge=1, description="Positions before the segment from which a pointer may copy; null: as trained."
    )
    batch_size: int = Field(32, ge=1, description="Rows read in parallel; changes the speed, not the result.")
    stride: int | None = Field(
        None,
        ge=1,
        description="Sliding-window evaluation, besides the plain one: of each window of tgt_len tokens, the last "
        "`stride` are scored, the others are context; must divide tgt_len; null: off.",
    )
    dynamic: DynamicConfig = Field(
        default=DynamicConfig(),
        description="Dynamic evaluation, besides the plain one: the weights are updated on scored segments (Krause et "
        "al. 2018, arXiv 1709.07432).",
    )
    cache: CacheConfig = Field(
        default=CacheConfig(),
        description="Continuous cache, besides the plain evaluation: tokens that followed similar hidden states become "
        "more probable (Grave et al. 2017, arXiv 1612.04426).",
    )


# runtime


class RuntimeConfig(Section):
    """Section `runtime`."""

    seed: int = Field(
        1, ge=0, lt=2**32, description="Seed of initial weights, the order of the text, dropout and all noise."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Precision of matrix products; auto: bf16 by autocast if the processor computes in it."
    )
    compile: bool = Field(False, description="Compile the network with torch.compile; in a search, each candidate.")
    checkpoint_activations: bool = Field(
        False,
        description="Activation checkpointing: store only the input of each block and recompute the block in the "
        "backward pass (Chen et al. 2016, arXiv 1604.06174): less memory, a third more time, the same result.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; null: all cores.")
