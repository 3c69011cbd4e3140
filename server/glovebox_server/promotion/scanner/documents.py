"""Office documents, notebooks, mails and pages: macros, controls, fields, queries, links, and the files inside.

Old Office documents are compound files, [MS-CFB] 2.2 to 2.6, read as far as needed for their streams; [MS-OLEDS] 2.3.6
says what is embedded. A broken link between their sectors ends a stream.
"""

import email
import html
import json
import re
from collections.abc import Iterable, Iterator
from struct import Struct, unpack_from

from glovebox_server.promotion.scanner.budget import Findings, ScanBudget, ScannedPart

_ELEMENT = rb"<(?:[^\s<>/:]+:)?"
"""Start of an element, with any XML prefix."""
_IS = rb"\s*=\s*(?:[\"']\s*)?"
_AWAY = rb"(?:h\s*t\s*t\s*p\s*(?:s\s*)?:|[\\/]\s*[\\/])"
"""Start of an external address. Browsers drop line ends and tabs, and take a backslash for a slash, see
https://url.spec.whatwg.org/#concept-basic-url-parser."""


def _css(name: bytes) -> bytes:
    """Match a CSS name, whose letters may be escaped: see https://www.w3.org/TR/css-syntax-3/#escaping."""
    each = (b"(?:%c|\\\\0{0,4}%x\\s?|\\\\0{0,4}%x\\s?)" % (sign, sign, sign ^ 32) for sign in name)
    return b"".join(each)


def _form(*forms: bytes) -> re.Pattern[bytes]:
    return re.compile(b"|".join(forms), re.IGNORECASE)


_MARKUP = (
    ("a script", _form(_ELEMENT + rb"script\b")),
    ("a handler of events", _form(rb"<[^<]*[\s/\"']on[a-z]{3,60}\s*=")),
    ("a javascript: address", _form(rb"j\s*a\s*v\s*a\s*s\s*c\s*r\s*i\s*p\s*t\s*:")),
    ("a frame or an embedded object", _form(_ELEMENT + rb"(?:iframe|frame|fencedframe|object|embed|applet|portal)\b")),
    ("other markup inside a drawing", _form(_ELEMENT + rb"foreignObject\b")),
    ("a page that leads elsewhere by itself", _form(rb"[\s/\"']http-equiv" + _IS + rb"refresh\b")),
    ("an address that learns when a link is followed", _form(_ELEMENT + rb"(?:a|area)\b[^<]*[\s/\"']ping\s*=")),
    ("a form that sends", _form(_ELEMENT + rb"form\b", rb"[\s/\"']formaction\s*=")),
    (
        "what is loaded from elsewhere",
        _form(
            rb"\b(?:src|data|poster|background)" + _IS + _AWAY,
            rb"srcset\s*=[^<>]{0,1000}" + _AWAY,
            _ELEMENT + rb"(?:link|image|feImage|use|base)\b(?:[^<]*|[^>]{0,300})\bhref" + _IS + _AWAY,
            _css(b"url") + rb"\(\s*(?:[\"']\s*)?" + _AWAY,
            rb"image-set\([^()]{0,1000}" + _AWAY,
            rb"@" + _css(b"import"),
        ),
    ),
    ("an entity of XML", _form(rb"<!ENTITY")),
    ("a style sheet that makes another page of it", _form(rb"<\?xml-stylesheet\b")),
)
_SHIFT = re.compile(rb"\x1b[ -/]*[0-~]")
"""Change of the character set, which a reader of ISO 2022 drops: see ECMA-35, 13.2."""


def markup(data: bytes) -> Iterator[str]:
    """Yield the active content of a page or a drawing."""
    if b"<" not in data:
        return
    text = told(data)
    for what, form in _MARKUP:
        if form.search(text):
            yield f"markup: {what}"


def told(data: bytes) -> bytes:
    """Return markup as readers decode it: UTF-16 without zeros, character references resolved."""
    text = data.replace(b"\0", b"")
    if b"\x1b" in text:
        text += _SHIFT.sub(b"", text)
    if b"&" not in text:
        return text
    return text + html.unescape(text.decode("latin-1")).encode("latin-1", "replace")


