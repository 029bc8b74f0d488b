"""Rotary embeddings as either spelling of HF's configuration says."""

from typing import Any

import pytest

from dapo_megatron.policy.model import _rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (10000.0, None)),
        ({"rope_theta": 500}, (500.0, None)),
        ({"rope_theta": 500, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, (500.0, None)),
        ({"rope_theta": 500, "rope_scaling": LLAMA3}, (500.0, 8.0)),
        ({"rope_parameters": {"rope_theta": 700.0, **LLAMA3}}, (700.0, 8.0)),
    ],
)
def test_either_spelling(config: dict[str, Any], expected: tuple[float, float | None]) -> None:
    assert _rope(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 500, "rope_parameters": {"rope_theta": 700}}, "given twice"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "only default and Llama 3"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "only default and Llama 3"),
    ],
)
def test_what_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _rope(config)
