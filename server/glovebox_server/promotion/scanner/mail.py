"""Mails and web archives (MHTML): the parts in them, as programs unpack them. RFC 2045, RFC 2557."""

import email
import re

from glovebox_server.promotion.scanner.left import Found, Left, Part

MOST_BYTES = 2 << 20
"""Of a mail, that are read by what is written in Python: two seconds of it at most."""
_HEADS = 64 << 10
_IS_MAIL = re.compile(rb"^MIME-Version:[ \t]*1\.0", re.IGNORECASE | re.MULTILINE)


def is_mail(part: Part) -> bool:
    """Whether programs take it for a mail or a web archive, by its name or its head."""
    return part.name.casefold().endswith((".eml", ".mht", ".mhtml")) or bool(_IS_MAIL.search(part.data[:_HEADS]))


def mail(part: Part, left: Left) -> Found:
    """The parts of a mail that are packed; the others are read as they stand."""
    if len(part.data) > MOST_BYTES:
        yield f"mail: behind its first {MOST_BYTES} bytes its parts were not looked into"
    for number, each in enumerate(email.message_from_bytes(part.data[:MOST_BYTES]).walk(), 1):
        if each.is_multipart() or "Content-Transfer-Encoding" not in each:
            continue
        data = each.get_payload(decode=True)
        if not isinstance(data, bytes):
            continue
        left.bytes -= len(data)
        if data.startswith(b"ActiveMime"):
            yield "mail: macros of an Office document"
        yield Part(each.get_filename() or f"part {number}", data)