_COMPOUND = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MOST_STREAMS = 1000
_HEAD = 512
_ENTRY = 128
_STREAM, _ROOT = 2, 5
_SECTOR, _MINI = (9, 12), 6
_SMALL = 4096
"""Shorter streams are in the root's stream, in small sectors."""
_LAST = 0xFFFFFFFA
"""This number and higher ones mark an end, or no sector."""
_U32 = Struct("<I")


def _streams(data: bytes, budget: ScanBudget) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each stream, within the budget."""
    if len(data) < _HEAD or (shifts := unpack_from("<HH", data, 30))[0] not in _SECTOR or shifts[1] != _MINI:
        return
    size = 1 << shifts[0]
    sectors = data[size : len(data) // size * size], size
    table = _table(data, *sectors)
    directory, next_small = (_chain(*sectors, table, _U32.unpack_from(data, at)[0]) for at in (48, 60))
    entries = [directory[at : at + _ENTRY] for at in range(0, len(directory) - _ENTRY + 1, _ENTRY)]
    roots = [_U32.unpack_from(each, 116)[0] for each in entries if each[66] == _ROOT]
    small = _chain(*sectors, table, roots[0] if roots else _LAST), 1 << _MINI
    for entry in [each for each in entries if each[66] == _STREAM][:_MOST_STREAMS]:
        if budget.over():
            return
        name = entry[: max(0, min(64, unpack_from("<H", entry, 64)[0]) - 2)].decode("utf-16-le", "replace")
        begin, length = unpack_from("<II", entry, 116)
        where: tuple[bytes, int, bytes] = (*small, next_small) if length < _SMALL else (*sectors, table)
        content = _chain(*where, begin, length)[:length]
        budget.bytes -= len(content)
        yield name, content


def _table(data: bytes, sectors: bytes, size: int) -> bytes:
    """Return the table of the sectors' order."""
    most = len(sectors) // size
    numbers = list(unpack_from("<109I", data, 76))
    at, seen = _U32.unpack_from(data, 68)[0], 0
    while at < _LAST and seen < most and (found := sectors[at * size : (at + 1) * size]):
        numbers += (number for (number,) in _U32.iter_unpack(found))
        at, seen = numbers.pop(), seen + 1
    return b"".join(sectors[each * size : (each + 1) * size] for each in numbers[:most] if each < _LAST)


def _chain(sectors: bytes, size: int, table: bytes, begin: int, length: int | None = None) -> bytes:
    """Return the content of the chain from ``begin``: ``length`` bytes in whole sectors, or to its end."""
    most = len(sectors) if length is None else min(length, len(sectors))
    out, at = bytearray(), begin
    while at < _LAST and len(out) < most and (found := sectors[at * size : (at + 1) * size]):
        out += found
        at = _U32.unpack_from(table, 4 * at)[0] if 4 * at + 4 <= len(table) else _LAST
    return bytes(out)


def _native(data: bytes) -> tuple[str, bytes]:
    """Return name and content of an embedded file."""
    name, _, rest = data[6:].partition(b"\0")
    _, _, rest = rest.partition(b"\0")
    length = _U32.unpack_from(rest, 4)[0] if len(rest) >= 8 else 0
    content = rest[8 + length + 4 :]
    if not length or not content or not name:
        return "object", data
    size = _U32.unpack_from(rest, 8 + length)[0]
    return name.decode("latin-1"), content[:size]


