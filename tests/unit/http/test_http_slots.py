"""Slots and live requests: all or nothing, no leak whatever happens, stale messages ignored (hypothesis)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferserve.errors import InvalidRequest, Overloaded, PeerGone, RequestError, RequestFailed, TooLong, Unavailable
from inferserve.http.generation import MAX_BACKLOG, Disconnected, GenerateRequest, Generation
from inferserve.http.live import LiveRequests
from inferserve.http.request_log import RequestLog
from inferserve.http.slot_client import SlotClient
from inferserve.metrics.client import MetricsClient
from inferserve.metrics.names import declare
from inferserve.metrics.requests import RequestMetrics
from inferserve.protocol.messages import Abort, Dropped, Finish, SlotRef, Submit, TextItem, TopLogprobs
from inferserve.protocol.sampling import SamplingParams
from inferserve.protocol.seeds import sibling_seed
from inferserve.shm.layout import Writer
from inferserve.shm.slots import SlotTable

CONTEXT = 32


class RouterStub:
    """Keeps what is sent; `broken_after` messages it takes no more."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.broken_after: int | None = None

    def send(self, message: Any) -> None:
        if self.broken_after is not None and len(self.sent) >= self.broken_after:
            raise PeerGone("router")
        self.sent.append(message)


class World:
    """A slot table of two workers of four rows; this worker is `index`."""

    def __init__(self, rows: int = 4, workers: int = 2, index: int = 0, limit: int = 0) -> None:
        self.table, _ = SlotTable.create(rows * workers, CONTEXT)
        self.rows = rows
        self.limit = limit or rows
        self.router = RouterStub()
        self.slots = self.client(index)
        self.metrics = MetricsClient(declare(CONTEXT, 64), "http", 0, 0, None)
        self.live = self.live_on(self.slots)

    def client(self, index: int) -> SlotClient:
        return SlotClient(self.table.view(Writer.HTTP), index * self.rows, self.rows, self.limit)

    def live_on(self, slots: SlotClient) -> LiveRequests:
        return LiveRequests(slots, self.router, RequestMetrics(self.metrics), RequestLog(True), CONTEXT)

    def forget(self, ref: SlotRef, *, ran: bool = True) -> None:
        """All other stages are done with a row."""
        router, engine, detok = (self.table.view(w) for w in (Writer.ROUTER, Writer.ENGINE, Writer.DETOKENIZE))
        router.router_done[ref.index] = ref.generation
        if ran:
            router.admitted[ref.index] = ref.generation
            engine.engine_done[ref.index] = ref.generation
            detok.detok_done[ref.index] = ref.generation

    def total(self, name: str, *labels: str) -> float:
        return sum(s.values[0] for s in self.metrics.samples() if s.name == name and s.labels == labels)


def request(n: int = 1, prompts: int = 1, **params: Any) -> GenerateRequest:
    given = {"max_tokens": 8, "seed": 5} | params
    return GenerateRequest(prompts=tuple([7, 8, 9] for _ in range(prompts)), n=n, params=SamplingParams(**given))


def item(ref: SlotRef, begin: int, end: int, text: str = "x", finish: Finish = Finish.NONE, **more: Any) -> TextItem:
    return TextItem(ref.index, ref.generation, begin, end, text, finish, **more)


def refs_of(message: Submit | Abort) -> tuple[SlotRef, ...]:
    return message.slots


def drain(generation: Generation) -> list[Any]:
    """All pieces to the end."""

    async def read() -> list[Any]:
        out = []
        async with asyncio.timeout(2):
            while pieces := await generation.next():
                out += pieces
        return out

    return asyncio.run(read())


