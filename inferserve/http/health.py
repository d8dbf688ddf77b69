"""Probes. Live: this event loop turns. Ready: every process is up and no drain has begun. Neither starts any work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from inferserve.http import problems
from inferserve.http.serving import Serving


def routes(serving: Serving) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["operations"])

    @router.api_route("/liveness", methods=["GET", "POST"], operation_id="liveness")
    async def liveness() -> Response:
        """200 while the process answers at all."""
        return JSONResponse({"status": "ok"})

    @router.api_route("/readiness", methods=["GET", "POST"], operation_id="readiness")
    @router.api_route("/health", methods=["GET", "HEAD"], operation_id="health")
    @router.api_route("/healthz", methods=["GET", "HEAD"], operation_id="healthz")
    async def readiness() -> Response:
        """200 while requests are taken, else 503 with Retry-After."""
        refusal = serving.refusal()
        return JSONResponse({"status": "ok"}) if refusal is None else problems.response(refusal)

    return router
