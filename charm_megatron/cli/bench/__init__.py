"""`charm-megatron bench`: measurements, one file per command."""
