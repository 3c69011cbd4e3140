"""Media types by content: the same however the bytes are cut; a text type is UTF-8 to its end."""

from tests.fuzz.harness import bounded, pieces

from glovebox_server.artifacts.media import OCTETS, Content, Sniffer

_NAMES = ("a", "a.png", "a.jpg", "a.gif", "a.webp", "a.json", "a.csv", "a.txt", "a.svg", "a.xlsx", "a.npy", "a.pdf")


def _judged(data: bytes, size: int, name: str) -> Content:
    sniffer = Sniffer()
    for piece in pieces(data, size):
        sniffer.feed(piece)
    return sniffer.finish(name)


def check(data: bytes) -> None:
    """First byte: the name; second: the size of pieces."""
    if len(data) < 2:
        return
    name = _NAMES[data[0] % len(_NAMES)]
    with bounded():
        whole, cut = _judged(data[2:], 0, name), _judged(data[2:], data[1], name)
    assert whole == cut
    if whole.media_type.startswith("text/") or whole.media_type == "application/json":
        data[2:].decode("utf-8")
        assert b"\0" not in data[2:]
    assert whole.media_type not in {"text/html", "image/svg+xml"}
    assert whole.media_type == OCTETS or "/" in whole.media_type
    assert all(risk.isprintable() for risk in whole.risks)
