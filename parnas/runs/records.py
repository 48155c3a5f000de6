"""The files of a run folder as typed records, with the unit of each value.

JSON has no infinity and no "not a number": both are written as null and read as `nan`. `None` means that the file lacks
the value. Records keep keys that they do not declare, so that files of other versions of parnas can be read.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from parnas.config.schema import CacheConfig, DynamicConfig
from parnas.errors import ParnasError

__all__ = [
    "BestValidation",
    "BlockRecord",
    "ChosenTrialRecord",
    "ComparisonRow",
    "CostRecord",
    "DerivationRecord",
    "Environment",
    "FoundNetworkRecord",
    "InheritedWeights",
    "Kind",
    "MetricsRecord",
    "PiRecord",
    "ProbeConditions",
    "ProbeRecord",
    "RankedRecord",
    "Record",
    "RerankRecord",
    "RerankedNetwork",
    "RunSummary",
    "SplitLoss",
    "TunedEvalRecord",
    "parse_rows",
]

Kind = Literal["search", "retrain"]
_Split = Literal["train", "valid"]


def _null_to_nan(value: object) -> object:
    return math.nan if value is None else value


_Float = Annotated[float, Strict(), BeforeValidator(_null_to_nan)]
"""A number; null in the file becomes `nan`."""
_OptionalFloat = Annotated[Annotated[float, Strict()] | None, BeforeValidator(_null_to_nan)]
"""A number; null in the file becomes `nan`, and a missing key `None`."""
_Probability = Annotated[float, Strict(), Field(ge=0, le=1 + 1e-6)]
"""A probability; the bound is slightly above 1, as a softmax in single precision may return such values."""
_Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]


class Record(BaseModel):
    """Base class of the records: frozen; it keeps keys that it does not declare."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @classmethod
    def parse(cls, content: object, source: str, hint: str = "restore it") -> Self:
        """Return the record of JSON content; raise `ParnasError` with `source`, the first wrong key and `hint`."""
        if not isinstance(content, dict):
            raise ParnasError(f"{source} holds no JSON object; {hint}.")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ParnasError(f"{source} has no valid {key:.80} ({first['msg']}); {hint}.") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the values that were given or read, by their keys in the file, without defaults."""
        return self.model_dump(exclude_unset=True)


# metrics.jsonl and pi.jsonl


class MetricsRecord(Record):
    """A line of `metrics.jsonl`: means over the training steps since the previous line, or results of a validation."""

    step: _Count
    split: _Split
    loss: _Float = math.nan  # nats per token
    ppl: _Float = math.nan  # perplexity per token
    word_ppl: _OptionalFloat = None
    bits_per_byte: _OptionalFloat = None
    compression_loss: _OptionalFloat = None  # auxiliary loss of compressed memory
    local_loss: _OptionalFloat = None  # of local distillation, as a share of what the parent's layers change
    lr: _OptionalFloat = None
    tau: _OptionalFloat = None  # temperature of a search
    gradient_norm: _OptionalFloat = None  # largest norm since the previous line, before clipping
    tokens_per_s: _OptionalFloat = None
    step_ms: _OptionalFloat = None
    processes: _Count | None = None  # number in a distributed training; `None` for one process
    # Validation of a search: mixture is the SuperNet weighted by pi, argmax the network that derive would select.
    mixture_loss: _OptionalFloat = None
    mixture_ppl: _OptionalFloat = None
    argmax_loss: _OptionalFloat = None
    argmax_ppl: _OptionalFloat = None
    gap: _OptionalFloat = None  # mixture loss minus argmax loss, in nats per token
    # State of a search, logged with the training steps.
    entropy: _OptionalFloat = None  # entropy of pi in nats, mean over the blocks
    identity_share: _OptionalFloat = None  # probability of identity, mean over the blocks
    argmax: str | None = None  # the architecture that derive would select
    argmax_changes: _Count | None = None  # lines so far whose `argmax` is another network than before
    expected_cost: _OptionalFloat = None
    """Expected cost of the blocks under pi, as a share of the reference's cost."""
    expected_latency_ms: _OptionalFloat = None


class PiRecord(Record):
    """One line of `pi.jsonl`."""

    step: _Count
    tau: Annotated[float, Strict(), Field(allow_inf_nan=False)]
    pi: list[list[_Probability]]  # [blocks, candidates]
    arch: str | None = None  # the architecture that derive would select


# summary.json


class SplitLoss(Record):
    """The loss of a network on one split, and the numbers of tokens, words and bytes of the split."""

    loss: _Float = math.nan  # nats per token
    ppl: _Float = math.nan  # perplexity per token
    word_ppl: _Float = math.nan  # perplexity per whitespace word, line ends included
    bits_per_byte: _Float = math.nan
    nats: _OptionalFloat = None  # sum over all tokens
    tokens: _Count | None = None
    words: _Count | None = None  # words and line ends
    bytes: _Count | None = None


