"""Exporting a model to a directory that a device loads as it is; reading what such directories say of themselves."""

from neuronserve.neuron_worker.exported import ExportSettings, read_settings

__all__ = ["ExportSettings", "read_settings"]
