"""Every message between processes, grouped by receiver; one union alias a receiver.

All are msgspec structs, tagged, in msgpack (`codec.py`). Arrays of a whole step travel as raw little-endian bytes
(`int32`, `uint32`), because a step may name hundreds of slots. A handler is a `match` over the receiver's union.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class SlotRef(msgspec.Struct, frozen=True, array_like=True):
    """A slot as it was at one moment: a message whose generation is no longer the slot's is dropped."""

    index: int
    generation: int


class Finish(IntEnum):
    """Why a sequence ended. `NONE` while it runs."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


# --------------------------------------------------------------------------------------------------- to the router


class MediaRef(msgspec.Struct, frozen=True, array_like=True):
    """One media item of a prompt in the embed cache: content id, first placeholder position, token count."""

    uid: str
    start: int
    length: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """http → next stage: these slots are filled. `slots[0]` prefills; the others are its `n` siblings."""

    slots: tuple[SlotRef, ...]
    media: tuple[MediaRef, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """http → router: nobody waits for these any more. http set their `cancelled` column before sending this."""

    slots: tuple[SlotRef, ...]


class StopMatched(msgspec.Struct, frozen=True, tag="stop_matched"):
    """detokenize → router: a stop string is complete; nothing after it is wanted."""

    slots: tuple[SlotRef, ...]


class KvCounters(msgspec.Struct, frozen=True, array_like=True):
    """KV pool as the leader's ledger has it, in tokens, and row counts.

    `used` tokens belong to running rows (shared prefixes counted once), `cached` are evictable, `free` are neither;
    used + cached + free == total. `queued` rows were admitted, and their prompt has not begun.
    """

    total: int
    used: int
    cached: int
    free: int
    running: int
    paused: int
    queued: int = 0


class FinishedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that ended in this step. `stop_token` is the stop token id that ended it, -1 otherwise."""

    index: int
    generation: int
    finish: int
    stop_token: int = -1
    error: str = ""


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Alternatives at one output position: ids and logprobs, likeliest first. Travels only when asked for."""

    index: int
    generation: int
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """engine leader → router and detokenize, after a commit.

    `slots` (int32), `generations` (uint32) and `visible` (int32) are parallel raw arrays, one entry for each row that
    produced tokens in this step; `visible` is the row's output length now readable in its slot. `drafts` rows checked
    `draft_tokens` guesses; `accepted[i]` of the drafts were right up to their token i.
    """

    step: int
    slots: bytes
    generations: bytes
    visible: bytes
    kv: KvCounters
    finished: tuple[FinishedRow, ...] = ()
    tops: tuple[TopLogprobs, ...] = ()
    cached_digests: tuple[bytes, ...] = ()
    evicted_digests: tuple[bytes, ...] = ()
    preempted: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: tuple[int, ...] = ()


class EngineReady(msgspec.Struct, frozen=True, tag="engine_ready"):
    """engine leader → router: the engine serves; capacities known only after loading."""

    kv_tokens: int
    max_rows: int
    batch_max_tokens: int


class WorkerLost(msgspec.Struct, frozen=True, tag="worker_lost"):
    """launcher → router: an http worker died; every slot in [first, last) of its range is abandoned."""

    first: int
    last: int


RouterMessage = Submit | Abort | StopMatched | StepReport | EngineReady | WorkerLost


# --------------------------------------------------------------------------------------------------- to the engine


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Run this slot. `leader` is the slot index of the sibling whose prefill it shares, -1 for none."""

    index: int
    generation: int
    leader: int = -1


class Commands(msgspec.Struct, frozen=True, tag="commands"):
    """router → every engine rank. `seq` rises by one; a gap is an EngineFault."""

    seq: int
    admit: tuple[Admit, ...] = ()
    abort: tuple[SlotRef, ...] = ()
    stop: tuple[SlotRef, ...] = ()


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """engine leader → every other rank: it takes a row for this slot in the turn whose header comes next.

    With what it read there, raw `params` and `prompt` (int32): followers must not read the slot themselves, since when they get
    to it, it may already be somebody else's. A message for each, because together they may be very long.
    """

    index: int
    generation: int
    params: bytes
    prompt: bytes


