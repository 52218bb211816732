"""Calls the peers of `registry` on this rank's shard, forward and backward apart, on tensors in their own layouts.

Legend of shapes: ours [s, b, h, d]; theirs [b, s, h, d] or [b, h, s, d], with h_k in place of h for k and v. No
function here is called before `why_not` has agreed.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.kernels import BlockKernel
from charm_megatron.peers import flash_attn_on_cpu
from charm_megatron.peers.blocks import BlockOperators
from charm_megatron.peers.protocol import Implementation
from charm_megatron.peers.registry import Peer, RingFlashAttn, Ringmaster, TorchTemplate, Yunchang
from charm_megatron.workload import Workload

type Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PeerCall:
    """One peer on one group. `blocks`, where the peer leaves blocks to others, compute with `kernel` if it is given."""

    peer: Peer
    start: Callable[[Tensor, Tensor, Tensor, Tensor], Implementation]
    blocks: BlockOperators
    kernel: BlockKernel | None = None

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Implementation:
        """Copies this rank's q, k, v and dout [s, b, h, d] into the peer's layout; not to be timed."""
        run = self.start(*(x.detach() for x in (q, k, v, dout)))
        return _WithKernel(run, self.blocks, self.kernel)


def make_call(
    peer: Peer, group: dist.ProcessGroup, workload: Workload, kernel: BlockKernel | None = None
) -> PeerCall:
    """Imports a peer, and makes the groups that it needs; all ranks of `group` call together.

    `kernel` replaces torch's operators, as with modelled computation. Puts the stand-in for flash_attn into this
    process where the peer asks for it.
    """
    assert kernel is None or peer.computes_with_ours, peer.name
    blocks = flash_attn_on_cpu.install() if peer.needs_flash_attn else BlockOperators()
    scale, causal = workload.softmax_scale, workload.mask.is_causal
    with _unheard():
        match peer.library:
            case TorchTemplate(rotate):
                template = _Template(rotate, group, causal, scale, blocks)
                return PeerCall(peer, lambda *shard: _TemplateRun(template, *shard), blocks, kernel)
            case Ringmaster(schedule):
                attend = _ringmaster(schedule, group, causal, scale)
                return PeerCall(peer, lambda *shard: _AutogradRun(attend, True, *shard), blocks)
            case RingFlashAttn(schedule):
                attend = _ring_flash_attn(schedule, group, causal, scale)
            case Yunchang(ulysses):
                attend = _yunchang(ulysses, group, causal, scale)
    return PeerCall(peer, lambda *shard: _AutogradRun(attend, False, *shard), blocks, kernel)


@dataclass
class _WithKernel:
    """A run whose blocks are computed by a kernel of ours."""

    run: Implementation
    blocks: BlockOperators
    kernel: BlockKernel | None

    def forward(self) -> None:
        with self.blocks.replaced(self.kernel):
            self.run.forward()

    def backward(self) -> None:
        with self.blocks.replaced(self.kernel):
            self.run.backward()

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.run.results()


type AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class _AutogradRun:
    """A peer that is a function with autograd: [b, s, h, d], or views of that as [b, h, s, d], to out [b, s, h, d].

    Views, because that is what a model that projects to [b, s, h, d] hands on.
    """

    def __init__(
        self, attend: AttentionFunction, heads_first: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
    ):
        self.attend, self.heads_first = attend, heads_first
        batch_first = [
            x.transpose(0, 1).contiguous() for x in (q, k, v, dout)
        ]  # [s, b, h, d] -> [b, s, h, d]
        *operands, self.dout = batch_first
        if heads_first:
            operands = [x.transpose(1, 2) for x in operands]  # [b, s, h, d] -> [b, h, s, d]
        self.operands = [x.requires_grad_() for x in operands]
        self.out: Tensor
        self.gradients: tuple[Tensor, ...]

    def forward(self) -> None:
        with torch.enable_grad():
            self.out = self.attend(*self.operands)

    def backward(self) -> None:
        self.gradients = torch.autograd.grad(self.out, self.operands, self.dout)

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradients = [x.transpose(1, 2) if self.heads_first else x for x in self.gradients]
        out, dq, dk, dv = (
            x.detach().transpose(0, 1) for x in (self.out, *gradients)
        )  # [b, s, ..] -> [s, b, ..]
        return out, dq, dk, dv


@dataclass(frozen=True)
class _Template:
    """torch's functions and what they are called with besides tensors."""

    rotate: str
    group: dist.ProcessGroup
    causal: bool
    scale: float
    blocks: BlockOperators
    torchs: ModuleType = field(
        default_factory=lambda: import_module(
            "torch.distributed.tensor.experimental._context_parallel._attention"
        )
    )

    @contextmanager
    def options(self) -> Iterator[None]:
        """torch keeps them per process. Its balanced schedule, for tokens in zigzag, is for causal attention only."""
        options = self.torchs._cp_options
        before = options.enable_load_balance, options.rotate_method
        options.enable_load_balance = self.causal
        self.torchs.set_rotate_method(self.rotate)
        try:
            yield
        finally:
            options.enable_load_balance, options.rotate_method = before

    def block_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        return self.blocks.forward(query, key, value, causal=is_causal, softmax_scale=self.scale)

    def block_backward(
        self,
        *,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
    ) -> Gradients:
        return self.blocks.backward(
            grad_out, query, key, value, out, logsumexp, causal=is_causal, softmax_scale=self.scale
        )


