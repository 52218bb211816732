"""Numbers as people read them."""

from collections.abc import Sequence


def bytes_text(num_bytes: float) -> str:
    """Returns "0 B", "1.0 KiB", "1.5 MiB" and so on up to TiB: the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Returns "rank 3", or "ranks 0-3, 6" for the noun "rank" and ascending `numbers`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    listed = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"
