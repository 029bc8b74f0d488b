"""Settings and fixtures for all tests."""

import os
from pathlib import Path

import pytest

# Before anything loads torch: on a machine with few cores more threads than cores collapse the speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture
def shared() -> Path:
    """The folder with public data sets beside the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the data folder ../shared")
    return folder
