"""The section `evaluation` of the configuration: the split, the lengths, and ways of scoring besides the plain one."""

from typing import Literal

from pydantic import Field

from parnas.section import Section


class DynamicConfig(Section):
    lr: float | None = Field(
        None,
        ge=0,
        description="Learning rate after each segment; null: no dynamic evaluation. `parnas adapt` finds it.",
    )
    decay: float = Field(
        0.0, ge=0, le=1, description="Share of the way back to the trained weights that is gone after each segment."
    )
    update: Literal["rms", "sgd"] = Field(
        "rms",
        description="rms: gradients are divided by the root of their mean square in training, and weights with large "
        "ones decay faster (Krause et al., section 5); sgd: they are not.",
    )
    epsilon: float = Field(
        1.0,
        gt=0,
        description="Added to that root, for weights that training hardly moves, as those of rare tokens: a multiple "
        "of the roots' mean, so that it means the same in any network.",
    )
    batches: int = Field(100, ge=1, description="Training batches from which the mean squares are taken.")


class CacheConfig(Section):
    size: int | None = Field(None, ge=1, description="Positions that the cache holds; null: no cache.")
    theta: float = Field(
        0.1, ge=0, description="How much alike two hidden states must be; 0: all positions count alike."
    )
    weight: float = Field(0.1, ge=0, lt=1, description="Of the cache's probability; the network has the rest.")


class EvaluationConfig(Section):
    split: Literal["train", "valid", "test"] = Field("valid", description="Split that evaluate reads.")
    tgt_len: int | None = Field(None, ge=1, description="Tokens of a segment; null: as trained.")
    mem_len: int | None = Field(None, ge=0, description="Positions of memory; null: as trained.")
    cmem_len: int | None = Field(None, ge=0, description="Positions of compressed memory; null: as trained.")
    clamp_len: int | None = Field(None, ge=1, description="Larger distances count as this one; null: as trained.")
    same_length: bool | None = Field(None, description="Whether every query sees equally far back; null: as trained.")
    batch_size: int = Field(32, ge=1, description="Rows read side by side; changes the speed, not the result.")
    stride: int | None = Field(
        None,
        ge=1,
        description="Sliding evaluation besides the plain one: so many last tokens of each segment are scored, and "
        "those before them read again; divides the segment. null: none.",
    )
    dynamic: DynamicConfig = Field(
        default=DynamicConfig(),
        description="Dynamic evaluation besides the plain one: weights learn from what was scored (Krause et al. 2018, "
        "arXiv 1709.07432).",
    )
    cache: CacheConfig = Field(
        default=CacheConfig(),
        description="A continuous cache besides the plain evaluation: tokens that followed hidden states like this one "
        "become more probable (Grave et al. 2017, arXiv 1612.04426).",
    )