class BestValidation(Record):
    """The validation with the lowest loss."""

    step: _Count
    loss: _Float


class InheritedWeights(Record):
    """The search or retraining from whose weights a retraining started."""

    run: str  # the run folder
    steps: _Count  # steps that trained these weights, those that the run itself inherited included
    seconds: _Float  # of the whole run, and of those from which it inherited
    sha256: str  # of the file of weights


class RunSummary(Record):
    """The content of `summary.json`, which a run writes when it finishes."""

    kind: Kind
    arch: str
    steps: _Count
    seconds: _Float
    inherited: InheritedWeights | None = None  # `None`: trained from scratch
    parameters: _Count
    parameters_without_embeddings: _Count | None = None
    best: BestValidation | None = None
    skipped_steps: _Count = 0
    """Steps that did not update the weights, or alpha, because a loss or gradient was not finite."""
    valid: SplitLoss  # loss of the trained network; for a search equal to `mixture` or `argmax`, by estimator
    mixture: SplitLoss | None = None  # in a search: the SuperNet weighted by pi
    argmax: SplitLoss | None = None
    """In a search: the architecture that derive would select, with the shared weights."""


# environment.json


class Environment(Record):
    """The content of `environment.json`: which command made a run, with which software, and on which device."""

    kind: Kind
    command_line: list[str] = []
    python: str | None = None
    platform: str | None = None
    cores: _Count | None = None
    versions: dict[str, str | None] = {}
    git_commit: str | None = None
    device: str | None = None
    device_name: str | None = None
    precision: str | None = None
    threads: _Count | None = None


# arch.yaml


class CostRecord(Record):
    """Predicted cost of an architecture's blocks."""

    metric: str  # latency, macs, parameters or cache
    unit: str
    blocks: _Float  # cost of the architecture
    interleaved: _Float  # cost of the interleaved network of the same depth
    parent: _OptionalFloat = None  # of a search in a trained network
    share: _Float  # `blocks` over `parent`, or over `interleaved` without a parent
    target: _OptionalFloat = None  # largest share allowed


class BlockRecord(Record):
    """The layer selected for a block, and the probabilities of the block's candidates."""

    layer: str
    pi: dict[str, _Float] = {}
    entropy: _OptionalFloat = None  # nats
    margin: _OptionalFloat = None  # probability of the layer minus the highest probability of another candidate
    cost: _OptionalFloat = None  # predicted cost of the layer, in the unit of the network's cost


class RankedRecord(Record):
    """A network in the ranking of `arch.yaml`, which lists the re-ranked networks, then further probable ones."""

    arch: str
    probability: _OptionalFloat = None
    behind: _OptionalFloat = None  # log-probability of the most probable architecture minus that of this one, nats
    cost: _OptionalFloat = None  # share of the reference's cost
    loss: _OptionalFloat = None  # held-out loss with the shared weights, in nats per token, if it was re-ranked
    score: _OptionalFloat = None  # of re-ranking: loss minus a weight times the log-probability, in nats per token


class DerivationRecord(Record):
    """The content of `arch.yaml`; a file written by a person may hold `arch` alone."""

    arch: str
    method: str | None = None
    constraints: dict[str, Any] | None = None
    """The options that derive was given; without an option, the search's configuration applies."""
    run: str | None = None
    step: _Count | None = None
    counts: dict[str, _Count] = {}  # number of blocks by layer
    parameters: _Count | None = None
    cost: CostRecord | _Float | None = None  # a black-box search writes the cost of the blocks as a number
    further_costs: list[CostRecord] = []  # in the further metrics of `derive --within`
    blocks: list[BlockRecord] = []
    ranking: list[RankedRecord] = []  # best first: the derived network is the first
    warnings: list[str] = []
    finalists: list[str] = []  # architectures compared by short trainings, the derived one first


# rerank.json


class RerankedNetwork(Record):
    """An architecture and its held-out loss with the shared weights."""

    arch: str
    loss: _Float  # nats per token


class RerankRecord(Record):
    """The content of `rerank.json`: the networks of the best scores when alpha was frozen, with held-out losses."""

    step: _Count
    networks: list[RerankedNetwork]


# tuned_eval.json


class EvalTrialRecord(Record):
    """The loss of a run under one evaluation protocol with one choice of its settings."""

    evaluation: str  # name of the protocol
    settings: str = ""  # its settings as text
    loss: _Float  # nats per token
    ppl: _Float  # perplexity per token


class ChosenTrialRecord(EvalTrialRecord):
    """The best `tune-eval` trial of a protocol, with its settings of dynamic evaluation and of the cache."""

    dynamic: DynamicConfig | None = None
    cache: CacheConfig | None = None