_OFFICE = (
    ("macros", re.compile(r"vbaProject|vbaData|macrosheets/", re.IGNORECASE)),
    ("a control that runs code", re.compile(r"activeX|webextensions/", re.IGNORECASE)),
    ("a file inside", re.compile(r"embeddings/|oleObject", re.IGNORECASE)),
    ("a link to other data", re.compile(r"externalLinks/|connections\.xml|queryTables/", re.IGNORECASE)),
)
_TYPES = "[content_types].xml"
_XML = (".xml", ".rels", ".bin")
_FLAT = (b"schemas.microsoft.com/office/2006/xmlPackage", b"schemas.microsoft.com/office/word/2003/wordml")
_FLAT_ACTS = (
    ("macros", re.compile(rb"macrosPresent\s*=\s*[\"']yes")),
    ("a file inside", re.compile(rb"[:<](?:binData|docOleData)\b")),
)
_OPEN = b"urn:oasis:names:tc:opendocument:"
_OPEN_ACTS = (
    ("a handler of events", re.compile(rb"[:<]event-listener\b")),
    ("a macro's address", re.compile(rb"vnd\.sun\.star\.script:")),
    ("a field that starts programs (DDE)", re.compile(rb"[:<]dde-(?:source|connection-decl)\b")),
    ("a control that runs code", re.compile(rb"[:<](?:applet|plugin)\b")),
    (
        "what is loaded from elsewhere, or a link",
        re.compile(rb"[:\s]href\s*=\s*[\"']\s*(?:[a-z]+:)?[\\/][\\/]", re.IGNORECASE),
    ),
)
_EXTERNAL = re.compile(rb'TargetMode\s*=\s*["\']External', re.IGNORECASE)
_DDE = re.compile(rb"\bDDE(?:AUTO)?\b")

_SHOWN = re.compile(rb"www\.w3\.org/(?:1999/xhtml|2000/svg)|<!ENTITY|<\?xml-stylesheet")

_SYLK_ACTS = (
    ("a formula, which may start programs", re.compile(rb"(?:\A|[\r\n])[CF];(?:[^\r\n]*?;)?E")),
    ("a name that may start a macro", re.compile(rb"[\r\n]NN;")),
    ("a sheet of macros", re.compile(rb"[\r\n]O;(?:[^\r\n]*?;)?E")),
)
_SYLK_CELL = re.compile(rb"[\r\n]C;(?:[XYKE]|[^\r\n]*;K)")
_QUERY = re.compile(rb"\A\s*(?:WEB\r?\n1\r?\n|XLODBC\r?\n|QueryType=)", re.IGNORECASE)
_QUERIES = (".iqy", ".oqy", ".rqy", ".dqy")
MAX_MAIL_BYTES = 2 << 20
"""Bytes of a mail that are parsed in Python: two seconds at most."""
_MAIL_HEADS = 64 << 10
_IS_MAIL = re.compile(rb"^MIME-Version:[ \t]*1\.0", re.IGNORECASE | re.MULTILINE)


def is_office(names: Iterable[str]) -> bool:
    """Return whether a zip with these entries is an Office document."""
    return _TYPES in map(str.casefold, names)


def office_names(names: Iterable[str]) -> Iterator[str]:
    """Yield the findings from part names of an Office document."""
    for name in names:
        yield from (f"Office document: {what}" for what, form in _OFFICE if form.search(name))


def office(name: str, data: bytes) -> Iterator[str]:
    """Yield the active content of one part of an Office document."""
    # Relationships define the type of a part, not its name.
    if not _is_xml(data) and not name.casefold().endswith(_XML):
        return
    text = told(data)
    if name.casefold() == _TYPES:
        yield from office_names([text.decode("latin-1")])
    if _EXTERNAL.search(text):
        yield "Office document: what is loaded from elsewhere, or a link"
    # Markup may split a field's text.
    if _DDE.search(text) or _DDE.search(re.sub(rb"<[^<>]*>", b"", text)):
        yield "Office document: a field that starts programs (DDE)"


def _is_xml(data: bytes) -> bool:
    return data.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"<")


