"""Numbers in front of what they count, for people. Pure text."""


def counted(number: float, one: str) -> str:
    """Return a number with its noun: ``1 second``, ``0 seconds``, ``2.5 seconds``.

    Args:
        number: a fraction is shown with at most six digits.
        one: the noun in its singular, of those whose plural ends in s.
    """
    digits = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{digits} {one if number == 1 else f'{one}s'}"
