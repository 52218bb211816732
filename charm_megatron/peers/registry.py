"""Other libraries' context-parallel attention, to be timed beside our schedules on the same ranks and tensors.

All run as their packages ship them. Where one computes blocks by the `flash_attn` package, which needs CUDA, a stand-in
on torch's CPU operators takes its place (`flash_attn_on_cpu`), so that a peer differs from us in its schedule alone.

This module only describes, and imports no peer; `calls` runs them, `check` judges them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal

from charm_megatron.errors import ConfigError, nearest
from charm_megatron.sharding import make_sharding
from charm_megatron.workload import CAUSAL, NO_MASK, Mask, Workload

FULL_AND_CAUSAL = (NO_MASK, CAUSAL)
DTYPES = ("float32", "bfloat16", "float16")
MIN_RANKS = 2


@dataclass(frozen=True)
class TorchTemplate:
    """torch's own ring, of which `context_parallel` is made; `rotate` is its word for how KV travels."""

    rotate: Literal["alltoall", "allgather"]


@dataclass(frozen=True)
class Ringmaster:
    """`alltoall` is its word for a ring of point-to-point transfers."""

    schedule: Literal["alltoall", "allgather", "distflash"]


@dataclass(frozen=True)
class RingFlashAttn:
    schedule: Literal["ring", "zigzag", "stripe"]


@dataclass(frozen=True)
class Yunchang:
    """`ulysses` neighbouring ranks exchange heads, rings run across; None: all ranks exchange heads, no ring."""

    ulysses: int | None


type Library = TorchTemplate | Ringmaster | RingFlashAttn | Yunchang


@dataclass(frozen=True)
class Peer:
    """One schedule of one library, and what it takes.

    `package` is its name on PyPI, `module` what is imported. `layout` holds for causal attention; without a mask
    the order of tokens is free. `note` is what a reader of its times must know.
    """

    name: str
    package: str
    module: str
    library: Library
    layout: str = "contiguous"
    masks: tuple[Mask, ...] = FULL_AND_CAUSAL
    dtypes: tuple[str, ...] = DTYPES
    shares_kv_heads: bool = True
    needs_flash_attn: bool = False
    note: str = ""

    @property
    def version(self) -> str:
        """Version of the package installed here."""
        return version(self.package)

    @property
    def is_ring(self) -> bool:
        """Whether all its KV circulates through all ranks."""
        match self.library:
            case TorchTemplate(rotate):
                return rotate == "alltoall"
            case Ringmaster(schedule):
                return schedule == "alltoall"
            case RingFlashAttn():
                return True
            case Yunchang():
                return False

    @property
    def computes_with_ours(self) -> bool:
        """Whether its blocks are the operator of our `torch` kernel, and can be replaced by waits."""
        return not isinstance(self.library, Ringmaster)

    def ulysses(self, num_ranks: int) -> int:
        """How many ranks share out the heads; 1: heads stay together."""
        if not isinstance(self.library, Yunchang):
            return 1
        return self.library.ulysses or num_ranks


def _torch(name: str, rotate: Literal["alltoall", "allgather"], note: str) -> Peer:
    module = "torch.distributed.tensor.experimental._context_parallel._attention"
    return Peer(name, "torch", module, TorchTemplate(rotate), "zigzag", note=note)


_ON_STAND_IN = "on a stand-in for flash-attn, which copies each block's gradients once more"
_SOFTMAX = "on a CPU it computes blocks as a plain softmax in float32"


def _ringmaster(schedule: Literal["alltoall", "allgather", "distflash"], name: str, note: str = "") -> Peer:
    is_helped = schedule == "distflash"
    return Peer(
        name,
        "axolotl-ringmaster",
        "ringmaster",
        Ringmaster(schedule),
        masks=(CAUSAL,) if is_helped else FULL_AND_CAUSAL,
        shares_kv_heads=not is_helped,
        note=_SOFTMAX + note,
    )


# ring-flash-attn and the rings of yunchang add gradients up in float32: with float32 tensors that is the very buffer
# which the next block overwrites. Their plain rings moreover give dq in bfloat16 whatever they got.
_RING_DTYPES = ("bfloat16",)
_BALANCED_RING_DTYPES = ("bfloat16", "float16")


def _ring_flash_attn(schedule: Literal["ring", "zigzag", "stripe"], layout: str) -> Peer:
    is_plain = schedule == "ring"
    return Peer(
        f"ring_flash_attn_{schedule}",
        "ring-flash-attn",
        "ring_flash_attn",
        RingFlashAttn(schedule),
        layout,
        masks=FULL_AND_CAUSAL if is_plain else (CAUSAL,),
        dtypes=_RING_DTYPES if is_plain else _BALANCED_RING_DTYPES,
        needs_flash_attn=True,
        note=_ON_STAND_IN,
    )


