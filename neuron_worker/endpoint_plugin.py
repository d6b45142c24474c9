"""Switches our HTTP routes on. vLLM loads an endpoint plugin only when VLLM_PLUGINS names it, and then loads nothing
else that is not named: so the variable gets everything that would have been loaded without it, and ours.

Whether the routes are really mounted is the option `tgi`'s affair; by the time this runs it has not been read.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.metadata import entry_points

VARIABLE = "VLLM_PLUGINS"
NAMES = ("neuronserve_tgi", "neuronserve_metrics")
GROUPS = ("general", "io_processor", "platform", "stat_logger")
"""Groups whose plugins vLLM loads unasked."""


def switch_on(environ: MutableMapping[str, str]) -> None:
    given = environ.get(VARIABLE)
    names = _all_names() if given is None else [name for name in given.split(",") if name]
    environ[VARIABLE] = ",".join(dict.fromkeys([*names, *NAMES]))


def _all_names() -> list[str]:
    found = (point.name for group in GROUPS for point in entry_points(group=f"vllm.{group}_plugins"))
    return list(dict.fromkeys(found))
