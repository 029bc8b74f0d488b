"""Processes that start in a moment, since they are forked from one that has imported what takes long."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
_modules: list[str] = []


def preload(*modules: str) -> None:
    """For a module's level: the process that others are forked from begins with the first of them and imports nothing later."""
    _modules.extend(modules)
    CONTEXT.set_forkserver_preload(_modules)
