"""Columns of the slot table, each with its ONE writer. A request is a row; `n` siblings are `n` rows.

Publish order: a column is read only after a message announced it. The engine writes token ids and logprobs, then
`visible`, then reports. A row belongs to the http worker in whose range it lies; that worker alone moves it from free
to used and back, and only when every stage that could hold it has written `*_done == generation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

MAGIC = 0x1F5E_5E7E
VERSION = 1
PARAMS_BYTES = 64 * 1024


class Writer(StrEnum):
    """Who may write a column."""

    HTTP = "http"
    ROUTER = "router"
    ENGINE = "engine"
    DETOKENIZE = "detokenize"


@dataclass(frozen=True)
class Column:
    """One column: `stride` elements of `dtype` a row."""

    name: str
    dtype: str
    writer: Writer
    stride: int = 1
    about: str = ""


def columns(max_req_total_len: int) -> tuple[Column, ...]:
    """The table for a context of `max_req_total_len` tokens."""
    http, router, engine, detok = Writer.HTTP, Writer.ROUTER, Writer.ENGINE, Writer.DETOKENIZE
    return (
        Column("generation", "uint32", http, about="rises each time the row is taken; 0 = never used"),
        Column("in_use", "uint8", http, about="1 from allocation to reclaim"),
        Column("cancelled", "uint8", http, about="1 = nobody waits for it any more; set before Abort is sent"),
        Column("delivered_tokens", "int32", http, about="output tokens whose text reached the client's stream"),
        Column("prompt_len", "int32", http),
        Column("max_tokens", "int32", http, about="output limit, also in params; here for the router"),
        Column("ignore_eos", "uint8", http, about="here for the router's estimate"),
        Column("arrival_ns", "int64", http, about="CLOCK_MONOTONIC at arrival of the request"),
        Column("params_len", "int32", http),
        Column("params", "uint8", http, stride=PARAMS_BYTES, about="msgpack SamplingParams"),
        Column("prompt_ids", "int32", http, stride=max_req_total_len),
        Column("router_done", "uint32", router, about="generation the router has forgotten"),
        Column("admitted", "uint32", router, about="generation that was sent to the engine; else it never ran"),
        Column("admit_ns", "int64", router, about="CLOCK_MONOTONIC when admitted"),
        Column("engine_done", "uint32", engine, about="generation the engine has forgotten"),
        Column("visible", "int32", engine, about="output tokens readable; written last"),
        Column("cached_tokens", "int32", engine, about="prompt tokens taken from the prefix cache at first admission"),
        Column("prefill_start_ns", "int64", engine),
        Column("first_token_ns", "int64", engine, about="CLOCK_MONOTONIC at commit of the first token"),
        Column("last_token_ns", "int64", engine, about="CLOCK_MONOTONIC at commit of the newest token"),
        Column("preemptions", "int32", engine, about="times the row was paused for lack of KV"),
        Column("finish", "uint8", engine, about="messages.Finish; 0 while it runs"),
        Column("output_ids", "int32", engine, stride=max_req_total_len),
        Column("logprobs", "float32", engine, stride=max_req_total_len, about="of the chosen tokens; NaN if not asked"),
        Column("detok_done", "uint32", detok, about="generation the detokenizer has forgotten"),
    )


def element_bytes(column: Column) -> int:
    """Bytes of one row of `column`."""
    return int(np.dtype(column.dtype).itemsize) * column.stride
