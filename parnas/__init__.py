"""parnas: where does a language model need attention, and where does a cheaper layer do as well?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parnas.api import (
        compress,
        derive,
        derive_front,
        draw,
        evaluate,
        import_model,
        load,
        pipeline,
        probe,
        retrain,
        search,
        tune,
        tune_eval,
    )
    from parnas.config.loader import Config
    from parnas.errors import ParnasError
    from parnas.evaluation.tune_eval import Grid
    from parnas.runs.trained_run import TrainedRun
    from parnas.training.loaded_run import LoadedRun

    __version__: str
else:
    import importlib

    _MODULES = {
        "Config": "config.loader",
        "Grid": "evaluation.tune_eval",
        "LoadedRun": "training.loaded_run",
        "ParnasError": "errors",
        "TrainedRun": "runs.trained_run",
    }

    def __getattr__(name):
        """Import the module of a public name on first use, so that `import parnas` does not import torch."""
        if name == "__version__":
            return importlib.import_module("parnas.runs.run").package_version("parnas")
        if name not in __all__:
            raise AttributeError(f"module 'parnas' has no attribute {name!r}")
        return getattr(importlib.import_module(f"parnas.{_MODULES.get(name, 'api')}"), name)

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = ["Config", "Grid", "LoadedRun", "ParnasError", "TrainedRun", "__version__"]
__all__ += ["compress", "derive", "derive_front", "draw", "evaluate", "import_model", "load"]  # in parnas.api
__all__ += ["pipeline", "probe", "retrain", "search", "tune", "tune_eval"]