class TestSlots:
    def test_take_writes_columns_and_leaving_the_block_frees(self) -> None:
        world = World()
        with world.slots.take(3) as claim:
            world.slots.check()
            assert world.slots.free == 1
            view = world.slots.view
            for ref in claim.refs:
                assert view.in_use[ref.index] == 1 and view.generation[ref.index] == ref.generation == 1
        assert world.slots.free == 4 and not view.in_use.any()
        world.slots.check()

    def test_all_or_nothing(self) -> None:
        world = World()
        with world.slots.take(3), pytest.raises(Overloaded):
            world.slots.take(2)
        assert world.slots.free == 4

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
    def test_anything_raised_in_the_block_frees(self, error: type[BaseException]) -> None:
        world = World()
        with pytest.raises(error), world.slots.take(4):
            raise error
        world.slots.check()
        assert world.slots.free == 4

    def test_cancellation_at_an_await_inside_the_block(self) -> None:
        world = World()

        async def hold(steps: int) -> None:
            with world.slots.take(2):
                for _ in range(steps):
                    await asyncio.sleep(0)

        async def main() -> None:
            for steps in range(1, 6):
                for cancel_at in range(steps + 1):
                    task = asyncio.create_task(hold(steps))
                    for _ in range(cancel_at):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    world.slots.check()
                    assert world.slots.free == 4

        asyncio.run(main())

    def test_submitted_rows_are_freed_only_when_all_stages_have_forgotten_them(self) -> None:
        world = World()
        with world.slots.take(1) as claim:
            claim.submitted(claim.refs)
        (ref,) = claim.refs
        world.slots.release(ref)
        router, engine, detok = (world.table.view(w) for w in (Writer.ROUTER, Writer.ENGINE, Writer.DETOKENIZE))
        router.admitted[ref.index] = 1
        for column in (router.router_done, engine.engine_done):
            column[ref.index] = 1
            world.slots.reclaim()
            assert world.slots.leaving == 1
        detok.detok_done[ref.index] = 1
        world.slots.release(ref)
        world.slots.reclaim()
        assert world.slots.free == 4 and world.slots.leaving == 0
        world.slots.release(ref)  # once more: nothing happens
        world.slots.check()
        with world.slots.take(4) as again:
            assert {r.generation for r in again.refs} == {1, 2}

    def test_a_row_that_never_ran_needs_the_router_only(self) -> None:
        world = World()
        with world.slots.take(1) as claim:
            claim.submitted(claim.refs)
        world.slots.cancel(claim.refs[0])
        world.forget(claim.refs[0], ran=False)
        world.slots.reclaim()
        assert world.slots.free == 4

    def test_the_limit_counts_all_workers_but_not_what_is_only_unreclaimed(self) -> None:
        world = World(rows=4, workers=2, limit=4)
        other = world.client(1)
        with other.take(3) as claim:
            claim.submitted(claim.refs)
        with pytest.raises(Overloaded):
            world.slots.take(2)
        for ref in claim.refs:
            other.release(ref)
            world.forget(ref)
        with world.slots.take(4):
            pass

    def test_generation_wraps_past_zero(self) -> None:
        world = World(rows=1, workers=1)
        world.slots.view.generation[0] = 2**32 - 1
        with world.slots.take(1) as claim:
            assert claim.refs[0].generation == 1

    def test_recovery_after_a_crash(self) -> None:
        world = World()
        with world.slots.take(3) as claim:
            claim.submitted(claim.refs)
        world.forget(claim.refs[0])
        again = world.client(0)
        assert again.recover() == tuple(sorted(claim.refs[1:], key=lambda r: r.index))
        assert [int(again.view.cancelled[r.index]) for r in claim.refs] == [0, 1, 1]
        assert again.free == 2
        for ref in claim.refs[1:]:
            world.forget(ref, ran=False)
        again.reclaim()
        again.check()
        assert again.free == 4

    def test_fill_writes_what_the_others_read(self) -> None:
        world = World()
        params = SamplingParams(max_tokens=9, ignore_eos=True, stop=("x",), logit_bias={3: 1.5})
        with world.slots.take(1) as claim:
            world.slots.fill(claim.refs[0], np.array([4, 5, 6], np.int32), params, 123)
            view = world.table.view(Writer.ENGINE)
            index = claim.refs[0].index
            assert view.prompt(index).tolist() == [4, 5, 6] and view.sampling_params(index) == params
            assert (view.max_tokens[index], view.ignore_eos[index], view.arrival_ns[index]) == (9, 1, 123)

    def test_params_too_large_for_their_column(self) -> None:
        world = World()
        params = SamplingParams(stop=tuple("é" * 1024 for _ in range(32)))
        with pytest.raises(InvalidRequest):
            world.live.open(GenerateRequest(prompts=([1],), params=params))
        assert world.slots.free == 4 and not world.router.sent


