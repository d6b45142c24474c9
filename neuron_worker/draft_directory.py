"""What a draft's directory holds: a model of its own, or an EAGLE head in one of its two forms.

Its config.json says so, whatever the directory is called. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from pathlib import Path

from neuronserve.speculative.settings import DRAFT_MODEL, EAGLE, EAGLE3

from .device.errors import LoadError
from .device.graph.config_json import ConfigJson
from .device.graph.draft import form_of
from .errors import ConfigError

OTHERS = {
    "medusa_num_heads": "Medusa heads",
    "speculators_config": "a draft in the speculators format",
    "speculator": "a speculator",
    "n_predict": "an MLP speculator",
}
"""Keys of drafts that are not served, and what they are."""

METHODS = {"model": DRAFT_MODEL, "eagle": EAGLE, "eagle3": EAGLE3}
"""The device's name for a form -> vLLM's."""

SERVED = "a model with the same vocabulary, or an EAGLE head (is_eagle: true, or EAGLE-3's form), is"


def method_of(directory: str) -> str:
    """As vLLM calls it."""
    try:
        config = ConfigJson.in_directory(directory)
        if what := other_speculator(config):
            raise ConfigError(f"speculative_model={directory!r} is {what}, which is not supported; {SERVED}")
        return METHODS[form_of(config)]
    except LoadError as error:
        raise ConfigError(str(error)) from None


def other_speculator(config: ConfigJson) -> str | None:
    """What it is, where it drafts in a way that is not served."""
    return next((what for key, what in OTHERS.items() if config.get(key) is not None), None)


def refuse_as_target(directory: str) -> None:
    """Such a directory has no model in it that could answer by itself."""
    if not (Path(directory) / "config.json").is_file():
        return  # said better by whoever reads it
    config = ConfigJson.in_directory(directory)
    if what := other_speculator(config):
        raise ConfigError(
            f"{config.path} is that of {what}, which is not supported: serve the model that it was trained for; "
            "--speculative-model ngram (the launcher's --speculate) looks drafts up in the prompt"
        )
    if config.get("is_eagle") is True:
        raise ConfigError(
            f"{config.path} is that of an EAGLE head: serve the model that it was trained for, and give this directory "
            "as --speculative-model"
        )