class StepHeader(msgspec.Struct, frozen=True, tag="header"):
    """engine leader → every other rank, before it launches: all that its turn depends on besides the router's commands.

    `commands_upto` is the last command that the turn starts with, -1 for none so far. `prefill_budget` are prompt tokens
    beside decode rows (-1: no limit but the fixed ones) and `draft_budget` draft tokens of a row. `refused` are rows that
    the leader could not start. `digest` is the state before the turn, empty when it is not to be compared.
    """

    turn: int
    commands_upto: int
    prefill_budget: int = -1
    draft_budget: int = 0
    refused: tuple[int, ...] = ()
    digest: bytes = b""


EngineMessage = Commands | Admitted | StepHeader


# --------------------------------------------------------------------------------------------- to the detokenizer

DetokMessage = StepReport


# ------------------------------------------------------------------------------------------------------- to http


class TextItem(msgspec.Struct, frozen=True, array_like=True):
    """New text of one slot: output tokens [from_token, to_token) and the text they completed (may be empty).

    `finish` is a `Finish`; when not NONE this is the slot's last item and `stop_reason` names the stop string or the
    stop token id that matched, if one did. `tops` has one entry per token when logprob alternatives were asked for.
    Tokens up to `to_token` of the last item count as completion tokens, also where a stop string cut their text.
    """

    index: int
    generation: int
    from_token: int
    to_token: int
    text: str
    finish: int = 0
    stop_reason: str | int | None = None
    error: str = ""
    tops: tuple[TopLogprobs, ...] = ()


class TextReady(msgspec.Struct, frozen=True, tag="text"):
    """detokenize → the http worker that owns the slots."""

    items: tuple[TextItem, ...]


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """router → http: never ran. `code` is '' for an abort, else a stable word such as `never_fits`."""

    index: int
    generation: int
    code: str = ""
    message: str = ""


class ScrapeReply(msgspec.Struct, frozen=True, tag="scrape_reply"):
    """metrics → http: the exposition text asked for by `Scrape(id)`."""

    id: int
    body: bytes


HttpMessage = TextReady | Dropped | ScrapeReply


# ---------------------------------------------------------------------------------------------------- to metrics


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One series, cumulative: `values` is (value,) or, for a histogram, (sum, count of each bucket …)."""

    name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]


class MetricsPush(msgspec.Struct, frozen=True, tag="push"):
    """any process → metrics: this incarnation's cumulative totals. A lost or repeated push loses nothing."""

    role: str
    index: int
    incarnation: int
    seq: int
    samples: tuple[Sample, ...]
    last: bool = False


class Scrape(msgspec.Struct, frozen=True, tag="scrape"):
    """http worker `worker` → metrics: answer with `ScrapeReply(id)`."""

    id: int
    worker: int


MetricsMessage = MetricsPush | Scrape


# ------------------------------------------------------------------------ launcher ↔ child, over the control socket


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """child → launcher: it serves. `facts` are shown in the log (seconds, tokens, …)."""

    facts: dict[str, str | int | float]


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """child → launcher: it cannot go on. `config` is true when the user can fix it (exit code 2)."""

    reason: str
    config: bool = False
    exit_code: int = 70


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """http → launcher: it has heard that the service is ready, and takes requests."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """http → launcher: no request is in flight any more."""


class ServiceReady(msgspec.Struct, frozen=True, tag="service_ready"):
    """launcher → child: every process is ready; http answers /readiness with 200 from now on."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """launcher → http: refuse new requests with 503 and let running ones end. After `seconds` the launcher sends `Stop`."""

    seconds: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """launcher → child: end now. http first sends a terminal error to the streams that are open."""

    reason: str = "shutting_down"


ToLauncher = Ready | Opened | Fault | Drained
FromLauncher = ServiceReady | Drain | Stop