class TestLive:
    def test_siblings_get_their_seeds_and_one_submit(self) -> None:
        world = World()
        world.live.open(request(n=3, max_tokens=100, min_tokens=40))
        (submit,) = world.router.sent
        assert len(submit.slots) == 3
        view = world.slots.view
        params = [view.sampling_params(r.index) for r in submit.slots]
        assert [p.seed for p in params] == [sibling_seed(5, i) for i in range(3)] and params[0].seed == 5
        assert {(p.max_tokens, p.min_tokens) for p in params} == {(CONTEXT - 3, CONTEXT - 3)}

    @pytest.mark.parametrize(("drawn", "numbers"), [(True, [0, 1, 2, 3]), (False, [0, 1, 0, 1])])
    def test_equal_prompts_draw_differently_unless_the_client_gave_the_seed(
        self, drawn: bool, numbers: list[int]
    ) -> None:
        world = World()
        params = SamplingParams(max_tokens=4, seed=5)
        world.live.open(GenerateRequest(prompts=([1], [1]), params=params, n=2, drawn_seed=drawn))
        refs = [r for s in world.router.sent for r in s.slots]
        assert [world.slots.view.sampling_params(r.index).seed for r in refs] == [sibling_seed(5, i) for i in numbers]

    def test_text_reaches_the_right_choice_once(self) -> None:
        world = World()
        generation = world.live.open(request(n=2, prompts=2))
        refs = [r for s in world.router.sent for r in s.slots]
        world.table.view(Writer.ENGINE).cached_tokens[refs[0].index] = 2
        for number, ref in enumerate(refs):
            world.live.deliver([item(ref, 0, 2, f"a{number}"), item(ref, 0, 2, "again"), item(ref, 2, 2, "")], 10)
            assert world.slots.view.delivered_tokens[ref.index] == 2
            stale = SlotRef(ref.index, ref.generation + 1)
            world.live.deliver([item(stale, 2, 3, "stale")], 11)
            world.live.deliver([item(ref, 2, 3, f"b{number}", Finish.LENGTH)], 12)
            world.live.deliver([item(ref, 3, 4, "late")], 13)
        pieces = drain(generation)
        texts = ["".join(p.text for p in pieces if p.choice == c) for c in range(4)]
        assert texts == ["a0b0", "a1b1", "a2b2", "a3b3"]
        assert generation.usage.completion_tokens == 12 and generation.usage.prompt_tokens == 6
        assert generation.usage.cached_tokens == 2
        assert world.total("request_success", "length") == 2 and world.total("generation_tokens") == 12
        assert len(world.live) == 0 and world.slots.leaving == 4
        assert not [m for m in world.router.sent if isinstance(m, Abort)]

    def test_wanted_tokens_come_with_their_text(self) -> None:
        world = World()
        wanted = GenerateRequest(prompts=([1],), params=SamplingParams(max_tokens=4, logprobs=1), want_tokens=True)
        generation = world.live.open(wanted)
        (ref,) = world.router.sent[0].slots
        engine = world.table.view(Writer.ENGINE)
        engine.output_ids[ref.index, :3] = [11, 12, 13]
        engine.logprobs[ref.index, :3] = [-1, -2, -3]
        top = TopLogprobs(ref.index, 1, 0, (11,), (-1.0,))
        world.live.deliver([item(ref, 0, 1, "a", tops=(top,)), item(ref, 1, 3, "bc", Finish.STOP)], 5)
        first, second = drain(generation)
        assert (first.details.ids, first.details.logprobs, first.details.tops) == ([11], [-1.0], (top,))
        assert (second.details.ids, second.details.logprobs) == ([12, 13], [-2.0, -3.0])

    @pytest.mark.parametrize(
        ("code", "error", "reason"),
        [("never_fits", TooLong, "invalid"), ("overloaded", Overloaded, "overloaded"), ("", Unavailable, "unavailable"),
         ("internal_error", RequestFailed, "error")],
    )  # fmt: skip
    def test_dropped(self, code: str, error: type[RequestError], reason: str) -> None:
        world = World()
        generation = world.live.open(request(n=2))
        refs = world.router.sent[0].slots
        for ref in refs:
            world.live.dropped(Dropped(ref.index, ref.generation + 1, code, "why"))
        assert generation.failed is None
        for ref in refs:
            world.forget(ref, ran=False)
            world.live.dropped(Dropped(ref.index, ref.generation, code, "why"))
        with pytest.raises(error, match="why"):
            drain(generation)
        world.slots.reclaim()
        assert world.slots.free == 4 and world.total("request_failure", reason) == 1

    @pytest.mark.parametrize(("finish", "reason"), [(Finish.ERROR, "error"), (Finish.ABORT, "error")])
    def test_a_row_that_breaks_ends_its_request_only(self, finish: Finish, reason: str) -> None:
        world = World()
        broken, other = world.live.open(request(n=2)), world.live.open(request())
        first, second = world.router.sent[0].slots
        world.live.deliver([item(first, 0, 1, "a"), item(first, 1, 1, "", finish, error="NaN")], 3)
        with pytest.raises(RequestError, match="NaN" if finish == Finish.ERROR else "aborted"):
            drain(broken)
        assert world.router.sent[-1] == Abort((second,)) and world.slots.view.cancelled[second.index]
        assert other.failed is None and len(world.live) == 1
        assert world.total("request_success", reason) == 1

    def test_disconnect_cancels_before_it_aborts_and_only_once(self) -> None:
        world = World()
        generation = world.live.open(request(n=2))
        refs = world.router.sent[0].slots
        seen: list[int] = []
        send = world.router.send
        world.router.send = lambda m: (seen.extend(int(world.slots.view.cancelled[r.index]) for r in m.slots), send(m))[
            1
        ]  # type: ignore[method-assign,func-returns-value]
        for _ in range(3):
            generation.disconnect()
            generation.close()
        assert seen == [1, 1] and world.router.sent[1:] == [Abort(refs)]
        with pytest.raises(Disconnected):
            drain(generation)
        assert world.total("request_success", "abort") == 1
        world.live.deliver([item(refs[0], 0, 1, "", Finish.ABORT)], 4)
        for ref in refs:
            world.forget(ref)
        world.slots.reclaim()
        assert world.slots.free == 4

    @pytest.mark.parametrize("broken_after", [0, 1])
    def test_a_router_that_takes_nothing(self, broken_after: int) -> None:
        world = World()
        world.router.broken_after = broken_after
        with pytest.raises(Unavailable):
            world.live.open(request(prompts=2))
        assert len(world.live) == 0 and world.slots.free == 4 - broken_after and world.slots.leaving == broken_after
        world.slots.check()

    def test_a_client_that_does_not_read_loses_its_request_only(self) -> None:
        world = World()
        slow, other = world.live.open(request()), world.live.open(request())
        (ref,), (other_ref,) = (m.slots for m in world.router.sent)
        for position in range(MAX_BACKLOG + 2):
            world.live.deliver([item(ref, position, position + 1), item(other_ref, position, position + 1)], position)
            asyncio.run(take(other))
        assert slow.failed is not None and slow.failed.code == "client_too_slow"
        assert world.router.sent[-1] == Abort((ref,)) and other.failed is None

    def test_stop_ends_all(self) -> None:
        world = World()
        generations = [world.live.open(request()) for _ in range(3)]
        world.live.fail_all(Unavailable("bye"))
        for generation in generations:
            with pytest.raises(Unavailable, match="bye"):
                drain(generation)
        assert len(world.live) == 0

    def test_a_waiter_is_woken_by_text_error_and_disconnect(self) -> None:
        async def main() -> None:
            for act in ("text", "fail", "gone", "cancel"):
                world = World()
                generation = world.live.open(request())
                (ref,) = world.router.sent[0].slots
                waiter = asyncio.create_task(generation.next())
                await asyncio.sleep(0)
                if act == "text":
                    world.live.deliver([item(ref, 0, 1)], 1)
                    assert len(await waiter) == 1
                elif act == "fail":
                    generation.fail(RequestFailed("x"))
                    with pytest.raises(RequestFailed):
                        await waiter
                elif act == "gone":
                    generation.disconnect()
                    with pytest.raises(Disconnected):
                        await waiter
                else:
                    waiter.cancel()
                    await asyncio.gather(waiter, return_exceptions=True)
                    world.live.deliver([item(ref, 0, 1)], 1)
                    assert len(await generation.next()) == 1

        asyncio.run(main())


