"""Export of networks: weights, programs and layer shapes for other libraries (docs/export.md)."""

from parnas.export.decoder import build_decoder
from parnas.export.export import TARGETS, ExportResult, export_run
from parnas.export.folder import ExportedNetwork, load_exported

__all__ = ["TARGETS", "ExportResult", "ExportedNetwork", "build_decoder", "export_run", "load_exported"]
