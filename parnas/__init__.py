"""parnas: where does a language model need attention, and where does a cheaper layer do as well?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parnas.api import derive, draw, evaluate, load, pipeline, retrain, search, tune, tune_eval
    from parnas.config.loader import Config
    from parnas.errors import ParnasError
    from parnas.evaluation.tune_eval import Grid
    from parnas.runs.trained_run import TrainedRun
    from parnas.training.loaded_run import LoadedRun

    __version__: str
else:
    import importlib

    _PLACES = {
        **dict.fromkeys(
            ("derive", "draw", "evaluate", "load", "pipeline", "retrain", "search", "tune", "tune_eval"), "api"
        ),
        "Config": "config.loader",
        "Grid": "evaluation.tune_eval",
        "LoadedRun": "training.loaded_run",
        "ParnasError": "errors",
        "TrainedRun": "runs.trained_run",
    }

    def __getattr__(name):
        """Import torch only when the Python interface is used."""
        if name == "__version__":
            return importlib.import_module("parnas.runs.run").package_version("parnas")
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
    "derive",
    "draw",
    "evaluate",
    "load",
    "pipeline",
    "retrain",
    "search",
    "tune",
    "tune_eval",
]