def office_xml(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield the active content of an Office document, or a part of an OpenDocument one, in one XML file."""
    if not _is_xml(part.data):
        return
    text = told(part.data)
    if _OPEN in text:
        yield from (f"OpenDocument: {what}" for what, form in _OPEN_ACTS if form.search(text))
    if any(each in text for each in _FLAT):
        yield from office_names([text.decode("latin-1")])
        yield from (f"Office document: {what}" for what, form in _FLAT_ACTS if form.search(text))
        yield from office(part.name, part.data)


def is_no_page(name: str, data: bytes) -> bool:
    """Return whether this part of an Office document is no page of its own: no browser shows it."""
    return name.casefold().endswith((".xml", ".rels")) and not _SHOWN.search(told(data))


def old_office(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of a compound file, the old format of Office documents, and the files inside."""
    if not part.data.startswith(_COMPOUND):
        return
    if "_VBA_PROJECT".encode("utf-16-le") in part.data or "Macros".encode("utf-16-le") in part.data:
        yield "Office document (OLE): macros"
    else:
        yield "Office document (OLE): it was not scanned"
    for name, data in _streams(part.data, budget):
        if name == "EncryptedPackage":
            yield "Office document (OLE): encryption"
        elif name == "\1Ole10Native":
            yield "Office document (OLE): a file inside"
            yield ScannedPart(*_native(data))
        elif name in {"Package", "CONTENTS"}:
            yield "Office document (OLE): a file inside"
            yield ScannedPart(name, data)


def rtf(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of what Word takes for RTF, and its plainly written objects."""
    if not part.data[:1024].lstrip().startswith(b"{\\rt"):
        return
    yield "RTF document: it was not scanned"
    for number, found in enumerate(re.finditer(rb"\\objdata\b([^}]*)", part.data)):
        if budget.over():
            return
        if not number:
            yield "RTF document: an embedded object"
        text = re.sub(rb"[^0-9A-Fa-f]+", b"", found[1])
        data = bytes.fromhex(text[: len(text) & ~1].decode())
        budget.bytes -= len(data)
        for magic in (_COMPOUND, b"PK\x03\x04", b"%PDF-"):
            if (at := data.find(magic)) >= 0:
                yield ScannedPart(f"object {number + 1}", data[at:])


def sheet(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield the active content of what spreadsheets take for SYLK or a query, by its name or its beginning."""
    if part.name.casefold().endswith(".slk") or (part.data.startswith(b"ID;") and _SYLK_CELL.search(part.data)):
        yield from (f"SYLK: {what}" for what, form in _SYLK_ACTS if form.search(part.data))
    if part.name.casefold().endswith(_QUERIES) or _QUERY.match(part.data[:1024]):
        yield "query: data that is loaded from elsewhere when it is opened"


def notebook(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield the active content of a notebook: cells, and their outputs."""
    if not part.name.casefold().endswith(".ipynb") and b'"nbformat"' not in part.data:
        return
    whole = json.loads(part.data)
    cells = whole["cells"]
    if code := sum(1 for each in cells if each.get("cell_type") == "code"):
        yield f"notebook: {code} cells of code, which run when somebody runs them"
    for cell in cells:
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            for word, what in (("javascript", "script"), ("widget", "widget")):
                yield from (f"notebook: a {what} in an output" for kind in shown if word in kind)
    # All strings, decoded: JSON may escape each character of markup.
    yield from markup("\n".join(_strings(whole)).encode("utf-8", "replace"))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        lines = bool(value) and all(isinstance(each, str) for each in value)
        for each in ["".join(value)] if lines else value:
            yield from _strings(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)


def mail(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the encoded parts of a mail or web archive, RFC 2045 and RFC 2557; the others are scanned as they are."""
    named = part.name.casefold().endswith((".eml", ".mht", ".mhtml"))
    if not named and not _IS_MAIL.search(part.data[:_MAIL_HEADS]):
        return
    if len(part.data) > MAX_MAIL_BYTES:
        yield f"mail: behind its first {MAX_MAIL_BYTES} bytes its parts were not scanned"
    for number, each in enumerate(email.message_from_bytes(part.data[:MAX_MAIL_BYTES]).walk(), 1):
        if each.is_multipart() or "Content-Transfer-Encoding" not in each:
            continue
        data = each.get_payload(decode=True)
        if not isinstance(data, bytes):
            continue
        budget.bytes -= len(data)
        if data.startswith(b"ActiveMime"):
            yield "mail: macros of an Office document"
        yield ScannedPart(each.get_filename() or f"part {number}", data)
