"""`create_app`: the ASGI application over a `GenerationService`. No globals: two apps can live in one process."""

from __future__ import annotations

import time
from functools import cache

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from inferserve.config.schema import ServerConfig
from inferserve.http import health, metrics_route, native, openapi, problems
from inferserve.http.edge import Edge
from inferserve.http.openai import chat, completions, models
from inferserve.http.service import GenerationService

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"})


def create_app(service: GenerationService, config: ServerConfig) -> ASGIApp:
    """All routes on `service`."""
    app = FastAPI(
        title="inferserve",
        description="OpenAI-compatible and native generation routes.",
        redirect_slashes=False,
    )
    problems.install(app)
    routers = (
        chat.routes(service),
        completions.routes(service),
        models.routes(service, config.model.model_owner, int(time.time())),
        native.routes(service),
        health.routes(service.serving),
        metrics_route.routes(service),
    )
    for router in routers:
        app.include_router(router)
    generation = {
        route.path: route.endpoint
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and route.path in GENERATION_PATHS
    }
    app.openapi = cache(lambda: openapi.document(app))  # type: ignore[method-assign]
    return Edge(app, generation, service, config.http.max_body_bytes)
