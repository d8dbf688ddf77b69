"""Every error inferserve raises on purpose.

InferServeError
├── ConfigError                 bad flags, files or models at start-up; exit code 2
├── RequestError(status)        the client's fault or a limit; becomes an OpenAI error body
│   ├── InvalidRequest    400
│   ├── TooLong           400  code context_length_exceeded
│   ├── NotFound          404
│   ├── Overloaded        429  carries Retry-After
│   ├── Unavailable       503  draining or not ready; carries Retry-After
│   └── RequestFailed     500  the engine ended this one request (NaN row, fault)
├── EngineError                 ends the engine process
│   ├── KvExhausted             one request alone does not fit
│   └── RankLost                another rank of the same model does not answer
├── TransportError
│   ├── BadMessage              a frame that does not decode
│   └── PeerGone                the other side of a channel does not take messages
└── ShmError
    ├── SegmentMissing
    └── LayoutMismatch
"""

from __future__ import annotations


class InferServeError(Exception):
    """Root of the tree."""


class ConfigError(InferServeError):
    """One or more configuration problems; `problems` names a flag or file in each line."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class RequestError(InferServeError):
    """A request that is refused or fails. `param` names the field, `code` is a stable machine-readable word."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """The body or a field of it is wrong."""


class TooLong(RequestError):
    """Prompt plus requested tokens exceed the context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NotFound(RequestError):
    """Unknown model or route."""

    status = 404
    kind = "not_found_error"


class Overloaded(RequestError):
    """A queue limit is reached; `retry_after` is seconds."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int = 1, code: str = "overloaded") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Unavailable(RequestError):
    """Draining, starting or a part of the service is away; `retry_after` is seconds."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(self, message: str, *, retry_after: int = 5, code: str = "service_unavailable") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class RequestFailed(RequestError):
    """The engine ended this request; others go on."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, code: str = "internal_error") -> None:
        super().__init__(message, code=code)


class EngineError(InferServeError):
    """The engine cannot go on."""


class KvExhausted(EngineError):
    """The KV pool cannot hold even one request."""


class RankLost(EngineError):
    """Another rank of the same model is gone or does not answer."""


class TransportError(InferServeError):
    """A channel failed."""


class BadMessage(TransportError):
    """A frame that does not decode as the link's union."""


class PeerGone(TransportError):
    """The peer does not take messages any more."""


class ShmError(InferServeError):
    """Shared memory is not what it should be."""


class SegmentMissing(ShmError):
    """A segment that the launcher should have passed is absent."""


class LayoutMismatch(ShmError):
    """A segment has another magic, version or size than the layout says."""
