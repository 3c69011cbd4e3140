"""Messages between a server and its worker: whole however they arrive, and refused where a rule is broken."""

import os
import struct

import pytest

from glovebox_sandboxes.worker.messages import MAX_BYTES, Message, Reader, encode

MESSAGES: list[Message] = [{"kind": "a", "n": 1}, {"kind": "b", "fds": 2}, {"kind": "c", "text": "ü" * 500}]


@pytest.mark.parametrize("size", [1, 3, 7, 4096])
def test_messages_arrive_whole_and_with_their_own_descriptors(size: int) -> None:
    """However they are cut; the descriptors come with the first byte of their message."""
    data, pair = b"".join(encode(each) for each in MESSAGES), os.pipe()
    reader, found = Reader(), []
    first = len(encode(MESSAGES[0]))
    for start in range(0, len(data), size):
        found += [*reader.feed(data[start : start + size], pair if start <= first < start + size else ())]
    assert [message for message, _ in found] == MESSAGES
    assert [given for _, given in found] == [[], [*pair], []]
    for descriptor in pair:
        os.close(descriptor)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", MAX_BYTES + 1),
        struct.pack("!I", 2) + b"{x",
        struct.pack("!I", 2) + b"[]",
        encode({"kind": "granted", "fds": 1}),
        encode({"kind": "granted", "fds": "1"}),
    ],
    ids=["too long", "no JSON", "no object", "a descriptor is missing", "no number"],
)
def test_what_breaks_a_rule_is_refused(data: bytes) -> None:
    reader = Reader()
    with pytest.raises(ValueError, match=r"message|Expecting"):
        list(reader.feed(data, ()))
    reader.close()


def test_descriptors_that_no_message_came_for_are_refused_and_closed() -> None:
    """Else the next message would get them in place of its own."""
    reader, (ours, theirs) = Reader(), os.pipe()
    with pytest.raises(ValueError, match="no message came for a descriptor"):
        list(reader.feed(encode({"kind": "a"}), [theirs]))
    reader.close()
    assert os.read(ours, 1) == b""
    os.close(ours)


def test_what_came_for_a_message_that_is_none_is_closed() -> None:
    """A peer that promises more than it sends leaves nothing open here."""
    pair, reader = os.pipe(), Reader()
    with pytest.raises(ValueError, match="a message with 3 descriptors"):
        list(reader.feed(encode({"kind": "a", "fds": 3}), pair))
    reader.close()
    for descriptor in pair:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