ROWS_DIM = 2  # of [b, h, s, d]


class _TemplateRun:
    """torch's template, whose two passes are plain functions over [b, h, s, d]."""

    def __init__(self, template: _Template, q: Tensor, k: Tensor, v: Tensor, dout: Tensor):
        self.template = template
        # [s, b, h, d] -> [b, h, s, d]
        self.q, self.k, self.v, self.dout = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v, dout))
        self.out: Tensor
        self.lse: Tensor
        self.gradients: Gradients

    def forward(self) -> None:
        its = self.template
        with its.options():
            self.out, self.lse, *_ = its.torchs._templated_ring_attention(
                its.group, ROWS_DIM, its.block_forward, self.q, self.k, self.v, is_causal=its.causal
            )

    def backward(self) -> None:
        its = self.template
        with its.options():
            dq, dk, dv, *_ = its.torchs._templated_ring_attention_backward(
                its.group,
                ROWS_DIM,
                its.block_backward,
                grad_out=self.dout,
                grad_out_name="grad_out",
                query=self.q,
                key=self.k,
                value=self.v,
                out=self.out,
                logsumexp=self.lse,
                is_causal=its.causal,
            )
        self.gradients = dq, dk, dv

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # [b, h, s, d] -> [s, b, h, d]
        out, dq, dk, dv = (x.permute(2, 0, 1, 3) for x in (self.out, *self.gradients))
        return out, dq, dk, dv


def _ringmaster(schedule: str, group: dist.ProcessGroup, causal: bool, scale: float) -> AttentionFunction:
    if schedule == "distflash":
        distflash = import_module("ringmaster.ring.distflash").distflash_attention
        return lambda q, k, v: distflash(q, k, v, group=group, scaling=scale)
    ring = import_module("ringmaster.ring.loop").ring_attention
    settings: dict[str, Any] = {
        "group": group,
        "causal": causal,
        "scaling": scale,
        "dropout": 0.0,
        "provider": "math",  # of its kernels the one that runs on a CPU
        "attn_implementation": "math",
        "rotate_method": import_module("ringmaster.config").RotateMethod(schedule),
    }
    return lambda q, k, v: ring(q, k, v, **settings)


def _ring_flash_attn(
    schedule: str, group: dist.ProcessGroup, causal: bool, scale: float
) -> AttentionFunction:
    names = {
        "ring": ("ring_flash_attn", "ring_flash_attn_func"),
        "zigzag": ("zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func"),
        "stripe": ("stripe_flash_attn", "stripe_flash_attn_func"),
    }
    module, function = names[schedule]
    attend = getattr(_import_alone("ring_flash_attn", module), function)
    return lambda q, k, v: attend(q, k, v, softmax_scale=scale, causal=causal, group=group)


def _import_alone(package: str, name: str) -> ModuleType:
    """Imports one module of a package without the package's own `__init__`.

    That of ring-flash-attn imports its adapter for transformers, a package that it does not ask for on installation.
    """
    if package not in sys.modules:
        spec = find_spec(package)
        assert spec is not None, package
        bare = ModuleType(package)
        bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations or ())
        sys.modules[package] = bare
    return import_module(f"{package}.{name}")


def _yunchang(ulysses: int | None, group: dist.ProcessGroup, causal: bool, scale: float) -> AttentionFunction:
    yunchang = import_module("yunchang")
    fa = import_module("yunchang.kernels").AttnType.FA
    num_ranks, settings = group.size(), {"softmax_scale": scale, "causal": causal}
    if ulysses is None:
        exchange = yunchang.UlyssesAttention(sequence_process_group=group, attn_type=fa)
        return lambda q, k, v: exchange(q, k, v, **settings)
    assert num_ranks == dist.get_world_size(), "yunchang makes its groups of all ranks of the job"
    yunchang.set_seq_parallel_pg(ulysses, num_ranks // ulysses, dist.get_rank(), num_ranks)
    # The module keeps the groups just made; the next call makes its own.
    hybrid = yunchang.LongContextAttention(ring_impl_type="zigzag" if causal else "basic", attn_type=fa)
    return lambda q, k, v: hybrid(q, k, v, **settings)


@contextmanager
def _unheard() -> Iterator[None]:
    """Peers warn at import of what is absent or deprecated: no news for those who time them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
