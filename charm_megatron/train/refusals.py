"""Values of Megatron's flags that its own checks let pass, and that end its ranks with a traceback later, or never.

Names and values are those of Megatron's namespace of arguments.
"""

import math
from collections.abc import Mapping
from typing import Any

from charm_megatron.errors import ConfigError

MOST = 1_000_000_000
"""Iterations or samples: Megatron holds an index of all samples in memory, 8 bytes each or more."""

LEAST: Mapping[str, int] = {
    "train_iters": 1,
    "train_samples": 1,
    "num_layers": 1,
    "hidden_size": 1,
    "num_attention_heads": 1,
    "seq_length": 1,
    "micro_batch_size": 1,
    "save_interval": 1,
    "eval_interval": 1,
    "log_interval": 1,
    "exit_interval": 1,
    "eval_iters": 0,
    "seed": 1,
    "distributed_timeout_minutes": 1,
}
"""Numbers, and how small they may be."""


def check_numbers(args: Any) -> None:
    """Raises `ConfigError` for a number out of its range. `args` need not be validated."""
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"megatron.{name} must be at least {least}, but is {value}")
        if value is not None and name in ("train_iters", "train_samples") and value > MOST:
            raise ConfigError(f"megatron.{name} must be at most {MOST:,}, but is {value}")


def check_split(split: str) -> None:
    """Raises `ConfigError` unless `split` gives the training part something, and no part less than nothing.

    Megatron reads what looks like numbers and passes over the rest, signs too.
    """
    try:
        parts = [float(word) for word in split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(0 <= part < math.inf for part in parts) or not parts[0]:
        raise ConfigError(
            f"megatron.split must be percentages for training, validation and test, such as 90,5,5, but is {split!r}"
        )


def check_together(args: Any, cuda: bool) -> None:
    """Raises `ConfigError` for settings that do not work together, or not on a CPU. `args` need not be validated."""
    tp, pp, cp = (
        getattr(args, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")
    )
    moe_ranks = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    if args.use_tp_pp_dp_mapping and pp > 1 and tp * cp != moe_ranks:
        raise ConfigError(
            f"megatron.use_tp_pp_dp_mapping with {pp} pipeline stages needs tensor x context parallel size, {tp * cp}, "
            f"to be expert tensor x expert model parallel size, {moe_ranks}; leave it out"
        )
    if args.experimental_attention_variant and args.transformer_impl == "local":
        raise ConfigError(
            f"megatron.experimental_attention_variant {args.experimental_attention_variant!r} needs Transformer Engine "
            f"(transformer_impl transformer_engine); leave it out"
        )
    if args.attention_backend.name == "local":
        raise ConfigError(
            "megatron.attention_backend 'local' takes the place of the attention itself; leave it out"
        )
    if cuda:
        return
    for name in ("use_megatron_fsdp", "use_torch_fsdp2", "sequence_parallel"):
        if getattr(args, name):
            raise ConfigError(f"megatron.{name} needs CUDA; leave it out")
