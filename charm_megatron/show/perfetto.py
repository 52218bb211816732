"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing show.

One process a rank, with a thread each for what it computes, sends inside its domain, and sends across. An arrow
leads from each transfer to the first block that its receiver begins after the arrival. Times are microseconds.
"""

from bisect import bisect_left
from collections import defaultdict
from typing import Any

from charm_megatron.cost.spans import AttendSpan, Span, Timeline, TransferSpan

THREADS = {"attend": "computes", "inside": "sends inside its domain", "across": "sends across domains"}
TraceEvent = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The JSON object of the trace."""
    events = _names(len(timeline.busy_s))
    blocks: dict[int, list[float]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        events.append(_slice(span))
        if isinstance(span, AttendSpan):
            blocks[span.rank].append(span.start_s)
    for number, span in enumerate(timeline.transfers, start=1):
        at = bisect_left(blocks[span.peer], span.end_s)
        if at < len(blocks[span.peer]):
            events += _arrow(number, span, blocks[span.peer][at])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(num_ranks: int) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    for rank in range(num_ranks):
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        ]
        for thread, label in enumerate(THREADS.values()):
            place = {"pid": rank, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": label}})
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}})
    return events


def _thread(span: Span) -> int:
    return list(THREADS).index(span.kind)


def _slice(span: Span) -> TraceEvent:
    event = {
        "ph": "X",
        "pid": span.rank,
        "tid": _thread(span),
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
    }
    match span:
        case AttendSpan():
            return {**event, "name": f"attend {span.label}", "cat": span.kind, "args": {}}
        case TransferSpan():
            return {
                **event,
                "name": f"send {span.peer} {span.label}",
                "cat": "result" if span.payload.is_result else span.kind,
                "args": {"from": span.rank, "to": span.peer},
            }


def _arrow(number: int, span: TransferSpan, block_start_s: float) -> list[TraceEvent]:
    """From the transfer to the block. It must begin inside the transfer's slice, so at its start."""
    same = {"cat": "transfer", "name": span.label, "id": number}
    return [
        {"ph": "s", **same, "pid": span.rank, "tid": _thread(span), "ts": span.start_s * 1e6},
        {"ph": "f", "bp": "e", **same, "pid": span.peer, "tid": 0, "ts": block_start_s * 1e6},
    ]
