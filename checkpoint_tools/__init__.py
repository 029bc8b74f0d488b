"""Programs for checkpoints: `python -m checkpoint_tools COMMAND`."""


class UsageError(ValueError):
    """What was asked for can't be done with these arguments: exit code 2."""
