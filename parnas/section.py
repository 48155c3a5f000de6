"""What every section of the configuration is."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator


class Mistake(NamedTuple):
    """One wrong setting: its dotted key, and a sentence with what was given and what is allowed."""

    key: str
    problem: str


class Mistaken(ValueError):
    """What is wrong with a section; pydantic hands it on in the context of its own error."""

    def __init__(self, found: Sequence[Mistake]) -> None:
        super().__init__("; ".join(map(str, found)))
        self.found = found


class Section(BaseModel):
    """Base of every section: frozen, typed strictly, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def mistakes(self) -> Iterator[Mistake]:
        """Mistakes that no single field can show."""
        return iter(())

    @model_validator(mode="after")
    def _refuse_mistakes(self) -> Self:
        too_large = [
            Mistake(key, f"is {value!r:.40}; give a number of at most 2^63 - 1")
            for key, value in self
            if _is_huge(value)
        ]
        if found := too_large or list(self.mistakes()):
            raise Mistaken(found)
        return self


def _is_huge(value: object) -> bool:
    """Whether a number is none that floats, numpy and torch can take."""
    return isinstance(value, int) and value >= 2**63
