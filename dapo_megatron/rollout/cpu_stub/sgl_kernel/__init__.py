"""Stand-in for SGLang's compiled sgl_kernel, which needs libcuda. On the PYTHONPATH of a CPU server only.

On that path SGLang computes with plain torch and only imports names from here; a kernel that is really called says so.
"""

from typing import NoReturn

__version__ = "0.0.0+cpu"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: this server runs on CPU without compiled kernels")

    missing.__name__ = name
    return missing
