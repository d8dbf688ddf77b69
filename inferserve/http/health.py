"""Probes. Live: this event loop turns. Ready: every process is up and no drain has begun. Neither starts any work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from inferserve.http import problems
from inferserve.http.serving import Serving


def routes(serving: Serving) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["operations"])

    @router.get("/liveness")
    @router.post("/liveness", include_in_schema=False)
    async def liveness() -> Response:
        """200 while the process answers at all."""
        return JSONResponse({"status": "ok"})

    @router.get("/readiness")
    @router.get("/health")
    @router.get("/healthz")
    @router.post("/readiness", include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.head("/healthz", include_in_schema=False)
    async def readiness() -> Response:
        """200 while requests are taken, else 503 with Retry-After."""
        refusal = serving.refusal()
        return JSONResponse({"status": "ok"}) if refusal is None else problems.response(refusal)

    return router
