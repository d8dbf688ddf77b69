"""Runs that share a buffer never write over one another."""

from __future__ import annotations

import numpy as np

from inferserve.kv.run import Ints, TokenRun


def ints(first: int, last: int) -> Ints:
    return np.arange(first, last, dtype=np.int32)


def values(run: TokenRun) -> list[int]:
    assert (run.indices == run.tokens + 1000).all()
    return run.tokens.tolist()


def run_of(first: int, last: int) -> TokenRun:
    return TokenRun(ints(first, last), ints(first + 1000, last + 1000))


def test_a_head_that_grows_leaves_its_old_tail_alone() -> None:
    tail = run_of(0, 10)
    tail.append(ints(10, 12), ints(1010, 1012))
    head = tail.split(4)
    head.append(ints(90, 93), ints(1090, 1093))
    tail.append(ints(12, 14), ints(1012, 1014))
    assert values(head) == [0, 1, 2, 3, 90, 91, 92]
    assert values(tail) == list(range(4, 14))


def test_absorbing_undoes_a_split_and_joins_strangers() -> None:
    tail = run_of(0, 10)
    head = tail.split(4)
    head.absorb(tail)
    assert values(head) == list(range(10))
    head.append(ints(10, 11), ints(1010, 1011))
    head.absorb(run_of(11, 20))
    assert values(head) == list(range(20))


def test_trimming_then_growing() -> None:
    run = run_of(0, 10)
    assert run.trim(3).tolist() == [1007, 1008, 1009]
    run.append(ints(50, 60), ints(1050, 1060))
    assert values(run) == [*range(7), *range(50, 60)]


def test_common_prefix() -> None:
    run = run_of(0, 10)
    assert run.common(ints(0, 4)) == 4
    assert run.common(ints(0, 20)) == 10
    assert run.common(np.array([0, 1, 7, 3], dtype=np.int32)) == 2
    assert run.common(ints(5, 8)) == 0
    assert run.common(ints(0, 0)) == 0
