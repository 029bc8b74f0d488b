"""Everything that imports Megatron-Core."""

from dapo_megatron.policy import cpu_backend

cpu_backend.prepare_import()  # before any module of this package imports megatron
