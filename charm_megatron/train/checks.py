"""Checks of a configuration before anything is started, and the facts of a job that follow from it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charm_megatron.compile import compile_attention, is_schedule_file
from charm_megatron.config import MegatronValue, RunConfig
from charm_megatron.errors import ConfigError, InvalidInput, nearest
from charm_megatron.planner import planners
from charm_megatron.schedule.json_form import load_schedule
from charm_megatron.topology import Domains, even_domains, one_domain
from charm_megatron.topology.domain_file import load_groups
from charm_megatron.topology.from_launcher import domains_of_cp_groups
from charm_megatron.train.arguments import as_yaml, effective_flags, megatron_parser, to_argv, validate
from charm_megatron.train.data import VOCABULARY_SIZE, TextFolder, check_dataset
from charm_megatron.train.flags import RESUME
from charm_megatron.train.refusals import check_numbers, check_split, check_together
from charm_megatron.train.run_folder import RunFolder
from charm_megatron.workload import Workload

DEFAULT_INTERVAL = 1_000
"""Iterations between checkpoints, and evaluations, of a run whose length is given in samples."""


@dataclass(frozen=True)
class JobFacts:
    """What the launcher needs to know of a checked job."""

    argv: tuple[str, ...]
    train_iters: int
    cp_size: int
    workload: Workload
    domains: Domains | None
    """Of its first context-parallel group, where known before ranks run."""
    warnings: tuple[str, ...] = ()
    """What the user should know before hours of training, a sentence each."""


def check_quickly(config: RunConfig, continued: RunFolder | None = None) -> None:
    """The checks that need neither torch nor Megatron; of the dataset too where a run is continued.

    Raises `InvalidInput`.
    """
    if config.charm.schedule not in planners() and not is_schedule_file(config.charm.schedule):
        raise ConfigError(
            f"charm.schedule {config.charm.schedule!r} is unknown{nearest(config.charm.schedule, planners())}"
        )
    text = TextFolder.find(config.data.text)
    if continued is not None:
        check_dataset(text.path, continued.text_prefix)


def check_job(
    config: RunConfig,
    folder: RunFolder,
    resume: bool,
    ranks_of_hosts: Sequence[int] | None,
    cuda: bool | None = None,
) -> JobFacts:
    """The checks that need Megatron. Raises `InvalidInput`; makes nothing, prints nothing.

    `ranks_of_hosts` is how many ranks each host will run, None where that is not known. `cuda` says for which kind
    of machine; None is this one.
    """
    import torch

    from charm_megatron.kernels import require_kernel_name
    from charm_megatron.mcore.limits import Layer, check_supported, loss_notices
    from charm_megatron.train.device import stand_in_for_cuda, transformer_engine_assumed
    from charm_megatron.train.job import attention_workload

    require_kernel_name(config.charm.kernel)
    if cuda is None:
        cuda = torch.cuda.is_available()
    parser = megatron_parser()
    flags = effective_flags(config.megatron, cuda)
    written = parser.parse_args(to_argv(flags, parser))
    _check_layout(config, written)
    check_split(written.split)
    check_together(written, cuda)
    argv = to_argv({**flags, **_run_flags(folder, written, resume)}, parser)
    assumed = transformer_engine_assumed() if cuda and not torch.cuda.is_available() else nullcontext()
    with stand_in_for_cuda(), assumed:
        args, transformer = validate(argv, config.launch.ranks)
    workload = attention_workload(args)
    cp_size, tp_size = args.context_parallel_size, args.tensor_model_parallel_size
    known = _domains_ahead(config, ranks_of_hosts, cp_size, tp_size)
    if cp_size > 1:
        for domains in known or (_domains_assumed(config, cp_size),):
            compile_attention(config.charm, domains, workload, "zigzag")
        for layer_number in range(1, args.num_layers + 1):
            check_supported(Layer(transformer, layer_number))
    if resume:
        _check_same_model(folder, args, parser, cuda)
    iters = args.train_iters or args.train_samples // args.global_batch_size
    if not iters:
        raise ConfigError(
            f"megatron.train_samples {args.train_samples} is less than one iteration, which takes "
            f"{args.global_batch_size}"
        )
    warnings = loss_notices(transformer, args) if cp_size > 1 else ()
    return JobFacts(tuple(argv), iters, cp_size, workload, known[0] if known else None, warnings)


MODEL_FLAGS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
    ),
    *(
        "position_embedding_type",
        "normalization",
        "swiglu",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
    ),
    *("untie_embeddings_and_output_weights", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_experts", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "mtp_num_layers", "optimizer"),
)
"""Flags that decide which tensors a checkpoint holds, and their shapes. The vocabulary is always the same."""


def _check_same_model(folder: RunFolder, args: Any, parser: Any, cuda: bool) -> None:
    """Raises `ConfigError` where a run is to be continued with another model. `args` are validated.

    Both are compared as Megatron completes them, so that a default may be written out. What the run was started with
    decides nothing where it can no longer be read.
    """
    from charm_megatron.train.device import stand_in_for_cuda

    before = folder.started_with()
    if before is None:
        return
    try:
        written = parser.parse_args(to_argv(flags := effective_flags(before.megatron, cuda), parser))
        with stand_in_for_cuda():
            old, _ = validate(
                to_argv({**flags, **_run_flags(folder, written, False)}, parser), before.launch.ranks
            )
    except InvalidInput:
        return
    positions = ["max_position_embeddings"] if args.position_embedding_type == "learned_absolute" else []
    for name in (*MODEL_FLAGS, *positions):
        then, now = getattr(old, name, None), getattr(args, name, None)
        if then != now:
            raise ConfigError(
                f"megatron.{name} is {as_yaml(now)}, but {folder.path} was started with {as_yaml(then)} and its "
                f"checkpoint holds that model; set it back, or start a new run"
            )


def require_more_to_do(folder: RunFolder, done: int, facts: JobFacts) -> None:
    """Raises `InvalidInput` where a run to be continued has done all its iterations."""
    if done >= facts.train_iters:
        raise InvalidInput(
            f"{folder.path} is already at iteration {done}; to continue, set megatron.train_iters higher than "
            f"{facts.train_iters}"
        )


def _run_flags(folder: RunFolder, written: Any, resume: bool) -> dict[str, MegatronValue]:
    flags: dict[str, MegatronValue] = {
        "data_path": [str(folder.text_prefix)],
        "data_cache_path": str(folder.data),
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY_SIZE,
        "save": str(folder.checkpoints),
    }
    for name in ("save_interval", "eval_interval"):
        # Megatron saves and evaluates at the end too, but stops with an exception where it has no interval.
        if getattr(written, name) is None:
            flags[name] = written.train_iters or DEFAULT_INTERVAL
    if resume:
        flags |= {"load": str(folder.checkpoints), **RESUME}
    return flags


NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def _check_layout(config: RunConfig, args: Any) -> None:
    """Ranks, domains and sequence must fit together. `args` is Megatron's namespace, not yet validated."""
    missing = [name for name in NEEDED if getattr(args, name) is None]
    if args.train_iters is None and args.train_samples is None:
        missing.append("train_iters")
    if missing:
        raise ConfigError(f"megatron.{missing[0]} is missing")
    check_numbers(args)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    if min(tp, pp, cp) < 1:
        raise ConfigError(
            f"parallel sizes must be at least 1, but are tensor {tp}, pipeline {pp}, context {cp}"
        )
    ranks, model_ranks = config.launch.ranks, tp * pp * cp
    if ranks % model_ranks:
        raise ConfigError(
            f"launch.ranks {ranks} must be a multiple of {model_ranks}, the product of the parallel sizes "
            f"tensor {tp}, pipeline {pp} and context {cp}, such as {max(1, ranks // model_ranks) * model_ranks}"
        )
    _domains_ahead(config, None, cp, tp)
    multiple = 2 * cp
    if cp > 1 and args.seq_length % multiple:
        raise ConfigError(
            f"megatron.seq_length {args.seq_length} cannot be split over {cp} context-parallel ranks; it must "
            f"be a multiple of 2 * {cp} = {multiple}, such as {max(1, round(args.seq_length / multiple)) * multiple}"
        )


def _domains_ahead(
    config: RunConfig, ranks_of_hosts: Sequence[int] | None, cp_size: int, tp_size: int
) -> tuple[Domains, ...]:
    """The domains of each kind of context-parallel group of the job; none where only the ranks can find out.

    Raises `TopologyError` for a number that does not fit, and for a file that does not list domains.
    """
    declared = config.charm.domains
    if isinstance(declared, int):
        return (even_domains(cp_size, declared),)
    if declared == "hosts":
        return domains_of_cp_groups(ranks_of_hosts, cp_size, tp_size) if ranks_of_hosts else ()
    if declared not in ("numa", "nvlink"):
        load_groups(Path(declared))
    return ()


def _domains_assumed(config: RunConfig, cp_size: int) -> Domains:
    """To check with what else can be checked: one domain, or those that a written schedule is for."""
    if is_schedule_file(config.charm.schedule):
        written = load_schedule(Path(config.charm.schedule)).problem.domains
        if written.cp_size == cp_size:
            return written
    return one_domain(cp_size)
