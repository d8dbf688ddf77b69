"""One codec for every link: msgpack through msgspec. Decoding checks types and refuses unknown tags."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from inferserve.errors import BadMessage

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 2**20


class Codec(Generic[T]):
    """Encode and decode one union.

    Args:
        union: the receiver's union alias from `messages.py`.
    """

    def __init__(self, union: object) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(union).decode

    def encode(self, message: T) -> bytes:
        """The frame for `message`."""
        return self._encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
        """The message in `frame`; raises BadMessage for anything else."""
        if len(frame) > MAX_FRAME_BYTES:
            raise BadMessage(f"frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
        try:
            return self._decode(frame)
        except msgspec.MsgspecError as error:
            raise BadMessage(str(error)) from error