class TunedEvalRecord(Record):
    """The content of `tuned_eval.json`: the best settings of dynamic evaluation and the cache for each protocol."""

    arch: str
    step: _Count  # training steps of the weights
    tgt_len: _Count
    mem_len: _Count
    cmem_len: _Count = 0
    clamp_len: _Count | None = None
    same_length: bool = False
    pointer_len: _Count = 0
    split: str
    tokens: _Count
    plain: EvalTrialRecord
    chosen: dict[str, ChosenTrialRecord] = Field(min_length=1)
    trials: list[EvalTrialRecord]
    notes: list[str] = []


# probe.json


class ChangeRecord(Record):
    """What a network loses relative to the unchanged model, in nats per token."""

    loss: _Float  # rise of the loss
    kl: _Float  # KL divergence of the next-token distribution from that of the unchanged model


class PairRecord(Record):
    """Two layers that were left out together."""

    layers: tuple[_Count, _Count]  # their numbers, from 1
    both: ChangeRecord
    predicted: ChangeRecord  # the sum of both, each left out alone


class FoundNetworkRecord(Record):
    """A network with some layers replaced, without training."""

    layers: str  # an architecture with a layer, or identity, for each layer of the model
    kl: _Float
    rise: _Float  # of the loss, nats per token
    predicted_kl: _Float  # sums over the replaced layers
    predicted_rise: _Float
    latency: _Float  # of the layers, as a share of the model's
    speed: _Float  # of the whole model, relative to the unchanged one


class ProbeConditions(Record):
    """On which text and machine a probe was made."""

    model: str  # folder of the model
    text: str | None = None  # as given: a file or a corpus; `None`: the text of the run
    source: str  # of the text, in words
    requested_tokens: _Count
    device_name: str
    precision: str
    seconds: _Float  # of the whole probe


class ProbeRecord(Record):
    """The content of `probe.json`."""

    answer: str  # which layers need attention, in a sentence
    network: str  # the network of this sentence; the model itself if all of its attention layers are needed
    loss: _Float  # of the unchanged model, nats per token
    tokens: _Count  # that were scored
    layers: list[str]
    changes: list[dict[str, ChangeRecord]]  # for each layer, by the name of its replacement
    pairs: list[PairRecord] = []
    milliseconds: dict[str, _Float] = {}
    attention: list[FoundNetworkRecord] = []  # networks with ever fewer attention layers, all other layers kept
    front: list[FoundNetworkRecord] = []  # the best network within each share of the latency
    conditions: ProbeConditions | None = None


# comparison.json


class ComparisonRow(Record):
    """A row of the table of `parnas evaluate`: the results of a run under one evaluation protocol."""

    run: str
    network: str = ""  # `discrete`, `SuperNet`, or `derived, in SuperNet`
    arch: str
    evaluation: str = "plain"
    settings: str = ""  # settings of the evaluation protocol
    parameters: _Count | None = None
    without_embeddings: _Count | None = None
    multiply_adds_per_token: _Count | None = None
    tgt_len: _Count | None = None
    mem_len: _Count | None = None
    cmem_len: _Count | None = None
    pointer_len: _Count | None = None
    precision: str | None = None
    ppl: _OptionalFloat = None
    word_ppl: _OptionalFloat = None
    bits_per_byte: _OptionalFloat = None
    tokens: _Count | None = None
    words: _Count | None = None
    bytes: _Count | None = None
    train_tokens_per_s: _OptionalFloat = None
    weights: str = ""  # how the network was trained; see `describe_weights`
    steps: _Count | None = None
    epochs: _OptionalFloat = None
    train_seconds: _OptionalFloat = None
    inherited_steps: _Count | None = None  # steps that trained the weights from which the training started
    total_seconds: _OptionalFloat = None  # of the training and of the steps before
    latency_ms: _OptionalFloat = None  # median time of a segment, with one row
    latency_p95_ms: _OptionalFloat = None
    split: str | None = None
    folder: str | None = None  # run folder, relative to the folder of the comparison
    conditions: dict[str, Any] | None = None  # the options that evaluate was given

    @classmethod
    def integers(cls) -> set[str]:
        """Return the names of the columns of integers."""
        return {name for name, field in cls.model_fields.items() if field.annotation == _Count | None}


def parse_rows(content: object, source: str, hint: str = "run parnas evaluate again") -> list[ComparisonRow]:
    """Return the rows of a `comparison.json`; raise `ParnasError` with `source` and `hint` if one is not valid."""
    if not isinstance(content, list) or not content:
        raise ParnasError(f"{source} is not a list of rows of a comparison; {hint}.")
    return [ComparisonRow.parse(row, f"{source}, row {number},", hint) for number, row in enumerate(content, 1)]
