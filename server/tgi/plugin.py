"""vLLM's way in: the endpoint plugin that puts TGI's routes on the OpenAI server's port."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import State

from neuronserve.neuron_worker.config import user_options
from neuronserve.neuron_worker.options import tgi_option

from . import routes, service
from .settings import TgiSettings

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


class TgiPlugin:
    name = "neuronserve_tgi"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        settings = settings_of(app.state.args)
        if settings is None:
            return
        app.include_router(routes.router)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        settings = settings_of(args)
        if settings is not None and engine_client is not None:
            state.tgi = service.make(engine_client, settings, args, os.environ)


def settings_of(args: Namespace) -> TgiSettings | None:
    """None: the routes are off."""
    option = tgi_option(user_options(args.additional_config or {}), os.environ)
    return None if option is None else TgiSettings.from_mapping(option)
