"""Builds the real classes on a machine without a GPU, and stands in for the kernels that need one."""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from charm_megatron.mcore.bridge import Notices, SplitAttention
from charm_megatron.mcore.te_attention import te_core_attention_class
from charm_megatron.workload import Workload

Values = dict[str, Any]


class Stock:
    """Holds Megatron's class where the installation does not look for it: a module's own name would be bound anew."""

    cls = te.TEDotProductAttention


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@contextlib.contextmanager
def constructible() -> Iterator[None]:
    """Transformer Engine asks for a CUDA device, and Megatron makes a stream, when a layer is built."""
    with (
        mock.patch.object(te.TEDotProductAttention, "cp_stream", object()),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
    ):
        yield


def config_of(cp_size: int, **changes: Any) -> TransformerConfig:
    sizes: Values = {
        "num_layers": 2,
        "hidden_size": HEADS * HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS,
        "context_parallel_size": cp_size,
        "attention_dropout": 0.0,
        "cp_comm_type": "charm",
        "cuda_graph_modules": [],  # its default is deprecated, and warns
    }
    return TransformerConfig(**{**sizes, **changes})


@dataclasses.dataclass
class FakeGroup:
    """A process group of one process that says it has more ranks."""

    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


class FakeRuntime:
    """Answers with the query, its heads cut to the width of the values."""

    def __init__(self) -> None:
        self.asked: Values = {}

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **asked: Any) -> Tensor:
        self.asked = asked
        return query[..., : value.shape[-1]]

    def receipt(self, group: Any, workload: Workload, **_: Any) -> Any:
        plan = SimpleNamespace(name="fake")
        lines = [f"receipt for {workload.seq_len} tokens"]
        return SimpleNamespace(plan=plan, lines=lambda: lines, schedule_line="fake, as set")


class Built:
    """A layer on a fake group, with what it asked of us, of its parent, and what it said."""

    def __init__(
        self, cp_size: int = 2, strict: bool = False, config: Values | None = None, **arguments: Any
    ):
        self.runtime = FakeRuntime()
        self.said: list[str] = []
        notices = Notices(self.said.append)
        self.cls = te_core_attention_class(SplitAttention(self.runtime, notices), strict)  # type: ignore[arg-type]
        self.group = FakeGroup(cp_size)
        given = {
            "config": config_of(cp_size, **(config or {})),
            "layer_number": 1,
            "attn_mask_type": AttnMaskType.causal,
            "attention_type": "self",
            "cp_comm_type": "charm",
            "pg_collection": SimpleNamespace(tp=None, cp=self.group, hcp=None),
        }
        with constructible(), group_ranks():
            self.layer = self.cls(**{**given, **arguments})

    def call(
        self,
        query_shape: tuple[int, ...] = (6, 2, HEADS, HEAD_DIM),
        num_keys: int | None = None,
        **arguments: Any,
    ) -> Values:
        """Calls the layer; gives the keyword arguments that reached Transformer Engine, none where it was us."""
        query = torch.randn(query_shape)
        key = torch.randn(num_keys or query_shape[0], *query_shape[1:-2], KV_HEADS, query_shape[-1])
        given: Values = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}
        reached: Values = {}

        def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
            reached.update(kwargs, cp_comm_type=module.cp_comm_type, cp_group=module.cp_group)
            return query.flatten(-2)

        with mock.patch.object(Stock.cls.__bases__[0], "forward", forward), group_ranks():
            self.layer(query, key, key, **{**given, **arguments})
        return reached


@contextlib.contextmanager
def group_ranks() -> Iterator[None]:
    """Fake groups have global ranks too."""
    with mock.patch("torch.distributed.get_process_group_ranks", lambda group: list(range(group.size()))):
        yield
