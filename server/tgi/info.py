"""What /info says: the model and the limits."""

from __future__ import annotations

import importlib.metadata

from .schemas import Info
from .settings import TgiSettings
from .validation import Limits

ROUTER = "text-generation-router"
PROTOCOL = "3.3.6-dev0"
"""The router whose protocol this is; clients read it as TGI's version. Ours is in `docker_label`, and behind it the
device, where the label of TGI's own images names their platform."""


def info(settings: TgiSettings, limits: Limits, device: str) -> Info:
    return Info(
        model_id=settings.model_id or "",
        model_sha=settings.model_sha,
        model_pipeline_tag=settings.model_pipeline_tag,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=settings.validation_workers,
        max_client_batch_size=settings.max_client_batch_size,
        router=ROUTER,
        version=PROTOCOL,
        sha=None,
        docker_label=f"neuronserve-{importlib.metadata.version('neuronserve')}-{device}",
    )
