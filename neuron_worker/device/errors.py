"""The device side's error tree. Nothing here knows HTTP, vLLM or a request id.

DeviceError                what a device may raise; the runner turns it into failed requests
├── LoadError              the model cannot be loaded; the message names file, value and remedy
│   └── UnsupportedModel   architecture or feature not supported; the message lists what is
├── UncompiledShape        `run` got a shape that was never compiled, or `compile` came after `seal`
├── DoesNotFit             a length, a count or a size above a compiled or physical limit
└── DeviceLost             the device process died, hung or answered with garbage
"""

from __future__ import annotations


class DeviceError(Exception):
    """Anything a device refuses or fails at."""


class LoadError(DeviceError):
    """The checkpoint or its options cannot be loaded."""


class UnsupportedModel(LoadError):
    """The architecture, or a feature of it, is not supported."""


class UncompiledShape(DeviceError):
    """A shape was used that was not compiled before `seal`."""


class DoesNotFit(DeviceError):
    """A value is above what was compiled or what the device holds."""


class DeviceLost(DeviceError):
    """The device process is gone or no longer answers."""
