"""Rules 1 to 3 of the header of ``_glovebox_guest.wire``, frames and messages, for both roles."""

import struct
from typing import Any

import pytest
from tests.fixtures.wire_peers import (
    CREDIT,
    DATA,
    END,
    MESSAGE,
    NOTE,
    OPEN,
    RESET,
    ROLES,
    frame,
    opening,
    running,
    side,
)

from _glovebox_guest.jsontext import MAX_NODES
from _glovebox_guest.wire import MAX_DATA, MAX_JOB, MAX_MESSAGE, MAX_SAID_BYTES, MAX_SAID_NODES, ProtocolError, Wire

# Rule 1


def test_a_frame_is_type_stream_and_length_in_network_order() -> None:
    """Rule 1: u8, u32, u32, then the payload; rule 2, our side: no bytes are no frame."""
    _, guest = running()
    stream, _ = guest.open("k")
    assert guest.data(stream, b"abc") == b"\x03\x00\x00\x00\x01\x00\x00\x00\x03abc"
    assert guest.data(stream, b"") == b""


@ROLES
@pytest.mark.parametrize("kind", [0, 8, 255])
def test_an_unknown_frame_type_is_refused(role: str, kind: int) -> None:
    """Rule 1: there are seven types."""
    end, _ = side(role)
    with pytest.raises(ProtocolError, match=f"unknown frame type {kind}"):
        end.receive(frame(kind, 0))


@ROLES
def test_a_frame_in_pieces_is_the_same_frame(role: str) -> None:
    """Rule 1: nothing depends on how the bytes arrive."""
    end, first = side(role)
    frames = opening(first) + frame(DATA, first, b"xyz") + frame(END, first)
    events = [event for at in range(len(frames)) for event in end.receive(frames[at : at + 1])]
    assert [event[0] for event in events] == ["open", "data", "end"]


# Rule 2


@ROLES
@pytest.mark.parametrize(
    ("kind", "length"), [(DATA, MAX_DATA), (OPEN, MAX_MESSAGE), (NOTE, MAX_MESSAGE), (RESET, MAX_MESSAGE), (END, 0)]
)
def test_a_false_length_is_refused_before_its_payload_came(role: str, kind: int, length: int) -> None:
    """Rule 2: nobody can make us wait for, or hold, more than the longest payload of a type."""
    end, first = side(role)
    end.receive(opening(first, duplex=True))
    header = struct.pack("!BII", kind, first, length + 1)
    with pytest.raises(ProtocolError, match=f"announces {length + 1} bytes"):
        end.receive(header)


@ROLES
def test_the_longest_data_is_accepted_and_none_is_refused(role: str) -> None:
    """Rule 2: control of the test above; frames without bytes would cost no credit and could be sent for ever."""
    end, first = side(role)
    end.receive(opening(first))
    assert end.receive(frame(DATA, first, bytes(MAX_DATA))) == [("data", first, bytes(MAX_DATA))]
    with pytest.raises(ProtocolError, match="no bytes"):
        end.receive(frame(DATA, first))


def test_any_text_a_program_can_have_crosses() -> None:
    """Rule 2: 262,144 characters of twelve bytes each in JSON; lone surrogates, which are escaped."""
    host, guest = Wire("host"), Wire("guest")
    host.receive(guest.message("ready", {}))
    code = "\U0001f600" * (256 * 1024)
    (event,) = guest.receive(host.message("job", {"code": code}))
    assert event == ("message", 0, {"kind": "job", "body": {"code": code}})
    host, guest = running()
    _, frames = guest.open("file", {"name": "\udcff\x00\n"})
    (event,) = host.receive(frames)
    assert event == ("open", 1, {"kind": "file", "meta": {"name": "\udcff\x00\n"}, "duplex": False})


def test_messages_are_bounded_from_either_side() -> None:
    """Rule 2: the longer limit is for jobs alone; too long a body of ours is our mistake, and changes nothing."""
    host = Wire("host")
    with pytest.raises(ProtocolError, match="announces"):
        host.receive(struct.pack("!BII", MESSAGE, 0, MAX_MESSAGE + 1))
    guest = Wire("guest")
    with pytest.raises(ProtocolError, match="announces"):
        guest.receive(struct.pack("!BII", MESSAGE, 0, MAX_JOB + 1))
    host, guest = Wire("host"), Wire("guest")
    with pytest.raises(ValueError, match="exceeds"):
        guest.message("ready", {"a": "x" * MAX_MESSAGE})
    assert guest.state == "starting"
    host.receive(guest.message("ready", {}))
    with pytest.raises(ValueError, match="exceeds"):
        host.message("job", {"a": "x" * MAX_JOB})
    assert host.state == "ready"


@ROLES
@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{", b"[]", b"1", b'"x"', b"null", b"{} {}", b"\xff{}", b"\xef\xbb\xbf{}", b"[" * 100_000,
        b'{"kind":"k","meta":{},"duplex":NaN}', b'{"kind":"k","meta":{"a":Infinity},"duplex":false}',
        b'{"kind":"k","meta":{"a":1e999},"duplex":false}',
        b'{"kind":"k","meta":{},"duplex":0}', b'{"kind":1,"meta":{},"duplex":false}',
        b'{"kind":"k","meta":[],"duplex":false}', b'{"kind":"k","meta":{}}',
        b'{"kind":"k","meta":{},"duplex":false,"more":1}',
        b'{"kind":"k","meta":{"a":' + b"9" * 5000 + b'},"duplex":false}',
    ],
)  # fmt: skip
def test_what_is_no_such_object_is_refused(role: str, payload: bytes) -> None:
    """Rule 2: exactly the fields of the type, each of exactly its JSON type, and nothing that is not JSON."""
    end, first = side(role)
    with pytest.raises(ProtocolError, match="payload"):
        end.receive(frame(OPEN, first, payload))


