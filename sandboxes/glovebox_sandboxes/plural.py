"""Text for people: numbers in front of what they count, and nothing that redraws a terminal. Pure."""


def counted(number: float, one: str) -> str:
    """Return a number, with at most six digits of a fraction, and a noun with a plural in s: ``2.5 seconds``."""
    digits = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{digits} {one if number == 1 else f'{one}s'}"


def printable(text: str) -> str:
    """Reject text that could redraw a reviewer's terminal or reorder a sentence: controls, bidi marks, line breaks."""
    if not text.isprintable():
        raise ValueError("control, invisible and line-break characters are not allowed")
    return text
