"""Stands in for the CUDA device that `megatron.training` assumes, on machines that have none.

Megatron offers a CPU path in places (`allow_no_cuda`, `--use-cpu-initialization`, gloo), but its loop still
names the device: `device="cuda"` in the training step, the clipping of gradients, the schedules, the timers.
Where CUDA is available nothing here does anything.

`stand_in_for_cuda()` covers the calling thread only, as a torch function mode does; on CPU, autograd runs
backward in the thread that called it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from charm_megatron.mcore.monkeypatch import wrapped

CPU = torch.device("cpu")


class Patch(NamedTuple):
    """One attribute that is replaced, and why. `replacement` gets the original and returns the new one."""

    target: str
    reason: str
    replacement: Callable[[Any], Any]


def _always(value: Any) -> Callable[[Any], Any]:
    """Ignores the original."""
    return lambda original: value


# Functions of our own, also where torch.cpu has the same one: torch._dynamo keeps a handler for each function
# object, and fails on import where one object is found under two names.
PATCHES: Sequence[Patch] = (
    Patch(
        "torch.cuda:current_device",
        "buffers of DDP, rotary embeddings and reductions are made on it",
        _always(lambda: CPU),
    ),
    Patch("torch.cuda:synchronize", "timers and the checkpoint writer", _always(lambda device=None: None)),
    Patch("torch.cuda:Stream", "the wrapping in DDP", _always(torch.cpu.Stream)),
    Patch(
        "torch.cuda:current_stream",
        "the wrapping in DDP",
        _always(lambda device=None: torch.cpu.current_stream()),
    ),
    Patch("torch.cuda:stream", "the wrapping in DDP", _always(lambda stream: torch.cpu.stream(stream))),
    Patch(
        "torch.cuda:manual_seed",
        "the CPU generator takes the place of the CUDA one, in dropout and tensor parallelism",
        _always(torch.default_generator.manual_seed),
    ),
    Patch(
        "torch.cuda:get_rng_state",
        "checkpoints hold the state of the generator",
        _always(lambda device=None: torch.get_rng_state()),
    ),
    Patch(
        "torch.cuda.random:get_rng_state",
        "the same function under its other name",
        _always(lambda device=None: torch.get_rng_state()),
    ),
    Patch(
        "torch.cuda:set_rng_state",
        "checkpoints hold the state of the generator",
        _always(lambda state, device=None: torch.set_rng_state(state)),
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        "recomputation and tensor parallelism switch between states of the generator",
        _always(lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        "a queue's server that is spawned, as CUDA demands, imports torch and Megatron anew for each rank; "
        "a forked one saves seconds a run",
        lambda original: partial(original, mp_mode="fork"),
    ),
    Patch(
        "megatron.training.arguments:get_device_arch_version",
        "the check of the flags asks for the GPU generation; 10 makes no demands on the environment",
        _always(lambda: 10),
    ),
    Patch(
        "megatron.training.training:initialize_megatron",
        "it takes allow_no_cuda, but pretrain does not pass it on",
        lambda original: partial(original, allow_no_cuda=True),
    ),
    Patch(
        "megatron.training.training:set_jit_fusion_options",
        "its warm-up draws random numbers, as many as the local sequence is long, from the one generator left; "
        "the initial weights would depend on the context-parallel size",
        _always(lambda *args, **kwargs: None),
    ),
)


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites what names the CUDA device in a call: `device="cuda"`, `.cuda()`, pinned memory, `.type()`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            # The optimizer and the clipping compare it with "torch.cuda.FloatTensor".
            return out.replace("torch.", "torch.cuda.", 1)
        return out


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


@contextmanager
def stand_in_for_cuda() -> Iterator[None]:
    """Lets `megatron.training` run on the CPU inside the block. Does nothing where CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_CudaMeansCpu())
        for patch in PATCHES:
            stack.enter_context(wrapped(patch.target, patch.replacement))
        yield


def transformer_engine_assumed() -> AbstractContextManager[None]:
    """Lets Megatron's check of flags pass on a machine without Transformer Engine, for one that has it.

    The check looks for its fused rotary embedding. Nothing may be run inside the block.
    """
    target = "megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb"
    return wrapped(target, lambda original: original or NotImplemented)


def initialize_groups(args: Any) -> None:
    """Makes the process groups, and seeds the generators, where Megatron would not: without a CUDA device.

    `initialize_megatron` skips both where it counts no device, and keeps those that it finds. The arguments
    are those that it would pass. Does nothing where CUDA is available.
    """
    if torch.cuda.is_available():
        return
    from megatron.core import mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        args.distributed_backend, timeout=timedelta(minutes=args.distributed_timeout_minutes)
    )
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    model_parallel_cuda_manual_seed(args.seed)
