"""Numbers in front of what they count, for people. Pure text."""


def counted(number: float, one: str) -> str:
    """Return a number, with at most six digits of a fraction, and a noun with a plural in s: ``2.5 seconds``."""
    digits = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{digits} {one if number == 1 else f'{one}s'}"
