"""Our extension of vLLM's workers with what tests need."""

import time
from typing import Any

from dapo_vllm_extension import WeightUpdates
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class SlowUpdates(WeightUpdates):
    """The tiny model makes tokens faster than the HTTP process can take them, which then takes no other calls for seconds."""

    def dapo_slow_down(self: Any, seconds: float) -> None:
        """Every step takes so much longer from now on."""
        self.__dict__.setdefault("dapo_delay", []).append(seconds)
        if len(self.dapo_delay) == 1:
            self.model_runner.get_model().register_forward_pre_hook(lambda *_: time.sleep(self.dapo_delay[-1]))


class OwnUpdates(WeightUpdates):
    """Updates go through vLLM's own loader for new weights."""

    def dapo_begin(self: Any) -> None:
        super().dapo_begin()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def dapo_pack(self: Any) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
