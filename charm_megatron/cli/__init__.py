"""The command `charm-megatron`: parses, calls, prints."""
