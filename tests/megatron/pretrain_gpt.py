"""A training script in the manner of Megatron-LM's pretrain_gpt.py, shorter; its attention is Megatron's own.

Megatron's wheel ships no such script. Mock data only. Started on each rank: `python pretrain_gpt.py <flags>`
under torchrun, or through `charm-megatron launch`. On a machine without CUDA it runs on the CPU.
"""

from functools import partial

import torch

from charm_megatron.mcore.compat import wheel_repairs
from charm_megatron.train.device import initialize_groups, stand_in_for_cuda

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def get_batch(batches):
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank

    device = torch.cuda.current_device()
    whole = next(batches)
    return get_batch_on_this_cp_rank(
        {key: whole[key].to(device, non_blocking=True) for key in BATCH_KEYS},
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
    )


def loss_func(loss_mask, losses):
    mask = loss_mask.flatten().float()
    total = (losses.flatten().float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.to(total.dtype)])}


def forward_step(batches, model):
    batch = get_batch(batches)
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
    )
    return losses, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=[None, None, None],
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


train_valid_test_datasets_provider.is_distributed = True


def main():
    with stand_in_for_cuda(), wheel_repairs():
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        initialize_groups(args)
        container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(container, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
