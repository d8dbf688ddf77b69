"""The strict decoder: a corpus of what must be refused, always with a 400 that is JSON, and what must pass."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferserve.errors import InvalidRequest
from inferserve.http.strict_json import decode, decode_object
from tests.fakes.http_service import ask, problem

BAD = [
    b"",
    b"{",
    b'{"a": }',
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": -1e999}',
    b'{"a": 1, "a": 2}',
    b'{"a": {"b": 1, "b": 1}}',
    b'{"a": "\\ud800"}',
    b'{"\\udfff": 1}',
    b'{"a": ["\\ud83d x"]}',
    b'{"a": 18446744073709551616}',
    b'{"a": [1, 18446744073709551616]}',
    b'{"a": -9223372036854775809}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": "\xff"}',
    b"\xef\xbb\xbf{}",
    '{"a": 1}'.encode("utf-16"),
    b'{"a": 1} x',
    b'{"a": "\x01"}',
    b'{"a":' + b"[" * 40 + b"]" * 40 + b"}",
    b"[" * 200_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b"01",
    b"+1",
    b".5",
]


@pytest.mark.parametrize("body", BAD, ids=lambda b: ascii(b[:24]))
def test_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("body", [b for b in BAD if b], ids=lambda b: ascii(b[:24]))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokens"])
def test_every_route_answers_400(body: bytes, path: str) -> None:
    if len(body) > 100_000:
        body = body[:90_000]
    response = ask("POST", path, content=body, headers={"content-type": "application/json"})
    assert problem(response, 400)["code"] == "invalid_json"


def nested(depth: int) -> bytes:
    """An object and lists, `depth` containers in all."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_depth_limit_is_exact() -> None:
    assert decode(nested(32))
    with pytest.raises(InvalidRequest, match="deeper than 32"):
        decode(nested(33))


def test_the_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(b'{"b": 1, "seed": 99999999999999999999}')
    assert caught.value.param == "seed"


@pytest.mark.parametrize("body", [b"[]", b"1", b'"a"', b"null"])
def test_only_objects_are_bodies(body: bytes) -> None:
    decode(body)
    with pytest.raises(InvalidRequest, match="object"):
        decode_object(body)


def test_paired_surrogates_and_extremes_pass() -> None:
    assert decode(b'{"a": "\\ud83d\\ude00", "b": 18446744073709551615, "c": -9223372036854775808, "d": 1e308}') == {
        "a": "😀",
        "b": 2**64 - 1,
        "c": -(2**63),
        "d": 1e308,
    }


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("abcé", max_size=4), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_equals_json_on_good_input(value: object) -> None:
    assert decode(json.dumps(value).encode()) == value


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_never_anything_but_a_value_or_a_400(body: bytes) -> None:
    try:
        decode(body)
    except InvalidRequest as error:
        assert error.status == 400
