"""parnas: where does a language model need attention, and where does a cheaper layer do as well?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parnas.api import adapt, derive, evaluate, load, pipeline, retrain, search, tune
    from parnas.config import Config
    from parnas.errors import ParnasError
    from parnas.evaluation.adapt import Grid
    from parnas.trained import TrainedRun
    from parnas.training.phases import LoadedRun

    __version__: str
else:
    import importlib

    _PLACES = {
        **dict.fromkeys(("adapt", "derive", "evaluate", "load", "pipeline", "retrain", "search", "tune"), "api"),
        "Config": "config",
        "Grid": "evaluation.adapt",
        "LoadedRun": "training.phases",
        "ParnasError": "errors",
        "TrainedRun": "trained",
    }

    def __getattr__(name):
        """Import torch only when the Python interface is used."""
        if name == "__version__":
            return importlib.import_module("parnas.run").package_version("parnas")
        if name not in _PLACES:
            raise AttributeError(f"module 'parnas' has no attribute {name!r}")
        return getattr(importlib.import_module(f"parnas.{_PLACES[name]}"), name)

    def __dir__():
        return sorted({*globals(), *_PLACES, "__version__"})


__all__ = [
    "Config",
    "Grid",
    "LoadedRun",
    "ParnasError",
    "TrainedRun",
    "__version__",
    "adapt",
    "derive",
    "evaluate",
    "load",
    "pipeline",
    "retrain",
    "search",
    "tune",
]
