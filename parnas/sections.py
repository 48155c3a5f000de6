"""The sections of the configuration: every setting with its default, unit and meaning, here and nowhere else.

The reference page is made from this file; `config.py` joins the sections and reads them.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.space import space_problem, spread_space, unite

AUTO_CLUSTERS = 3  # of the adaptive softmax where model.cutoffs is auto


class Mistake(NamedTuple):
    """One wrong setting: its dotted key, and a sentence with what was given and what is allowed."""

    key: str
    problem: str


class Section(BaseModel):
    """Base of every section: frozen, typed strictly, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def mistakes(self) -> Iterator[Mistake]:
        """Mistakes that no single field can show."""
        return iter(())

    @model_validator(mode="after")
    def _refuse_mistakes(self) -> Self:
        if found := list(self.mistakes()):
            raise PydanticCustomError("mistakes", "{text}", {"text": "; ".join(map(str, found)), "found": found})
        return self


class TokenizerConfig(Section):
    kind: Literal["sentencepiece", "word", "byte"] = Field(
        "sentencepiece", description="sentencepiece pieces, whitespace words with <eos>, or bytes."
    )
    vocab_size: int | None = Field(
        None,
        ge=2,
        description="Number of pieces (null: 8000), or of the most frequent words kept (null: all). None for bytes.",
    )
    model_type: Literal["unigram", "bpe"] = Field("unigram", description="Algorithm of sentencepiece.")
    lowercase: bool = Field(False, description="Fold case (sentencepiece: by NFKC_CF); this loses information.")
    user_symbols: tuple[str, ...] = Field(
        (), description="Strings that sentencepiece keeps as one piece, besides <unk>."
    )
    byte_fallback: bool = Field(True, description="Spell characters without a piece as bytes, so that none is lost.")

    def mistakes(self) -> Iterator[Mistake]:
        if self.kind == "byte" and self.vocab_size is not None:
            yield Mistake(
                "vocab_size", f"is {self.vocab_size}, but a byte tokenizer has the bytes of its text; leave it null"
            )
        if (
            self.kind == "sentencepiece"
            and self.vocab_size is not None
            and self.byte_fallback
            and self.vocab_size < 300
        ):
            yield Mistake(
                "vocab_size", f"is {self.vocab_size}, but byte_fallback alone takes 256 pieces; give 300 or more"
            )


