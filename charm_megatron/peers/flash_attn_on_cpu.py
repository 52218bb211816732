"""A stand-in for the `flash_attn` package, which needs CUDA, so that libraries built on it run on a CPU.

It has the three functions that the peers call, with their arguments by position and by name, on `BlockOperators`.
Dropout, windows, softcap and ALiBi are refused. It costs one copy more than the package, since torch's operator cannot
write gradients into given buffers. Only for processes that do nothing but run a benchmark: other code in the process
would take it for the package.

Legend of shapes: q, out, dout, dq [b, s_q, h, d]; k, v, dk, dv [b, s_k, h_k, d]; lse float32 [b, h, s_q].
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from charm_megatron.errors import ConfigError
from charm_megatron.peers.blocks import BlockOperators

PACKAGE = "flash_attn"
INTERFACE = "flash_attn.flash_attn_interface"

# The first release whose functions have these arguments in this order; peers ask for it.
VERSION = "2.7.0"


def why_not_install() -> str | None:
    """Why the stand-in must stay out, one sentence; None where it may come in or is in already."""
    here = sys.modules.get(PACKAGE)
    if here is not None:
        return None if _is_stand_in(here) else "flash_attn itself is imported, and takes no CPU tensors"
    if torch.cuda.is_available() and find_spec(PACKAGE) is not None:
        return "flash_attn itself is installed beside a CUDA device, and takes no CPU tensors"
    return None


def install() -> BlockOperators:
    """Makes `import flash_attn` find the stand-in in this process; returns what computes its blocks."""
    obstacle = why_not_install()
    if obstacle:
        raise ConfigError(f"no stand-in for flash_attn: {obstacle}")
    if PACKAGE not in sys.modules:
        blocks = BlockOperators()
        interface = _interface(blocks)
        package = ModuleType(PACKAGE, __doc__)
        package.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
        package.__path__ = []
        vars(package).update(
            __version__=VERSION,
            flash_attn_interface=interface,
            flash_attn_func=interface.flash_attn_func,
            charm_megatron_blocks=blocks,
        )
        sys.modules[PACKAGE], sys.modules[INTERFACE] = package, interface
    found: BlockOperators = sys.modules[PACKAGE].charm_megatron_blocks
    return found


def _is_stand_in(module: ModuleType) -> bool:
    return hasattr(module, "charm_megatron_blocks")


def _interface(blocks: BlockOperators) -> ModuleType:
    """The module that has the functions: plain ones, as peers read their arguments with `inspect`."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        """Returns out, lse, and None for the probabilities and the random state."""
        _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        out, lse = _forward(blocks, q, k, v, causal, softmax_scale)
        return out, lse, None, None

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        """Fills dq, dk and dv. The package returns the row sums of dout * out, which no peer reads."""
        _refuse(dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
        gradients = _backward(blocks, dout, q, k, v, out, softmax_lse, causal, softmax_scale)
        for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
            buffer.copy_(gradient)

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """Attention of whole sequences, with autograd."""
        _refuse(dropout_p, *window_size, softcap, alibi_slopes)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out: Tensor = _Attention.apply(q, k, v, causal, scale, blocks)
        return out

    def varlen(*args: Any, **kwargs: Any) -> None:
        """Peers import two such functions beside what they use here."""
        raise NotImplementedError("the stand-in for flash_attn has no packed sequences")

    module = ModuleType(INTERFACE)
    module.__spec__ = ModuleSpec(INTERFACE, None)
    vars(module).update(
        _flash_attn_forward=_flash_attn_forward,
        _flash_attn_backward=_flash_attn_backward,
        flash_attn_func=flash_attn_func,
        _flash_attn_varlen_forward=varlen,
        _flash_attn_varlen_backward=varlen,
    )
    return module


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float, blocks: BlockOperators
    ) -> Tensor:
        out, lse = _forward(blocks, q, k, v, causal, softmax_scale)
        ctx.causal, ctx.softmax_scale, ctx.blocks = causal, softmax_scale, blocks
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,), (q, k, v, out, lse) = grads, ctx.saved_tensors
        gradients = _backward(ctx.blocks, dout, q, k, v, out, lse, ctx.causal, ctx.softmax_scale)
        return *gradients, None, None, None


def _forward(
    blocks: BlockOperators, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    _check_square(q, k, causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, d] -> [b, h, s, d]
    out, lse = blocks.forward(q, k, v, causal=causal, softmax_scale=softmax_scale)
    return out.transpose(1, 2), lse


def _backward(
    blocks: BlockOperators,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, ...]:
    _check_square(q, k, causal)
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [b, s, h, d] -> [b, h, s, d]
    gradients = blocks.backward(dout, q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale)
    return tuple(x.transpose(1, 2) for x in gradients)


def _check_square(q: Tensor, k: Tensor, causal: bool) -> None:
    """The package puts the diagonal of an oblong block at its lower right, torch's operator at its upper left."""
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError(
            f"the stand-in for flash_attn takes causal blocks as long as wide, not {q.shape[1]} x {k.shape[1]}"
        )


def _refuse(dropout_p: float, left: int, right: int, softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or (left, right) != (-1, -1) or softcap or alibi_slopes is not None:
        raise NotImplementedError("the stand-in for flash_attn has no dropout, windows, softcap or ALiBi")
