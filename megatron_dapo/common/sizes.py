"""Arithmetic of sizes, and how sizes in bytes are shown."""

KB = 10**3
MB = 10**6
GB = 10**9
MIB = 2**20
GIB = 2**30


def ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple of `multiple`."""
    return ceil_div(number, multiple) * multiple


def format_bytes(num_bytes: float, digits: int = 2) -> str:
    """Return a size with its unit, as in "12.35 MB": powers of ten, as disks and GPUs are sold.

    digits: after the point.
    """
    for unit, factor in (("GB", GB), ("MB", MB), ("kB", KB)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"


def format_gb(num_bytes: float) -> str:
    """Return the number of gigabytes, for a line that names the unit once; small values get two
    digits."""
    return f"{num_bytes / GB:.1f}" if num_bytes >= 0.05 * GB else f"{num_bytes / GB:.2g}"
