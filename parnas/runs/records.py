"""The files of a run folder as typed records: what each holds, in which unit, and what older files may lack.

JSON has no infinity and no "not a number": both are written as null and read as `nan`. `None` means that a file has no
such value. Values that a record does not declare are kept, so that files of other versions still load.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from parnas.errors import ParnasError

Kind = Literal["search", "retrain"]
Split = Literal["train", "valid"]


def _null_to_nan(value: object) -> object:
    return math.nan if value is None else value


Number = Annotated[float, Strict(), BeforeValidator(_null_to_nan)]
"""A number, `nan` where the file has null."""
OptionalNumber = Annotated[Annotated[float, Strict()] | None, BeforeValidator(_null_to_nan)]
"""A number, `nan` where the file has null, and `None` where it has nothing."""
Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]


class Record(BaseModel):
    """Base of the records: frozen, and open to values of other versions."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @classmethod
    def parse(cls, content: object, source: str, hint: str = "restore it") -> Self:
        """Check what a file holds; raises `ParnasError` naming `source` and the first wrong key."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "object"
            raise ParnasError(f"{source} has no valid {key:.80} ({first['msg']}); {hint}.") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the given values under the names that they have in the file."""
        return self.model_dump(exclude_unset=True)


# metrics.jsonl and pi.jsonl


class MetricsRecord(Record):
    """One line of `metrics.jsonl`: a mean over the training steps since the last line, or one validation."""

    step: Count
    split: Split
    loss: Number = math.nan
    """Nats per token."""
    ppl: Number = math.nan
    """Perplexity per token."""
    word_ppl: OptionalNumber = None
    bits_per_byte: OptionalNumber = None
    compression_loss: OptionalNumber = None
    """Auxiliary loss of compressed memory."""
    lr: OptionalNumber = None
    tau: OptionalNumber = None
    """Temperature of a search."""
    gradient_norm: OptionalNumber = None
    """Largest of the steps, before clipping."""
    tokens_per_s: OptionalNumber = None
    step_ms: OptionalNumber = None
    processes: Count | None = None
    """Processes of a distributed training; `None` for one."""
    # Validation of a search: the SuperNet weighted by pi, and the network that derive would return.
    mixture_loss: OptionalNumber = None
    mixture_ppl: OptionalNumber = None
    argmax_loss: OptionalNumber = None
    argmax_ppl: OptionalNumber = None
    gap: OptionalNumber = None
    """Mixture loss minus argmax loss, in nats per token."""
    # State of a search at a line of training.
    entropy: OptionalNumber = None
    """Entropy of pi in nats, mean over the blocks."""
    identity_share: OptionalNumber = None
    """Probability of identity, mean over the blocks."""
    argmax: str | None = None
    """The architecture that derive would return."""
    argmax_changes: Count | None = None
    """Lines so far whose architecture differs from that of the line before."""
    expected_cost: OptionalNumber = None
    """Expected cost of the blocks under pi, as a share of the interleaved network's."""
    expected_latency_ms: OptionalNumber = None


class PiRecord(Record):
    """One line of `pi.jsonl`."""

    step: Count
    tau: Annotated[float, Strict()]
    pi: list[list[Annotated[float, Strict()]]]
    """Probabilities [blocks, candidates]."""
    arch: str | None = None
    """The architecture that derive would return."""


# summary.json


class SplitLoss(Record):
    """Loss of a network on one split, in the measures of the field, and the counts that these divide by."""

    loss: Number = math.nan
    """Nats per token."""
    ppl: Number = math.nan
    """Perplexity per token."""
    word_ppl: Number = math.nan
    """Perplexity per whitespace word, line ends included."""
    bits_per_byte: Number = math.nan
    nats: OptionalNumber = None
    """Sum over all tokens."""
    tokens: Count | None = None
    words: Count | None = None
    """Words and line ends."""
    bytes: Count | None = None


class BestValidation(Record):
    """The validation with the least loss."""

    step: Count
    loss: Number


class RunSummary(Record):
    """The content of `summary.json`, which a finished run has."""

    kind: Kind
    arch: str
    steps: Count
    seconds: Number
    parameters: Count
    parameters_without_embeddings: Count | None = None
    best: BestValidation | None = None
    skipped_steps: Count = 0
    """Steps that were skipped because a loss or gradient was not finite; if only alpha's, the weights were updated."""
    valid: SplitLoss
    """Validation loss of the run's own network; of a search `mixture` or `argmax`, by its estimator."""
    mixture: SplitLoss | None = None
    """Of a search: the SuperNet weighted by pi."""
    argmax: SplitLoss | None = None
    """Of a search: the architecture that derive would return, with the SuperNet's weights."""