async def take(generation: Generation) -> list[Any]:
    return await generation.next()


class LiveMachine(RuleBasedStateMachine):
    """Requests come and go in any way; other stages forget rows in any order. Nothing is ever lost or freed early."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(rows=6, workers=1)
        self.open: list[tuple[Generation, list[SlotRef]]] = []
        self.ended: list[SlotRef] = []

    @rule(n=st.integers(1, 3), prompts=st.integers(1, 3), broken=st.integers(0, 4))
    def start(self, n: int, prompts: int, broken: int) -> None:
        world, before = self.world, len(self.world.router.sent)
        world.router.broken_after = before + broken if broken < 4 else None
        free = world.slots.free
        try:
            generation = world.live.open(request(n=n, prompts=prompts))
        except Overloaded:
            assert len(world.router.sent) == before and world.slots.free >= free
        except Unavailable:
            self.ended += [r for m in world.router.sent[before:] if isinstance(m, Submit) for r in m.slots]
        else:
            self.open.append((generation, [r for m in world.router.sent[before:] for r in m.slots]))
        world.router.broken_after = None

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["finish", "error", "drop", "disconnect", "close", "stop"]))
    def end(self, data: st.DataObject, how: str) -> None:
        generation, refs = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        live = self.world.live
        if how in ("finish", "error"):
            finish = Finish.STOP if how == "finish" else Finish.ERROR
            live.deliver([item(ref, 0, 1, "x", finish) for ref in refs], 9)
        elif how == "drop":
            for ref in refs:
                live.dropped(Dropped(ref.index, ref.generation, "never_fits", "x"))
        elif how == "stop":
            generation.fail(Unavailable("stop"))
        else:
            getattr(generation, how)()
        generation.close()
        self.ended += refs

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), ran=st.booleans())
    def forget(self, data: st.DataObject, ran: bool) -> None:
        self.world.forget(self.ended.pop(data.draw(st.integers(0, len(self.ended) - 1))), ran=ran)

    @invariant()
    def rows_are_accounted_for(self) -> None:
        world = self.world
        world.slots.reclaim()
        world.slots.check()
        running = sum(len(refs) for _, refs in self.open)
        assert len(world.live) == running
        assert world.slots.leaving == len(self.ended)
        assert world.slots.free == 6 - running - len(self.ended)


LiveMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestLiveMachine = LiveMachine.TestCase
