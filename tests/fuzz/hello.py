"""The ClientHello reader: a name, a refusal or not enough, the same however the bytes are cut."""

from tests.fuzz.harness import pieces

from glovebox_profiles.egress.targets import parse_host
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.serve import MAX_HELLO, ClientHello


def _read(data: bytes, size: int) -> tuple[str | None, str | None]:
    reader, name = ClientHello(), None
    try:
        for piece in pieces(data, size):
            name = reader.feed(piece) or name  # what follows the hello in one piece is looked at, too
            assert len(reader.raw) <= MAX_HELLO + len(piece)
    except RefusedError as refused:
        return None, refused.reason
    return name, None


def check(data: bytes) -> None:
    """First byte: the size of pieces."""
    if not 1 <= len(data) <= MAX_HELLO:  # in one piece, more than that is refused whatever it begins with
        return
    whole, cut = _read(data[1:], 0), _read(data[1:], data[0] or 1)
    # Which of two reasons is found first depends on how much is there; whether one is found does not.
    assert whole[0] == cut[0]
    assert (whole[1] is None) == (cut[1] is None)
    if whole[0] is not None:
        assert parse_host(whole[0]) == whole[0]
