"""Seeds for things that must not share one."""

import hashlib

__all__ = ["mixed_seed"]


def mixed_seed(*parts: int) -> int:
    """Return a seed that depends on all parts.

    Of 32 bits: torch's generators on the CPU look at no more, so sums and products of parts would meet.

    >>> mixed_seed(0, 1), mixed_seed(1, 0), mixed_seed(2**40, 1)
    (2781527649, 3813156222, 4149805216)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
