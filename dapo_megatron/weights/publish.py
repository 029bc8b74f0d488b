"""Publishing: the controller's part of one transfer of new weights from trainer ranks to engines."""

from typing import Any, Protocol


class Sending(Protocol):
    """The trainer ranks, as seen from here."""

    async def open_senders(self, senders: list[Any]) -> None: ...
    async def send_weights(self, version: int) -> None: ...
    async def close_senders(self) -> None: ...
    async def checksums(self) -> list[dict[str, str]]: ...


class Receiving(Protocol):
    """The engines (rollout.engine.RolloutEngine)."""

    def weight_senders(self) -> list[Any]: ...
    async def begin_update(self, version: int) -> None: ...
    async def end_update(self, version: int) -> None: ...
    async def checksums(self) -> list[dict[str, str]]: ...


class Publisher:
    """idle -> paused (begin_update) -> updating (send_weights) -> committed (end_update), and so on for the next version.

    Whatever fails in between, there is one recovery: the same version from the beginning, over new connections. It is tried
    once; then the error is raised.
    """

    def __init__(self, trainer: Sending, engine: Receiving, check: bool) -> None:
        self._trainer, self._engine, self._check = trainer, engine, check
        self.version = -1

    async def connect(self) -> None:
        await self._trainer.open_senders(self._engine.weight_senders())

    async def publish(self, version: int) -> None:
        """The engines hold the trainer's weights as `version` when this returns; no request may be in flight."""
        try:
            await self._transfer(version)
        except RuntimeError:
            await self._trainer.close_senders()
            await self.connect()
            await self._transfer(version)
        self.version = version
        if self._check:
            await self.compare()

    async def _transfer(self, version: int) -> None:
        await self._engine.begin_update(version)
        await self._trainer.send_weights(version)
        await self._engine.end_update(version)

    async def compare(self) -> None:
        """Raise RuntimeError unless every engine holds, bit for bit in its dtype, what the trainer has."""
        expected = await self._trainer.checksums()
        for number, held in enumerate(await self._engine.checksums()):
            want = expected[number]
            missing = sorted(want.keys() ^ held.keys())
            different = sorted(name for name in want.keys() & held.keys() if want[name] != held[name])
            if missing or different:
                raise RuntimeError(
                    f"publish.check: engine {number} does not hold version {self.version}: {len(different)} tensors differ "
                    f"{different[:4]}, {len(missing)} are on one side only {missing[:4]}"
                )
