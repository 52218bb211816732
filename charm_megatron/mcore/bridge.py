"""What the attention modules with and without Transformer Engine have in common: the call, and what is said."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from charm_megatron.log import Log
from charm_megatron.mcore.compat import training_arguments
from charm_megatron.mcore.limits import Layer, loss_notices, mask_of
from charm_megatron.workload import Mask, Workload

if TYPE_CHECKING:
    from charm_megatron.executor import AttentionRuntime


def log_to_stdout(line: str) -> None:
    """Prints beside Megatron's own log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Notices:
    """Logs each thing once in the life of a process, on rank 0 only."""

    def __init__(self, log: Log | None = log_to_stdout) -> None:
        self._log = log
        self._logged: set[str] = set()

    def once(self, key: str, lines: Callable[[], Iterable[str]]) -> None:
        """Logs `lines()` unless it has logged `key` before."""
        if self._log is None or key in self._logged:
            return
        self._logged.add(key)
        if not dist.is_initialized() or dist.get_rank() == 0:
            for line in lines():
                self._log(f"charm-megatron: {line}")


class SplitAttention:
    """Attention over a sequence that is split over a group, as Megatron's modules call it."""

    def __init__(self, runtime: "AttentionRuntime", notices: Notices | None = None) -> None:
        self.runtime = runtime
        self.notices = notices or Notices(None)
        self.schedule_name: str | None = None
        """The schedule of the first call; None before it."""

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
    ) -> Tensor:
        """Query [s, b, h, d], key [s, b, hk, d], value [s, b, hk, dv] -> [s, b, h*dv], in query's dtype.

        The tokens of this rank are those that Megatron gives it: the first and the last of 2 * cp_size
        chunks, counted from both ends (zigzag). Collective over `group`.
        """
        mask = mask_of(layer, attn_mask_type)
        out = self.runtime.attention(query, key, value, group=group, mask=mask, softmax_scale=softmax_scale)

        if self.schedule_name is None:
            self._describe(query, value, group, mask)
            self.notices.once("loss", lambda: loss_notices(layer.config, training_arguments()))
        return out.flatten(2)  # [s, b, h, dv] -> [s, b, h*dv]

    def _describe(self, query: Tensor, value: Tensor, group: dist.ProcessGroup, mask: Mask) -> None:
        """Logs what the first call did. Its plan is made, so that this asks no other rank."""
        tokens, batch, heads, head_dim = query.shape
        kv_heads, head_dim_v = value.shape[2:]
        dtype = str(query.dtype).removeprefix("torch.")
        workload = Workload(batch, tokens * group.size(), heads, kv_heads, head_dim, head_dim_v, dtype, mask)
        receipt = self.runtime.receipt(group, workload, device=query.device)
        self.schedule_name = receipt.plan.name
        self.notices.once("receipt", receipt.lines)
