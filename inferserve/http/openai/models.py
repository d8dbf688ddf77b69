"""GET /v1/models and /v1/models/{id}: the names under which the one model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from inferserve.http.service import GenerationService, Limits


def model_object(name: str, limits: Limits, owner: str, created: int) -> dict[str, Any]:
    """One entry; `max_model_len` is vLLM's addition, which clients read."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": owner,
        "root": limits.model,
        "parent": None,
        "max_model_len": limits.context,
    }


def routes(service: GenerationService, owner: str, created: int) -> APIRouter:
    """The routes.

    Args:
        owner: `owned_by`.
        created: seconds of the epoch at which this process began.
    """
    router = APIRouter(tags=["openai"])

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """All models."""
        limits = service.limits
        return {"object": "list", "data": [model_object(n, limits, owner, created) for n in limits.model_names]}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        """One model; 404 with code model_not_found for a name that is not served."""
        service.limits.check_model(model_id)
        return model_object(model_id, service.limits, owner, created)

    return router
