"""What the attention modules with and without Transformer Engine have in common: the call, and what is said."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from charm_megatron.executor.self_check import CheckedLayer
from charm_megatron.log import Log
from charm_megatron.mcore.compat import training_arguments
from charm_megatron.mcore.limits import Layer, loss_notices, mask_of
from charm_megatron.units import numbered
from charm_megatron.workload import Mask, Workload

if TYPE_CHECKING:
    from charm_megatron.executor import AttentionRuntime


PREFIX = "charm-megatron: "
"""Of a line in a log that others write to as well."""


def log_to_stdout(line: str) -> None:
    """Prints beside Megatron's own log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Notices:
    """Logs each thing once in the life of a process, on rank 0 only."""

    def __init__(self, log: Log | None = log_to_stdout) -> None:
        self._log = log
        self._logged: set[str] = set()

    def say(self, line: str) -> None:
        """Logs a line."""
        if self._log is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self._log(f"{PREFIX}{line}")

    def once(self, key: str, lines: Callable[[], Iterable[str]]) -> None:
        """Logs `lines()` unless it has logged `key` before."""
        if self._log is None or key in self._logged:
            return
        self._logged.add(key)
        for line in lines():
            self.say(line)


class SplitAttention:
    """Attention over a sequence that is split over a group, as Megatron's modules call it."""

    def __init__(self, runtime: "AttentionRuntime", notices: Notices | None = None) -> None:
        self.runtime = runtime
        self.notices = notices or Notices(None)
        self.schedule_name: str | None = None
        """The schedule of the first call; None before it."""
        self._kinds: dict[str, list[int]] = {}
        """The layers of each kind, and who computes them, in words."""
        self._described: set[tuple[Any, ...]] = set()
        """What calls were like whose plan was logged."""

    def add_layer(self, layer: Layer, left_to: str = "") -> None:
        """A layer was built; `left_to` says who computes it and why, where that is not this attention."""
        window, config = layer.window, layer.config
        kind = f"window {window[0]},{window[1]}" if window else "no window"
        kind += (
            f", {config.num_attention_heads} on {config.num_query_groups or config.num_attention_heads} heads"
        )
        self._kinds.setdefault(f"{kind}: {left_to or 'computed by charm'}", []).append(layer.number)

    def __call__(
        self,
        layer: Layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask_type: Any,
        *,
        group: dist.ProcessGroup,
        softmax_scale: float,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Query [s, b, h, d], key [s, b, hk, d], value [s, b, hk, dv] -> [s, b, h*dv], in query's dtype.

        The tokens of this rank are those that Megatron gives it: the first and the last of 2 * cp_size
        chunks, counted from both ends (zigzag). `sink` [h]: Megatron's `softmax_offset`. Collective over `group`.
        """
        mask = mask_of(layer, attn_mask_type)
        kind = (query.shape[2:], value.shape[2:], query.dtype, mask)
        if kind not in self._described:
            self._described.add(kind)
            self._describe(layer, query, value, group, mask)
            self.notices.once("loss", lambda: loss_notices(layer.config, training_arguments()))
        checked = CheckedLayer(f"layer {layer.number}", self.notices.say)
        out = self.runtime.attention(
            query, key, value, group=group, mask=mask, softmax_scale=softmax_scale, sink=sink, checked=checked
        )
        return out.flatten(2)  # [s, b, h, dv] -> [s, b, h*dv]

    def _describe(
        self, layer: Layer, query: Tensor, value: Tensor, group: dist.ProcessGroup, mask: Mask
    ) -> None:
        """Logs what the first call of its kind will do. All ranks of the group plan it together here."""
        tokens, batch, heads, head_dim = query.shape
        kv_heads, head_dim_v = value.shape[2:]
        dtype = str(query.dtype).removeprefix("torch.")
        workload = Workload(batch, tokens * group.size(), heads, kv_heads, head_dim, head_dim_v, dtype, mask)
        receipt = self.runtime.receipt(group, workload, device=query.device)
        if self.schedule_name is None:
            self.schedule_name = receipt.plan.name
            self.notices.once("receipt", lambda: [*receipt.lines(), *self._layer_lines()])
        else:
            self.notices.say(f"layer {layer.number}, {workload.summary}: {receipt.schedule_line}")

    def _layer_lines(self) -> list[str]:
        """One line for each kind of layer that this rank has."""
        return [f"{numbered('layer', sorted(set(numbers)))}: {kind}" for kind, numbers in self._kinds.items()]
