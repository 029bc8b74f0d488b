"""Publishing: the controller's state machine around one transfer of new weights from trainer ranks to engines."""

from typing import Any, Protocol


class Sending(Protocol):
    """The trainer ranks, as seen from here."""

    def open_senders(self, senders: list[Any]) -> None: ...
    def send_weights(self, version: int) -> None: ...
    def checksums(self) -> list[dict[str, str]]: ...


class Receiving(Protocol):
    """The engines (rollout.engine.RolloutEngine)."""

    def weight_senders(self) -> list[Any]: ...
    async def begin_update(self, version: int) -> None: ...
    async def end_update(self, version: int) -> None: ...
    async def checksums(self) -> list[dict[str, str]]: ...


class Publisher:
    """States: idle -> updating -> committed -> updating -> ... A failure leaves `updating`; the one recovery is to publish the
    same version again from its beginning, which `publish` does when called again."""

    def __init__(self, trainer: Sending, engine: Receiving, check: bool) -> None:
        self._trainer, self._engine, self._check = trainer, engine, check
        self.state = "idle"
        self.version = -1

    def connect(self) -> None:
        self._trainer.open_senders(self._engine.weight_senders())

    async def publish(self, version: int) -> None:
        """The engines hold the trainer's weights as `version` when this returns; no request may be in flight."""
        self.state, self.version = "updating", version
        await self._engine.begin_update(version)
        self._trainer.send_weights(version)
        await self._engine.end_update(version)
        if self._check:
            await self.compare()
        self.state = "committed"

    async def compare(self) -> None:
        """Raise RuntimeError unless every engine holds, bit for bit in its dtype, what the trainer has."""
        expected = self._trainer.checksums()
        for number, held in enumerate(await self._engine.checksums()):
            want = expected[number]
            missing = sorted(want.keys() ^ held.keys())
            different = sorted(name for name in want.keys() & held.keys() if want[name] != held[name])
            if missing or different:
                raise RuntimeError(
                    f"publish.check: engine {number} does not hold version {self.version}: {len(different)} tensors differ "
                    f"{different[:4]}, {len(missing)} are on one side only {missing[:4]}"
                )
