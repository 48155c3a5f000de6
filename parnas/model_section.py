"""The section `model` of the configuration: the network's shape, and how far its attention looks back."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

from pydantic import Field

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.section import Mistake, Section

WIDEST = 999_999  # as in the options of layer names
AUTO_CLUSTERS = 3  # of the adaptive softmax where model.cutoffs is auto


class Reach(NamedTuple):
    """How far attention looks back."""

    mem_len: int = 0  # positions of memory
    cmem_len: int = 0  # positions of compressed memory, in layers that have one
    clamp_len: int | None = None  # distances beyond it count as this one
    same_length: bool = False  # every query sees as many positions


class MemoryConfig(Section):
    cmem_len: int = Field(32, ge=1, description="Positions of compressed memory that a layer c sees besides memory.")
    ratio: int = Field(4, ge=2, description="Positions of memory that become one of compressed memory.")
    function: Literal["max_pool", "mean_pool", "conv", "dilated_conv", "most_used"] = Field(
        "conv",
        description="What compresses (Rae et al. 2020, section 3.1): the largest or mean value of each feature, a "
        "convolution with a stride of its width, one that reaches twice as far, or the positions that attention used "
        "most as they are.",
    )
    loss: Literal["attention", "autoencode", "bptt"] = Field(
        "attention",
        description="What trains a convolution (section 3.2): attention to compressed memory shall give what attention "
        "to the memory gave; or a decoder shall rebuild it; or the loss of the next segment, without a loss of its "
        "own. The other functions have nothing to train.",
    )
    distance: Literal["slots", "tokens"] = Field(
        "slots",
        description="Distance to a compressed position: counted in positions that attention sees, as in the paper; or "
        "in tokens, the mean of those that it stands for.",
    )


class ModelConfig(Section):
    arch: str | None = Field(None, description="Architecture that retrain trains where --arch is not given.")
    d_model: int = Field(128, ge=1, le=WIDEST, description="Width of the network.")
    n_heads: int = Field(4, ge=1, le=WIDEST, description="Attention heads.")
    d_head: int | None = Field(None, ge=1, le=WIDEST, description="Width of a head; null: d_model / n_heads.")
    d_inner: int = Field(512, ge=1, le=WIDEST, description="Inner width of a feed-forward layer.")
    mem_len: int = Field(32, ge=0, description="Positions of memory that attention sees besides the segment.")
    clamp_len: int | None = Field(
        None, ge=1, description="Larger distances count as this one (Dai et al. 2019, as in their code); null: none."
    )
    same_length: bool = Field(
        False,
        description="Every query sees equally far back: mem_len positions with its own, and of compressed memory what "
        "the last query before the segment saw; else later ones of a segment see more.",
    )
    memory: MemoryConfig = Field(MemoryConfig(), description="Compressed memory, of layers c.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and layer outputs, a probability.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention weights, a probability.")
    norm: Literal["post", "pre"] = Field(
        "post", description="LayerNorm after each residual (Transformer-XL) or before each layer."
    )
    share_biases: bool = Field(
        True, description="One pair of relative biases u, v for all layers, or one each (untied)."
    )
    cutoffs: tuple[int, ...] | Literal["auto"] = Field(
        (),
        description="Where the clusters of the adaptive softmax end, without the vocabulary size; "
        "empty: full softmax; auto: the optimal ones for three clusters.",
    )
    proj_factor: int | None = Field(
        None, ge=1, description="Each cluster of the adaptive softmax is this many times narrower; null: as div_val."
    )
    proj_dims: tuple[int, ...] | None = Field(
        None, description="Widths of the tail clusters, one for each cutoff, in place of proj_factor."
    )
    tie_weights: bool = Field(True, description="Share the weights of embedding and softmax.")
    div_val: int = Field(1, ge=1, description="Each cluster of the input embedding is this many times narrower.")

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.d_head or self.d_model // self.n_heads

    @property
    def reach(self) -> Reach:
        """How far attention looks back in training."""
        return Reach(self.mem_len, self.memory.cmem_len, self.clamp_len, self.same_length)

    def embedding_dims(self) -> list[int]:
        """Embedding width of each cluster (Baevski & Auli 2019; `div_val` of Transformer-XL)."""
        return self._narrowing(self.div_val)

    def softmax_dims(self) -> list[int]:
        """Width of each cluster of the (adaptive) softmax, the head first."""
        if self.proj_dims is not None:
            return [self.d_model, *self.proj_dims]
        return self._narrowing(self.proj_factor or self.div_val)

    def _narrowing(self, factor: int) -> list[int]:
        """d_model divided by `factor` once more for each cluster."""
        return list(accumulate(self.cutoffs, lambda width, _: width // factor, initial=self.d_model))

    def mistakes(self) -> Iterator[Mistake]:
        if self.d_head is None and self.d_model % self.n_heads:
            yield Mistake(
                "n_heads", f"is {self.n_heads}, which does not divide d_model {self.d_model}; change one or give d_head"
            )
        if self.arch is not None:
            try:
                Architecture.parse(self.arch).canonical()
            except ParnasError as error:
                yield Mistake("arch", f"is {self.arch[:40]!r}: {error}")
        if self.same_length and not self.mem_len:
            yield Mistake("same_length", "is true, but without memory nothing would be seen; give mem_len, or false")
        yield from self._cutoff_mistakes()

    def _cutoff_mistakes(self) -> Iterator[Mistake]:
        if self.cutoffs == ():
            for key in ("div_val", "proj_factor"):
                if (value := getattr(self, key) or 1) > 1:
                    yield Mistake(
                        key, f"is {value}, but without cutoffs there is one cluster; give cutoffs or leave it out"
                    )
            if self.proj_dims is not None:
                yield Mistake("proj_dims", "needs cutoffs, one for each width")
            return
        if self.cutoffs != "auto" and (self.cutoffs[0] < 1 or sorted(set(self.cutoffs)) != list(self.cutoffs)):
            yield Mistake(
                "cutoffs", f"is {list(self.cutoffs)}; give positive numbers that rise, without the vocabulary size"
            )
        tails = AUTO_CLUSTERS - 1 if self.cutoffs == "auto" else len(self.cutoffs)
        if self.proj_dims is not None and (len(self.proj_dims) != tails or min(self.proj_dims) < 1):
            yield Mistake(
                "proj_dims", f"is {list(self.proj_dims)}; give {tails} positive width(s), one for each cutoff"
            )
            return
        sized = self if self.cutoffs != "auto" else self.model_construct(**{**dict(self), "cutoffs": (1,) * tails})
        for key, dims in (("div_val", sized.embedding_dims()), ("proj_factor", sized.softmax_dims())):
            if min(dims) < 1:
                yield Mistake(key, f"leaves a cluster without width: {dims}; lower it or use fewer cutoffs")
        if self.tie_weights and sized.embedding_dims() != sized.softmax_dims():
            yield Mistake(
                "tie_weights",
                f"is true, but the embedding's clusters have widths {sized.embedding_dims()} and the softmax's "
                f"{sized.softmax_dims()}; make proj_factor equal to div_val, or set tie_weights: false",
            )
