"""Seconds, bytes, counts, names and types of numbers as people read them."""

import re
from math import ceil, floor
from typing import Literal

__all__ = [
    "format_bytes",
    "format_dtype",
    "format_range",
    "format_seconds",
    "parse_bytes",
    "plural",
    "printable",
    "quote",
]


def format_seconds(seconds: float) -> str:
    """Up to four digits with the unit that suits.

    >>> [format_seconds(s) for s in (0.0, 9.052e-5, 0.0123, 0.99999, 2.5)]
    ['0 s', '90.52 us', '12.3 ms', '1 s', '2.5 s']
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.99995 * scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns" if seconds else "0 s"


def format_range(low_s: float, high_s: float) -> str:
    """Two times in the unit of the larger.

    >>> format_range(0.0123, 0.0125), format_range(0.99, 2.5)
    ('12.3 to 12.5 ms', '0.99 to 2.5 s')
    """
    number, _, unit = format_seconds(high_s).partition(" ")
    scale = high_s / float(number) if float(number) else 1.0
    return f"{low_s / scale:.4g} to {number} {unit}"


def format_bytes(num_bytes: float, to: Literal["nearest", "up", "down"] = "nearest") -> str:
    """Three digits and decimal units, as link rates have; what is needed is rounded up, and what there is down.

    >>> [format_bytes(b) for b in (0, 4000, 102_228_128, 999_600_000)]
    ['0 B', '4 kB', '102 MB', '1 GB']
    >>> format_bytes(102_228_128, "up"), format_bytes(999_900, "up"), format_bytes(102_928_128, "down")
    ('103 MB', '1 MB', '102 MB')
    """
    if to != "nearest":
        whole = ceil(num_bytes) if to == "up" else floor(num_bytes)
        step = 10 ** max(0, len(str(whole)) - 3)
        num_bytes = (whole + (step - 1 if to == "up" else 0)) // step * step
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def parse_bytes(text: str) -> int:
    """Read a size: bytes, or with a decimal unit, or one of powers of 1024.

    >>> parse_bytes("40GiB"), parse_bytes("1.5 MB"), parse_bytes("800")
    (42949672960, 1500000, 800)

    Raises:
        ValueError: where it is none.
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(?:([kKMGT])(i?))?B?", text.strip())
    if found is None:
        raise ValueError(f"{quote(text)}, expected a size such as 40GiB or 512MB")
    number, letter, binary = found.groups()
    power = " KMGT".index(letter.upper()) if letter else 0
    return round(float(number) * float(1024 if binary else 1000) ** power)


def format_dtype(dtype: object) -> str:
    """Return the name of one of torch's types of numbers, without torch's.

    >>> format_dtype("torch.bfloat16")
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def plural(count: int, one: str, many: str | None = None) -> str:
    """Say how many there are of something.

    >>> plural(1, "message"), plural(2, "message"), plural(0, "strategy", "strategies")
    ('1 message', '2 messages', '0 strategies')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def printable(text: str) -> str:
    r"""Return the text as one line that a terminal shows and does not obey, and that UTF-8 can hold.

    Line breaks, escape sequences, marks that turn the direction of writing round and halves of characters are shown as
    Python writes them.

    >>> print(printable("café \x1b[31mred\n\ud800"))
    café \x1b[31mred\n\ud800
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def quote(value: object, limit: int = 60) -> str:
    """Show any value in a one-line message: escaped, and cut where it is long.

    >>> print(quote("a" * 100, limit=10))
    'aaaaaaaa…
    """
    try:
        shown = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        shown = f"a very large {type(value).__name__}"
    except RecursionError:
        shown = f"a {type(value).__name__} nested too deeply"
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
