"""parnas: where does a language model need attention, and where does a cheaper layer do as well?"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parnas.training.phases import LoadedRun, load

__all__ = ["LoadedRun", "load"]


def __getattr__(name: str) -> Any:
    """Import torch only when the Python interface is used."""
    if name in __all__:
        from parnas.training import phases

        return getattr(phases, name)
    raise AttributeError(f"module 'parnas' has no attribute {name!r}")
