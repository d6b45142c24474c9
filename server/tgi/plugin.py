"""vLLM's way in: the endpoint plugin that puts TGI's routes on the OpenAI server's port."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import State

from neuronserve.neuron_worker.config import user_options
from neuronserve.neuron_worker.options import tgi_option

from . import auth, errors, openai_exchange, openai_limits, openai_requests, other_routes, routes, service
from .openai_compat import OpenAiCompat, Rules
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
        routes.mount(app)
        app.add_exception_handler(errors.TgiError, errors.handler)
        _allow_origins(app.state.args, settings)
        app.add_middleware(OpenAiCompat, rules_of=_rules)
        if settings.any_model_name:
            app.add_middleware(other_routes.OtherRoutes, rules_of=_rules)
        if keys := auth.keys(app.state.args.api_key, os.environ):
            app.add_middleware(auth.ApiKey, keys=keys)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        settings = settings_of(args)
        if settings is not None and engine_client is not None:
            state.tgi = service.make(engine_client, settings, args, os.environ)
            openai_requests.watch(engine_client, state.tgi.recorder)
            if settings.any_model_name:
                openai_limits.hold(state, state.tgi.limits)
                other_routes.hold(state, state.tgi.limits)
                openai_exchange.follow(state)


def _allow_origins(args: Namespace, settings: TgiSettings) -> None:
    """vLLM adds its middleware after this, from the same arguments. Its own default is no origin, TGI's is any."""
    if settings.cors_allow_origin:
        args.allowed_origins = list(settings.cors_allow_origin)
    elif settings.any_model_name and not args.allowed_origins:
        args.allowed_origins = ["*"]


def _rules(app: FastAPI) -> tuple[Rules, int]:
    """What the OpenAI routes accept here, and how long a body."""
    tgi: service.TgiService = app.state.tgi
    settings = tgi.settings
    names = tuple(model.name for model in app.state.openai_serving_models.base_model_paths)
    rules = Rules(names, tgi.limits, tgi.recorder)
    if not settings.any_model_name:
        return rules, sys.maxsize
    rules = dataclasses.replace(
        rules,
        as_launcher=True,
        max_client_batch_size=settings.max_client_batch_size,
        admission=tgi.admission,
        compute_type=tgi.compute_type,
        template_shows_tools=tgi.template_shows_tools,
    )
    return rules, settings.payload_limit


def settings_of(args: Namespace) -> TgiSettings | None:
    """None: the routes are off."""
    option = tgi_option(user_options(args.additional_config or {}), os.environ)
    return None if option is None else TgiSettings.from_mapping(option)
