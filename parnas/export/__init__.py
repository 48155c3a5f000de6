"""Networks taken elsewhere: weights, programs and shapes for other libraries (docs/export.md)."""

from parnas.export.decoder import build_decoder
from parnas.export.export import TARGETS, Export, export_run
from parnas.export.folder import Exported, load_exported

__all__ = ["TARGETS", "Export", "Exported", "build_decoder", "export_run", "load_exported"]
