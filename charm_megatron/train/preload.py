"""Imported once by the server that forks the ranks, so that no rank imports torch and Megatron again."""

import megatron.core.datasets.blended_megatron_dataset_builder
import megatron.core.datasets.gpt_dataset
import megatron.training
import megatron.training.argument_utils
import megatron.training.arguments
import megatron.training.models.gpt  # noqa: F401

import charm_megatron.train.checks
import charm_megatron.train.job  # noqa: F401