# environment.json


class Environment(Record):
    """The content of `environment.json`: which command made a run, with which software, and on which device."""

    kind: Kind
    command_line: list[str] = []
    python: str | None = None
    platform: str | None = None
    cores: Count | None = None
    versions: dict[str, str | None] = {}
    git_commit: str | None = None
    device: str | None = None
    device_name: str | None = None
    precision: str | None = None
    threads: Count | None = None


# arch.yaml


class CostRecord(Record):
    """Predicted cost of an architecture's blocks."""

    metric: str
    unit: str
    blocks: Number
    interleaved: Number
    """The same of the interleaved network of that depth."""
    share: Number
    """`blocks` over `interleaved`."""
    target: OptionalNumber = None
    """Largest share allowed."""


class BlockRecord(Record):
    """Probabilities of a block's candidates, and the layer chosen."""

    layer: str
    pi: dict[str, Number] = {}
    entropy: OptionalNumber = None
    """Nats."""
    margin: OptionalNumber = None
    """Probability of the layer minus that of the best other candidate."""


class RankedRecord(Record):
    """One of the most probable architectures."""

    arch: str
    probability: OptionalNumber = None
    behind: OptionalNumber = None
    """Nats of log probability behind the most probable one."""
    cost: OptionalNumber = None
    """Share of the interleaved network's cost."""
    loss: OptionalNumber = None
    """Held-out loss with the SuperNet's weights in nats per token, where it was re-ranked."""
    estimate: OptionalNumber = None
    """The score that it was re-ranked by."""


class DerivationRecord(Record):
    """The content of `arch.yaml`; a file written by a person may hold `arch` alone."""

    arch: str
    method: str | None = None
    constraints: dict[str, Any] | None = None
    """The options of derive that were given, without those left to the search's configuration."""
    run: str | None = None
    step: Count | None = None
    counts: dict[str, Count] = {}
    """Blocks of each layer."""
    parameters: Count | None = None
    cost: CostRecord | Number | None = None
    """Of a black-box search the cost of the blocks alone."""
    blocks: list[BlockRecord] = []
    ranking: list[RankedRecord] = []
    """The most probable architectures, the derived one first."""
    warnings: list[str] = []
    finalists: list[str] = []
    """The architectures among which short trainings chose, the derived one first."""


# rerank.json


class RerankedNetwork(Record):
    """An architecture and its held-out loss with the SuperNet's weights, in nats per token."""

    arch: str
    loss: Number


class RerankRecord(Record):
    """The content of `rerank.json`: the most probable architectures at the step at which alpha is frozen."""

    step: Count
    networks: list[RerankedNetwork]


# comparison.json


class ComparisonRow(Record):
    """One row of the table of evaluate: a run, by one evaluation protocol."""

    run: str
    network: str = ""
    """`discrete`, `SuperNet`, or `derived, in SuperNet`."""
    arch: str
    evaluation: str = "plain"
    settings: str = ""
    """Settings of the evaluation protocol."""
    parameters: Count | None = None
    without_embeddings: Count | None = None
    multiply_adds_per_token: Count | None = None
    tgt_len: Count | None = None
    mem_len: Count | None = None
    cmem_len: Count | None = None
    precision: str | None = None
    ppl: OptionalNumber = None
    word_ppl: OptionalNumber = None
    bits_per_byte: OptionalNumber = None
    tokens: Count | None = None
    words: Count | None = None
    bytes: Count | None = None
    train_tokens_per_s: OptionalNumber = None
    steps: Count | None = None
    epochs: OptionalNumber = None
    train_seconds: OptionalNumber = None
    latency_ms: OptionalNumber = None
    """Median per segment of one row."""
    latency_p95_ms: OptionalNumber = None
    split: str | None = None
    folder: str | None = None
    """Run folder, relative to that of the comparison."""
    conditions: dict[str, Any] | None = None
    """The options of evaluate that were given."""


def parse_rows(content: object, source: str, hint: str = "run parnas evaluate again") -> list[ComparisonRow]:
    """Check the rows of a `comparison.json`; raises `ParnasError` naming `source`."""
    if not isinstance(content, list) or not content:
        raise ParnasError(f"{source} has no rows of a comparison; {hint}.")
    return [ComparisonRow.parse(row, f"{source}, row {number},", hint) for number, row in enumerate(content, 1)]
