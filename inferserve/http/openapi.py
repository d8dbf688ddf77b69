"""The OpenAPI document: FastAPI's, with the request bodies that our own decoder reads added to it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from inferserve.http.native import NativeBody, TokensBody
from inferserve.http.openai.schema import ChatBody, CompletionBody

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/generate": NativeBody,
    "/generate_stream": NativeBody,
    "/tokens": TokensBody,
}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    out = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    models = sorted(set(_BODIES.values()), key=lambda model: model.__name__)
    _, schemas = models_json_schema([(m, "validation") for m in models], ref_template=_REF)
    out.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for path, model in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
        for operation in out["paths"][path].values():
            operation["requestBody"] = {"required": True, "content": content}
    return out
