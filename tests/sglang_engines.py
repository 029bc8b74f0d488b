"""HttpEngines, on SGLang's interface if nothing else is said, for tests: in front of real servers, or of a transport that
answers in their place."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from dapo_megatron.rollout.http_engine import HttpEngine
from dapo_megatron.rollout.server_client import ServerClient, ServerHttp
from dapo_megatron.rollout.sglang_client import SGLangClient
from dapo_megatron.rollout.sglang_weights import ServerLayout


class Source:
    """A server's process, as the test wants it: it can't be started anew unless the test says how."""

    def __init__(self, alive: bool = True, restart: Callable[[], str] | None = None) -> None:
        self.is_alive, self._restart = alive, restart

    async def alive(self) -> bool:
        return self.is_alive

    async def end(self) -> None:
        """The test's matter."""

    async def restart(self) -> str:
        if self._restart is None:
            raise RuntimeError("this server can't be started anew")
        url = self._restart()
        self.is_alive = True
        return url


def make_engine(
    urls: Sequence[str],
    model_dir: Path,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    sources: Sequence[Any] | None = None,
    dtype: str = "float32",
    tp: int = 1,
    client_class: Any = SGLangClient,
    **kwargs: Any,
) -> HttpEngine:
    """kwargs: HttpEngine's."""
    layout = ServerLayout.of(model_dir, tp=tp, dtype=dtype, device="cpu")
    timeout_s = kwargs.get("update_timeout_s", 30.0)

    def client(url: str, slot: int) -> ServerClient:
        return client_class(ServerHttp(url, transport), model_dir, layout, backend="gloo", sender_timeout_s=timeout_s)

    return HttpEngine(sources or [Source() for _ in urls], urls, client, model_dir, **kwargs)
