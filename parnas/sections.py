"""The sections of the configuration: every setting with its default, unit and meaning.

Those of the model and of evaluation are in `model_section.py` and `evaluation_section.py`. The reference page is made
from all three; `config.py` joins the sections and reads them.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from parnas.evaluation_section import CacheConfig, DynamicConfig, EvaluationConfig
from parnas.model_section import AUTO_CLUSTERS, MemoryConfig, ModelConfig, Reach
from parnas.section import Mistake, Section
from parnas.space import space_problem, spread_space, unite

__all__ = [
    "AUTO_CLUSTERS",
    "CacheConfig",
    "CostConfig",
    "DataConfig",
    "DynamicConfig",
    "EvaluationConfig",
    "MemoryConfig",
    "ModelConfig",
    "Reach",
    "RuntimeConfig",
    "SearchConfig",
    "Section",
    "TokenizerConfig",
    "TrainConfig",
]


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
    shuffle: Literal["none", "partial"] = Field(
        "none",
        description="partial: in each epoch every row begins at a place of its own, drawn by runtime.seed, and goes on "
        "at its beginning after its end (Press 2019, arXiv 1903.04167).",
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
        "weights settle on the network to be derived; in each step a share tau of its blocks is still drawn by pi.",
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
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw: of all weights (Loshchilov & Hutter 2019); muon: orthogonalised momentum for the matrices "
        "of layers (Jordan et al. 2024), scaled to AdamW's learning rate (Liu et al. 2025, arXiv 2502.16982), and "
        "AdamW for the rest; both phases.",
    )
    lr: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(
        100,
        ge=0,
        description="Steps over which the learning rate rises, before it falls to zero in a line (or stays, "
        "where weights are averaged).",
    )
    weight_decay: float = Field(
        0.01, ge=0, description="Decoupled weight decay of matrices (Loshchilov & Hutter 2019); both phases."
    )
    clip: float = Field(
        1.0,
        gt=0,
        description="Largest norm of the gradient; both phases. With Muon it bounds the momentum, not the step.",
    )
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the steps, at the end, whose weights are averaged (Izmailov et al. 2018, arXiv "
        "1803.05407): the network is validated and kept with their mean. The learning rate does not fall then, so that "
        "such a run loses nothing by being lengthened. 0: no average. Retraining alone.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of each softmax's probability that training wants spread evenly over its classes (Szegedy "
        "et al. 2016, arXiv 1512.00567, section 7); of an adaptive softmax, over those of the head, and of the tail "
        "that a target is in. In the gradients alone: losses are logged without it. Both phases.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        description="Parts of a batch's rows that are read one after another before a step: the same gradients in less "
        "memory; both phases. Parts are equal: where so many do not divide the rows of a process, it is the largest "
        "divisor that both have.",
    )
    skip_bad_steps: int = Field(
        0,
        ge=0,
        description="So many steps of a run whose gradients are not finite are left out, with empty memory after them, "
        "before it ends with a diagnosis; both phases. Where it is the gradient of alpha alone, alpha stays as it is.",
    )
    log_every: int = Field(50, ge=1, description="Steps between two lines of metrics; both phases.")
    eval_every: int = Field(500, ge=1, description="Steps between two validations; both phases.")
    save_every: int = Field(500, ge=1, description="Steps between two checkpoints; both phases.")


class RuntimeConfig(Section):
    seed: int = Field(
        1, ge=0, lt=2**32, description="Fixes initial weights, the order of the text, dropout and all noise."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Of matrix products; auto: bf16 by autocast where the processor computes in it."
    )
    compile: bool = Field(False, description="Compile the network by torch.compile.")
    checkpoint_activations: bool = Field(
        False,
        description="Keep only the input of each block for the backward pass and compute the block once more there "
        "(Chen et al. 2016, arXiv 1604.06174): less memory, a third more time, the same result.",
    )
    threads: int | None = Field(None, ge=1, description="Threads of the CPU; null: all cores.")
