"""Which of Megatron's flags a run sets by itself: those it owns, those a CPU needs, and its defaults.

Names are those of the YAML section `megatron`: Megatron's, with underscores.
"""

from collections.abc import Mapping

from charm_megatron.config import MegatronValue

OWNED: Mapping[str, str] = {
    "data_path": "the text comes from data.text",
    "data_args_path": "the text comes from data.text",
    "per_split_data_args_path": "the text comes from data.text",
    "train_data_path": "the text comes from data.text",
    "valid_data_path": "the text comes from data.text",
    "test_data_path": "the text comes from data.text",
    "mock_data": "the text comes from data.text",
    "data_cache_path": "indexes of the text are kept in the run folder",
    "tokenizer_type": "tokens are bytes",
    "vocab_size": "tokens are bytes",
    "save": "checkpoints are kept in the run folder",
    "load": "--resume continues the newest checkpoint of the run folder",
    "yaml_cfg": "this file takes its place",
    "reset_attention_mask": "attention across documents is not masked",
    "sft": "batches are made from plain text",
    "fim_data": "batches are made from plain text",
    "perform_rl_step": "batches are made from plain text",
}
"""Flags that a configuration must leave out, with the reason. A run sets them, or has no use for them."""

CPU_NEEDS: Mapping[str, MegatronValue] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True,
    "no_bias_swiglu_fusion": True,
    "no_rope_fusion": True,
    "no_persist_layer_norm": True,
    "rerun_mode": "disabled",
    "num_workers": 0,
}
"""Flags without which Megatron does not run on a CPU."""

DEFAULTS: Mapping[str, MegatronValue] = {
    "no_create_attention_mask_in_dataloader": True,
    "split": "90,5,5",
}
"""Flags that a run sets unless the configuration does."""

RESUME: Mapping[str, MegatronValue] = {"override_opt_param_scheduler": True}
"""Added on `--resume`: the learning rate follows the configuration, so that a run can be made longer."""