class DataConfig(Section):
    corpus: str = Field(
        "pydoc",
        min_length=1,
        description="wikitext-2, wikitext-103, enwik8, text8, pydoc, a text file, "
        "or a folder with train.txt, valid.txt and test.txt.",
    )
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="How text becomes tokens.")
    batch_size: int = Field(32, ge=1, description="Rows read side by side, each going on where it left off.")
    tgt_len: int = Field(32, ge=1, description="Tokens of a segment in each row.")


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
    d_model: int = Field(128, ge=1, description="Width of the network.")
    n_heads: int = Field(4, ge=1, description="Attention heads.")
    d_head: int | None = Field(None, ge=1, description="Width of a head; null: d_model / n_heads.")
    d_inner: int = Field(512, ge=1, description="Inner width of a feed-forward layer.")
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
        return [self.d_model // self.div_val**cluster for cluster in range(len(self.cutoffs) + 1)]

    def softmax_dims(self) -> list[int]:
        """Width of each cluster of the (adaptive) softmax, the head first."""
        if self.proj_dims is not None:
            return [self.d_model, *self.proj_dims]
        factor = self.proj_factor or self.div_val
        return [self.d_model // factor**cluster for cluster in range(len(self.cutoffs) + 1)]

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


class CostConfig(Section):
    metric: Literal["latency", "macs", "parameters"] = Field(
        "latency",
        description="What a layer costs: its inference latency on this device, its multiply-adds or its parameters.",
    )
    target: float | None = Field(
        0.65,
        gt=0,
        description="Largest cost of the blocks, as a share of the interleaved network's of that depth; null: none.",
    )
    weight: float | None = Field(
        None,
        ge=0,
        description="Weight of the penalty in nats per token: times the square of the share by which the cost expected "
        "under pi exceeds the target (PLANER, section 3); null: 2, but 0 for the estimator uniform.",
    )
    ramp: float = Field(
        0.5, ge=0, le=1, description="Share of alpha's training over which the weight rises in a line from 0."
    )
    table: str | None = Field(
        None, description="File of parnas profile with the latencies; null: measured once for each machine and shape."
    )


class SearchConfig(Section):
    blocks: int = Field(6, ge=1, le=1000, description="Stochastic blocks of the SuperNet.")
    space: tuple[str, ...] | tuple[tuple[str, ...], ...] = Field(
        ("s", "f", "i"),
        description="Candidate layers by name, such as s or 's:heads=2': one list for all blocks, or a list of lists, "
        "one for each block.",
    )
    estimator: Literal["single_path", "gdas", "straight_through", "soft", "uniform"] = Field(
        "uniform",
        description="uniform: weights trained on even paths, alpha by text of its own (Guo et al. 2020); soft: gates "
        "of the Gumbel-softmax as they are; straight_through: one-hot with the soft gradient (Jang et al. 2017); gdas: "
        "running the chosen candidate alone (Dong & Yang 2019); single_path: and probing one other, for a gradient "
        "without gdas's bias.",
    )
    steps: int = Field(2000, ge=1, description="Training steps of the SuperNet.")
    warmup_steps: int = Field(100, ge=0, description="Steps over which the learning rate of the weights rises.")
    lr: float = Field(2e-3, gt=0, description="Peak learning rate of the weights.")
    alpha_start_step: int = Field(200, ge=0, description="Step at which alpha begins to be trained (FBNet, section 3).")
    alpha_lr: float = Field(
        0.02, gt=0, description="Learning rate of alpha at first; it falls to zero in a line while alpha is trained."
    )
    alpha_split: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of the training text kept from the weights and used for alpha; 0: the same batches; "
        "null: 0.1 for uniform, else 0.",
    )
    fair_share: float = Field(
        0.6,
        gt=0,
        le=1,
        description="uniform: share of the steps in which paths are even and alpha learns; then alpha rests, and the "
        "weights settle on the network to be derived, of whose blocks a share of tau still draws by pi.",
    )
    tau_start: float = Field(1.0, gt=0, description="Temperature at the first step.")
    tau_end: float = Field(
        0.1, gt=0, description="Temperature at the last step; the lower bound where it is learnable."
    )
    tau_schedule: Literal["exponential", "linear", "cosine", "learnable"] = Field(
        "exponential", description="Path from tau_start to tau_end, or a parameter between the two, trained with alpha."
    )
    alpha_every: int = Field(
        4, ge=1, description="Steps of the weights for each of alpha, where alpha has text of its own."
    )
    entropy_start: float = Field(
        0.02,
        ge=0,
        description="Weight of the entropy of pi in the objective (Williams & Peng 1991), in nats, when alpha begins.",
    )
    entropy_end: float = Field(0.02, ge=0, description="The same when alpha ends; a line between the two.")
    second_look: int | None = Field(
        None,
        ge=0,
        description="So many of the most probable networks within the target are read with the SuperNet's weights once "
        "alpha rests, and the best by this and by pi together is what derive takes (Guo et al. 2020, section 3.3); 0: "
        "the most probable one as it is; null: 16 for uniform, else 0.",
    )
    candidate_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability with which a step leaves a candidate of a block out of what it draws from, so that "
        "others are trained too (Bender et al. 2018, section 3.2).",
    )
    cost: CostConfig = Field(CostConfig(), description="What an architecture may cost.")

    @property
    def block_spaces(self) -> tuple[tuple[str, ...], ...]:
        """The candidates of each block, by name."""
        return spread_space(self.space, self.blocks)

    @property
    def candidates(self) -> tuple[str, ...]:
        """All candidates that blocks have, in the order of their first appearance: the columns of pi."""
        return unite(self.block_spaces)

    @property
    def alpha_share(self) -> float:
        """Share of the training text that alpha has for itself."""
        return (0.1 if self.estimator == "uniform" else 0.0) if self.alpha_split is None else self.alpha_split

    @property
    def cost_weight(self) -> float:
        """Weight of the penalty: none by default where the weights do not follow alpha, since derive then does better.

        A penalty moves all candidates towards the same sum of loss and cost, so that pi no longer tells what they are
        worth; without one, derive finds the best network within the target exactly.
        """
        return (0.0 if self.estimator == "uniform" else 2.0) if self.cost.weight is None else self.cost.weight

    @property
    def looked_at(self) -> int:
        """How many networks are given a second look."""
        return (16 if self.estimator == "uniform" else 0) if self.second_look is None else self.second_look

    @property
    def weight_of_pi(self) -> float:
        """What a nat of log pi says of a network's loss in a second look, in nats per token (parnas/nas/inherited.py).

        None where more than loss and entropy shaped alpha, or weights that followed it.
        """
        return self.entropy_end if self.estimator == "uniform" and not self.cost_weight else 0.0

    @property
    def alpha_end_step(self) -> int:
        """First step at which alpha is no longer trained."""
        return round(self.fair_share * self.steps) if self.estimator == "uniform" else self.steps

    def mistakes(self) -> Iterator[Mistake]:
        if problem := space_problem(self.space, self.blocks):
            yield Mistake("space", problem)
        if self.estimator == "uniform" and not self.alpha_share:
            yield Mistake("alpha_split", "is 0, but estimator uniform learns alpha from text of its own; set it to 0.1")
        if self.estimator == "uniform" and self.candidate_dropout:
            problem = f"is {self.candidate_dropout}, but the paths of estimator uniform are even; leave it at 0"
            yield Mistake("candidate_dropout", problem)
        if self.estimator == "uniform" and self.tau_start > 1:
            yield Mistake("tau_start", f"is {self.tau_start}, but for estimator uniform tau is a share; give 1 at most")
        if self.estimator == "uniform" and self.tau_schedule == "learnable":
            yield Mistake(
                "tau_schedule",
                "is learnable, but estimator uniform learns nothing of tau; give exponential, linear or cosine",
            )
        if self.tau_end > self.tau_start:
            yield Mistake("tau_end", f"is {self.tau_end}, above tau_start {self.tau_start}; the temperature falls")
        if self.alpha_start_step >= self.alpha_end_step:
            end = f"alpha's training ends after {self.alpha_end_step} of {self.steps} steps"
            yield Mistake("alpha_start_step", f"is {self.alpha_start_step}, but {end}; lower it")