def _yunchang(name: str, ulysses: int | None) -> Peer:
    return Peer(
        name,
        "yunchang",
        "yunchang",
        Yunchang(ulysses),
        "zigzag" if ulysses else "contiguous",
        dtypes=_RING_DTYPES if ulysses else DTYPES,
        needs_flash_attn=True,
        note=_ON_STAND_IN,
    )


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        _torch("torch_ring", "alltoall", "rotates KV by an all-to-all in which each rank has one receiver"),
        _torch("torch_allgather", "allgather", "torch's default; its backward still rotates dk and dv"),
        _ringmaster("alltoall", "ringmaster_ring", ", sends KV in float32, and shared KV heads expanded"),
        _ringmaster(
            "allgather", "ringmaster_allgather", ", and over gloo all-reduces dk and dv of the whole sequence"
        ),
        _ringmaster("distflash", "ringmaster_distflash"),
        _ring_flash_attn("ring", "contiguous"),
        _ring_flash_attn("zigzag", "zigzag"),
        _ring_flash_attn("stripe", "striped"),
        _yunchang("yunchang_ulysses", None),
        _yunchang("yunchang_usp_2", 2),
    )
}


def peer_named(name: str) -> Peer:
    if name not in PEERS:
        raise ConfigError(f"unknown peer {name!r}{nearest(name, PEERS)}")
    return PEERS[name]


def why_not(peer: Peer, workload: Workload, num_ranks: int, *, is_modelled: bool = False) -> str | None:
    """Why a peer cannot run a workload, one sentence; None where it can. Imports no peer."""
    return (
        _why_not_here(peer)
        or _why_not_tensors(peer, workload)
        or _why_not_ranks(peer, workload, num_ranks)
        or (
            f"{peer.package} computes its blocks itself, so they cannot be replaced by waits"
            if is_modelled and not peer.computes_with_ours
            else None
        )
    )


def _why_not_here(peer: Peer) -> str | None:
    try:
        is_there = find_spec(peer.module) is not None
    except ModuleNotFoundError:  # a package on the way to the module
        is_there = False
    if not is_there:
        if peer.package == "torch":
            return f"this torch has no module {peer.module}"
        return f"{peer.package} is not installed: pip install 'charm-megatron[peers]'"
    if peer.needs_flash_attn:
        from charm_megatron.peers.flash_attn_on_cpu import why_not_install

        return why_not_install()
    return None


def _why_not_tensors(peer: Peer, workload: Workload) -> str | None:
    if workload.mask not in peer.masks:
        return f"takes mask {' or '.join(map(str, peer.masks))}, not {workload.mask}"
    if workload.dtype not in peer.dtypes:
        return f"is right in {', '.join(peer.dtypes)} only, not in {workload.dtype}"
    if workload.head_dim != workload.head_dim_v:
        return f"takes v as wide as q and k, not {workload.head_dim_v} and {workload.head_dim}"
    if workload.num_heads != workload.num_kv_heads and not peer.shares_kv_heads:
        return f"takes a KV head for each query head, not {workload.num_kv_heads} for {workload.num_heads}"
    return None


def _why_not_ranks(peer: Peer, workload: Workload, num_ranks: int) -> str | None:
    if num_ranks < MIN_RANKS:
        return f"runs on {MIN_RANKS} ranks or more, not on {num_ranks}"
    apart = peer.ulysses(num_ranks)
    if num_ranks % apart:
        return f"shares heads out over {apart} ranks each, which do not divide {num_ranks} ranks"
    for heads, what in ((workload.num_heads, "query"), (workload.num_kv_heads, "KV")):
        if heads % apart:
            return f"shares heads out over {apart} ranks, but {heads} {what} heads do not divide"
    multiple = num_ranks * (2 if peer.layout == "zigzag" else 1)
    if workload.seq_len % multiple:
        return f"takes a multiple of {multiple} tokens, not {workload.seq_len}"
    return None


def tokens_of(peer: Peer, workload: Workload, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The tokens that one rank holds, in order.

    Ranks that exchange heads hold consecutive parts of one shard of the rings that run across.
    """
    apart = peer.ulysses(num_ranks)
    shard = make_sharding(peer.layout, num_ranks // apart, workload.seq_len).tokens_of(rank // apart)
    size = len(shard) // apart
    first = rank % apart * size
    return shard[first : first + size]
