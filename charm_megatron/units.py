"""Numbers as people read them."""


def bytes_text(num_bytes: float) -> str:
    """Returns "0 B", "1.0 KiB", "1.5 MiB" and so on up to TiB: the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
