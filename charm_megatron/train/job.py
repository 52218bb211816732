"""What one rank does: Megatron's own `pretrain`, with a dataset, a batch and a loss of ours.

The functions here follow Megatron's `pretrain_gpt.py`, which its wheel does not ship.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from charm_megatron.executor import AttentionRuntime
from charm_megatron.mcore.bridge import PREFIX, Notices, SplitAttention, log_to_stdout
from charm_megatron.mcore.compat import wheel_repairs
from charm_megatron.mcore.install import charm_attention_installed
from charm_megatron.mcore.logger import numbers_in_megatron_logs
from charm_megatron.processes.sockets import give_up_dead_links
from charm_megatron.train.arguments import command_line
from charm_megatron.train.data import TextFolder, build_dataset, check_size
from charm_megatron.train.device import initialize_groups, stand_in_for_cuda
from charm_megatron.train.metrics import LOSS, Emit, Recorder
from charm_megatron.train.rank_job import RankJob
from charm_megatron.train.run_folder import RunFolder, append_row
from charm_megatron.workload import Workload

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def run_rank(job: RankJob, emit: Emit) -> None:
    """Runs the job in this process, a rank whose place is in the environment (RANK, WORLD_SIZE, ...).

    `emit` gets what happens: "started" on rank 0, "step" and "evaluation" on the last rank.
    """
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    charm = job.config.charm
    if charm.flight_folder is None:
        charm = charm.model_copy(update={"flight_folder": job.folder.path})
    runtime = AttentionRuntime(charm)
    with ExitStack() as stack:
        stack.enter_context(stand_in_for_cuda())
        stack.enter_context(wheel_repairs())
        receipt = _Receipt(job.folder, emit)
        attention = SplitAttention(runtime, Notices(receipt.add))
        stack.enter_context(charm_attention_installed(attention))
        stack.enter_context(numbers_in_megatron_logs(attention))
        stack.enter_context(command_line(list(job.argv)))
        args = parse_and_validate_args()
        initialize_groups(args)
        if not torch.cuda.is_available():
            give_up_dead_links(charm.deadline_s)
        if args.rank == args.world_size - 1:
            recorder = Recorder(partial(_record, job.folder, emit), args.seq_length)
            stack.enter_context(recorder.listening())
        model = gpt_config_from_args(args)
        datasets = DatasetProvider(job, runtime, receipt)
        container = pretrain_cfg_container_from_args(args, model)
        try:
            pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
        except SystemExit as error:
            # Megatron ends so where a flag such as --exit-interval stops it early, after its last checkpoint.
            if error.code:
                raise
        # Gloo aborts the process where a peer's connections close while its own threads still use them.
        dist.barrier()
        dist.destroy_process_group()


def _record(folder: RunFolder, emit: Emit, kind: str, row: dict[str, Any]) -> None:
    append_row(folder.metrics if kind == "step" else folder.evaluation, row)
    emit(kind, row)


class DatasetProvider:
    """What Megatron calls, on every rank and once the groups exist, for its three datasets."""

    is_distributed = True
    """Tells Megatron that every rank calls this, not only the first of a tensor-parallel group."""

    def __init__(self, job: RankJob, runtime: AttentionRuntime, receipt: "_Receipt") -> None:
        self._job = job
        self._runtime = runtime
        self._receipt = receipt
        self._is_prepared = False

    def __call__(self, num_samples: Any, vp_stage: int | None = None) -> Any:
        """Training, validation and test dataset; `num_samples` is how many of each are needed at least."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset
        from megatron.training import get_args

        args = get_args()
        if not self._is_prepared:
            self._prepare(args)
            self._is_prepared = True
        builder = BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, _dataset_config(args))
        return builder.build()

    def _prepare(self, args: Any) -> None:
        """Text, schedule and receipt: what a run folder holds before the first iteration."""
        folder = self._job.folder
        if args.rank == 0:
            build_dataset(TextFolder.find(self._job.config.data.text), folder.text_prefix)
            check_size(
                folder.text_prefix, args.split, args.seq_length, needs_evaluation=bool(args.eval_iters)
            )
        dist.barrier()
        schedule, receipt = describe_attention(self._runtime, args)
        if args.rank == 0:
            folder.schedule.write_text(schedule, "utf-8")
            self._receipt.start(receipt)


class _Receipt:
    """What a run says of its attention: in its log, in its folder, and to who follows it. On rank 0."""

    def __init__(self, folder: RunFolder, emit: Emit) -> None:
        self._path, self._emit = folder.receipt, emit
        self._lines: list[str] = []

    def start(self, lines: list[str]) -> None:
        """What is planned, before the first iteration."""
        self._lines = list(lines)
        self._write()
        self._emit("started", {"receipt": lines})

    def add(self, line: str) -> None:
        """What is seen in the first iteration; layers say there again what was planned."""
        log_to_stdout(line)
        text = line.removeprefix(PREFIX)
        if text not in self._lines:
            self._lines.append(text)
            self._write()
            self._emit("notice", {"sentence": text})

    def _write(self) -> None:
        self._path.write_text("".join(f"{line}\n" for line in self._lines), "utf-8")


def describe_attention(runtime: AttentionRuntime, args: Any) -> tuple[str, list[str]]:
    """Schedule and receipt of this rank's context-parallel group; all its ranks must call it."""
    from megatron.core import mpu

    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return "", ["context parallel size 1: Megatron's own attention; nothing is sent"]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    receipt = runtime.receipt(group, attention_workload(args), device=device)
    return receipt.schedule_text, receipt.lines()


def attention_workload(args: Any) -> Workload:
    """One attention call of the model, from Megatron's arguments."""
    num_heads = args.num_attention_heads // args.tensor_model_parallel_size
    num_kv_heads = num_heads
    if args.group_query_attention:
        num_kv_heads = max(1, args.num_query_groups // args.tensor_model_parallel_size)
    head_dim = head_dim_v = args.kv_channels
    if args.multi_latent_attention:
        head_dim, head_dim_v = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return Workload(
        batch=args.micro_batch_size,
        seq_len=args.seq_length,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=str(args.params_dtype).removeprefix("torch."),
    )


def _dataset_config(args: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )


def forward_step(
    batches: Iterator[Mapping[str, Tensor]], model: Callable[..., Tensor]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """One microbatch through the model: its losses by token, and what makes of them the loss."""
    batch = _batch_of_this_rank(batches)
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
    )
    return losses, partial(loss_function, batch["loss_mask"])


def _batch_of_this_rank(batches: Iterator[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The next batch, cut to the tokens of this context-parallel rank by Megatron's own zigzag."""
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank

    device = torch.cuda.current_device()
    whole = next(batches)
    batch: Mapping[str, Tensor] = get_batch_on_this_cp_rank(
        {key: whole[key].to(device, non_blocking=True) for key in BATCH_KEYS},
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
    )
    return batch


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses of this rank's tokens, how many count, and both once more for the log.

    loss_mask [b, s] and losses [b, s], s tokens of this rank, float32 or the model's dtype.
    """
    mask = loss_mask.flatten().float()
    total = (losses.flatten().float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.stack([total.detach(), num_tokens.to(total.dtype)])
    return total, num_tokens, {LOSS: report}
