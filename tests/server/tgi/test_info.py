"""What /info says of the server behind the protocol."""

from __future__ import annotations

from importlib.metadata import version

from neuronserve.server.tgi.info import info
from neuronserve.server.tgi.settings import TgiSettings
from neuronserve.server.tgi.validation import Limits


def test_the_label_names_our_version_and_the_device() -> None:
    settings = TgiSettings().deduced(model_id="m", max_model_len=64)

    found = info(settings, Limits.of(settings), "transformers-neuronx")

    assert found.docker_label == f"neuronserve-{version('neuronserve')}-transformers-neuronx"
    assert found.version == "3.3.6-dev0"  # TGI's, whatever ours is
