"""Undoes a response's content encoding without trusting it. Pure: bytes in, bounded pieces out."""

import zlib
from collections.abc import Iterator

#: What is offered to servers: what the standard library decodes in bounded steps.
ACCEPTED = "gzip, deflate"
#: Decoded bytes handed out at a time; a bomb is noticed after one piece.
PIECE_BYTES = 64 * 1024
#: zlib's window for "gzip or zlib header, find out" (https://www.zlib.net/manual.html#Advanced).
_AUTOMATIC = 32 + zlib.MAX_WBITS


class BodyError(Exception):
    """The body cannot be decoded, or decodes to too much; the text is one sentence for the caller."""


class Decoder:
    """One response's body on its way from wire bytes to plain bytes."""

    def __init__(self, encoding: str, *, ratio: int, grace: int) -> None:
        """Take the ``Content-Encoding`` value, decoded bytes allowed per received byte, and bytes free of that.

        Raises:
            BodyError: An encoding that was not asked for, or several at once.
        """
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip", "deflate"}:
            raise BodyError("The server used a content encoding that was not asked for.")
        self._inflate = None if name in {"", "identity"} else zlib.decompressobj(_AUTOMATIC)
        self._ratio, self._grace = ratio, grace
        self._received = self._decoded = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded pieces of at most ``PIECE_BYTES``.

        Raises:
            BodyError: Corrupt data, data after the end, or more than the ratio allows.
        """
        self._received += len(data)
        inflate = self._inflate
        if inflate is None:
            yield data
            return
        piece = b""
        # A full piece may leave more output inside zlib although all of the input is consumed.
        while data or len(piece) == PIECE_BYTES:
            try:
                piece = inflate.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise BodyError("The compressed body is corrupt.") from None
            data = inflate.unconsumed_tail or inflate.unused_data
            self._decoded += len(piece)
            if self._decoded > self._grace + self._ratio * self._received:
                raise BodyError(f"The body decompresses to more than {self._ratio} times its size.")
            if piece:
                yield piece
            if inflate.eof:
                if data:
                    raise BodyError("Bytes follow the end of the compressed body.")
                return

    def finish(self) -> None:
        """Say that the body is over.

        Raises:
            BodyError: The compressed stream is not.
        """
        if self._inflate is not None and self._received and not self._inflate.eof:
            raise BodyError("The compressed body is cut short.")
