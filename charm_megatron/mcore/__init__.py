"""Megatron-Core: the attention module behind `--cp-comm-type charm`, and how it gets into Megatron's models."""

CP_COMM_TYPE = "charm"
"""The value of Megatron's `--cp-comm-type` that selects this package's attention."""