# Rule 3


def test_messages_come_in_their_order() -> None:
    """Rule 3: ready, job, outcome."""
    host, guest = Wire("host"), Wire("guest")
    assert (host.state, guest.state) == ("starting", "starting")
    assert host.receive(guest.message("ready", {"uid": 1})) == [("message", 0, {"kind": "ready", "body": {"uid": 1}})]
    assert guest.receive(host.message("job", {"b": 2})) == [("message", 0, {"kind": "job", "body": {"b": 2}})]
    assert host.receive(guest.message("outcome", {"c": 3})) == [("message", 0, {"kind": "outcome", "body": {"c": 3}})]
    assert (host.state, guest.state) == ("done", "done")


@pytest.mark.parametrize(
    ("role", "said", "kinds"),
    [
        ("host", [], ["job", "outcome", "", "ready "]),
        ("host", ["ready"], ["ready", "job", "outcome"]),
        ("host", ["ready", "job"], ["ready", "job"]),
        ("guest", [], ["ready", "job", "outcome"]),
        ("guest", ["ready"], ["ready", "outcome"]),
        ("guest", ["ready", "job"], ["ready", "job", "outcome"]),
    ],
)
def test_no_other_message_is_heard(role: str, said: list[str], kinds: list[str]) -> None:
    """Rule 3: each once, in order, from the right side."""
    for kind in kinds:
        host, guest = Wire("host"), Wire("guest")
        for each in said:
            speaker, hearer = (host, guest) if each == "job" else (guest, host)
            hearer.receive(speaker.message(each, {}))
        with pytest.raises(ProtocolError, match="may not say"):
            (host if role == "host" else guest).receive(frame(MESSAGE, 0, {"kind": kind, "body": {}}))


@pytest.mark.parametrize(("role", "kind"), [("host", "ready"), ("host", "outcome"), ("guest", "job"), ("host", "job")])
def test_we_say_no_message_out_of_turn(role: str, kind: str) -> None:
    """Rules 3 and 8: that would be our mistake."""
    end = Wire("host" if role == "host" else "guest")
    with pytest.raises(ValueError, match="may not say"):
        end.message(kind, {})


@ROLES
def test_messages_belong_to_stream_0(role: str) -> None:
    """Rule 3."""
    end = Wire("host" if role == "host" else "guest")
    with pytest.raises(ProtocolError, match="stream 0"):
        end.receive(frame(MESSAGE, 1, {"kind": "ready", "body": {}}))


@ROLES
@pytest.mark.parametrize("kind", [OPEN, DATA, NOTE, END, RESET, CREDIT])
def test_stream_0_is_no_stream(role: str, kind: int) -> None:
    """Rule 3: and none of its frames are a stream's."""
    end, _ = side(role)
    bodies: dict[int, Any] = {
        OPEN: {"kind": "k", "meta": {}, "duplex": False},
        DATA: b"x",
        CREDIT: {"credit": 1},
        END: b"",
    }
    with pytest.raises(ProtocolError):
        end.receive(frame(kind, 0, bodies.get(kind, {})))


def test_the_guest_is_silent_after_its_outcome() -> None:
    """Rule 3: no frame of any type, also not for a stream that is still open."""
    late = [frame(DATA, 1, b"x"), frame(END, 1), frame(RESET, 1, {}), opening(3), frame(CREDIT, 1, {"credit": 1})]
    for each in late:
        host, guest = running()
        _, frames = guest.open("k")
        host.receive(frames + guest.message("outcome", {}))
        with pytest.raises(ProtocolError, match="after the outcome"):
            host.receive(each)


# Rule 8


def test_what_a_guest_says_in_json_is_bounded_in_all() -> None:
    """Rule 8: by bytes and by values, over the whole conversation; one payload less than too many is the control."""
    full = b'{"":"' + b"x" * (MAX_MESSAGE - 7) + b'"}'
    many = b'{"":[' + b"0," * (MAX_NODES - 5) + b"0]}"
    for payload, most in ((full, MAX_SAID_BYTES // len(full)), (many, MAX_SAID_NODES // MAX_NODES)):
        host, guest = running()
        stream, opened = guest.open("k")
        host.receive(opened + guest.reset(stream, {}))
        for _ in range(most - 1):
            assert host.receive(frame(RESET, stream, payload)) == []
        with pytest.raises(ProtocolError, match="says more than"):
            host.receive(frame(RESET, stream, payload) * 2)


@ROLES
def test_a_payload_of_many_values_is_never_read(role: str) -> None:
    """Rule 8: half a million arrays in 1 MiB are told from its bytes; a text of as many is one value (control)."""
    end, stream = side(role)
    end.receive(opening(stream))
    with pytest.raises(ProtocolError, match="more than 32768 values"):
        end.receive(frame(RESET, stream, b'{"":[' + b"[]," * 300_000 + b"0]}"))
    end, stream = side(role)
    end.receive(opening(stream))
    assert len(end.receive(frame(RESET, stream, b'{"":"' + b"[]," * 300_000 + b'"}'))) == 1


def test_events_come_one_at_a_time() -> None:
    """So that whoever reads many frames can pause between them."""
    host, guest = running()
    stream, opened = guest.open("k")
    said = opened + guest.data(stream, b"a") + guest.end(stream)
    host.feed(said[:-1])
    assert [(host.event() or [None])[0] for _ in range(3)] == ["open", "data", None]
    host.feed(said[-1:])
    assert host.event() == ("end", stream)
    assert host.event() is None
