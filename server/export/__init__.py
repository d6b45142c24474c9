"""Exporting a model to a directory that a device loads as it is, and serving such directories, ours and others'."""

from neuronserve.neuron_worker.exported import ExportSettings, read_settings

__all__ = ["ExportSettings", "read_settings"]
