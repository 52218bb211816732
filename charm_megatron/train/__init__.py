"""Pretraining with Megatron's own training loop: flags, text, ranks, run folder."""
