"""DAPO on Megatron-Core."""