class TrainConfig(Section):
    steps: int = Field(2000, ge=1, description="Training steps of the discrete network.")
    lr: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(
        100, ge=0, description="Steps over which the learning rate rises, before it falls to zero in a line."
    )
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices (Loshchilov & Hutter 2019); both phases."
    )
    clip: float = Field(1.0, gt=0, description="Largest norm of the gradient; both phases.")
    log_every: int = Field(50, ge=1, description="Steps between two lines of metrics; both phases.")
    eval_every: int = Field(500, ge=1, description="Steps between two validations; both phases.")
    save_every: int = Field(500, ge=1, description="Steps between two checkpoints; both phases.")


class EvaluationConfig(Section):
    split: Literal["train", "valid", "test"] = Field("valid", description="Split that evaluate reads.")
    tgt_len: int | None = Field(None, ge=1, description="Tokens of a segment; null: as trained.")
    mem_len: int | None = Field(None, ge=0, description="Positions of memory; null: as trained.")
    cmem_len: int | None = Field(None, ge=0, description="Positions of compressed memory; null: as trained.")
    clamp_len: int | None = Field(None, ge=1, description="Larger distances count as this one; null: as trained.")
    same_length: bool | None = Field(None, description="Whether every query sees equally far back; null: as trained.")
    batch_size: int = Field(32, ge=1, description="Rows read side by side; changes the speed, not the result.")


class RuntimeConfig(Section):
    seed: int = Field(1, ge=0, lt=2**32, description="Fixes initial weights, dropout and Gumbel noise.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Of matrix products; auto: bf16 by autocast where the processor computes in it."
    )
    compile: bool = Field(False, description="Compile the network by torch.compile.")
    threads: int | None = Field(None, ge=1, description="Threads of the CPU; null: all cores.")
