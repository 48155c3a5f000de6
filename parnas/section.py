"""What every section of the configuration is."""

from collections.abc import Iterator
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


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
