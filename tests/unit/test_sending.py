"""A trainer rank that sends its weights: the next bucket beside the one before, servers at the same time, failures."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_megatron.policy.scorer import single_rank
from dapo_megatron.policy.sending import Sending
from tests.unit.test_buckets import Named, some_tensors

PATIENCE_S = 20.0


class OneRank:
    """As much of a Policy as Sending asks for."""

    num_stages, stage, is_stage_leader, is_first_replica = 1, 0, True, True

    def __init__(self, tensors: Named) -> None:
        self.tensors, self.num_streams = tensors, 0
        self.taken = [threading.Event() for _ in tensors]

    def stream_weights(self, dtype: Any = None) -> Iterator[tuple[str, Tensor]]:
        self.num_streams += 1
        for event, item in zip(self.taken, self.tensors, strict=True):
            event.set()
            yield item


class Sender:
    """Notes what it is given. `meanwhile(number of the bucket)` is called while a bucket is out."""

    device, dtype, layout = "cpu", "float32", "one"

    def __init__(self, meanwhile: Any = lambda number: None) -> None:
        self.opened, self.called, self.closed, self.meanwhile = 0, 0, 0, meanwhile
        self.got: list[tuple[int, Named]] = []

    def open(self, sender: int, num_senders: int) -> None:
        self.opened += 1

    def send(self, bucket: Named, version: int) -> None:
        self.called += 1
        before = [(name, tensor.clone()) for name, tensor in bucket]
        self.meanwhile(len(self.got))
        self.got.append((version, before))
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, bucket, strict=True)), "overwritten while it was out"

    def checksums(self, tensors: Any) -> dict[str, str]:
        return {name: str(float(tensor.sum())) for name, tensor in tensors}

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def group() -> Iterator[None]:
    with single_rank():
        yield


def received(sender: Sender) -> Named:
    return [item for _, bucket in sender.got for item in bucket]


def same(a: Named, b: Named) -> bool:
    return [name for name, _ in a] == [name for name, _ in b] and all(
        torch.equal(x, y) for (_, x), (_, y) in zip(a, b, strict=True)
    )


def test_the_next_bucket_is_gathered_while_one_is_sent_and_no_third(group: None) -> None:
    policy = OneRank(some_tensors(*[6] * 6))

    def meanwhile(number: int) -> None:
        if number + 1 < 6:
            assert policy.taken[number + 1].wait(PATIENCE_S), "the next bucket's tensor isn't gathered"
        assert number + 3 >= 6 or not policy.taken[number + 3].is_set()

    sending, sender = Sending(policy), Sender(meanwhile)  # type: ignore[arg-type]
    sending.open({"s": sender})
    assert sending.send(3, ["s"], 24) == {"bytes": 6 * 24, "buckets": 6}
    assert same(received(sender), policy.tensors) and {version for version, _ in sender.got} == {3}


def test_all_servers_get_a_bucket_at_the_same_time(group: None) -> None:
    policy, together = OneRank(some_tensors(5, 5, 5)), threading.Barrier(3, timeout=PATIENCE_S)
    senders = {f"server {i}": Sender(lambda number: together.wait()) for i in range(3)}
    sending = Sending(policy)  # type: ignore[arg-type]
    sending.open(senders)
    sending.send(1, [*senders], 20)
    assert all(same(received(sender), policy.tensors) for sender in senders.values()) and policy.num_streams == 1


def test_a_server_that_fails_is_named_and_the_others_get_theirs(group: None) -> None:
    policy = OneRank(some_tensors(5, 5, 5))

    def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("it died")

    senders = {"a": Sender(), "b": Sender(fail), "c": Sender()}
    sending = Sending(policy)  # type: ignore[arg-type]
    sending.open(senders)
    with pytest.raises(RuntimeError, match="weights of version 7 did not reach b: RuntimeError: it died"):
        sending.send(7, ["a", "b", "c"], 20)
    assert all(same(received(senders[name]), policy.tensors) for name in "ac")
    assert [sender.closed for sender in senders.values()] == [0, 1, 0] and senders["b"].called == 2
    with pytest.raises(RuntimeError, match="did not reach b: it isn't open"):
        sending.send(7, ["b", "c"], 20)
    again = Sender()
    sending.open({"a": Sender(), "b": again, "c": Sender()})  # what is open stays
    assert sending.send(7, ["b"], 20)["buckets"] == 3 and same(received(again), policy.tensors)
    assert [sender.opened for sender in senders.values()] == [1, 1, 1]


def test_a_server_that_cannot_be_reached_is_named_and_one_not_named_is_closed(group: None) -> None:
    class Unreachable(Sender):
        def open(self, sender: int, num_senders: int) -> None:
            raise RuntimeError("no answer")

    first, second = Sender(), Sender()
    sending = Sending(OneRank(some_tensors(5)))  # type: ignore[arg-type]
    sending.open({"server 0": first})
    with pytest.raises(RuntimeError, match=r"no connection for weights to server 1: RuntimeError: no answer"):
        sending.open({"server 1": Unreachable(), "server 0.1": second})
    assert first.closed == 1
    assert sending.send(1, ["server 0.1"], 20)["buckets"] == 1
    sending.close()
    assert second.closed == 1


def test_servers_of_one_layout_cost_one_stream_of_checksums(group: None) -> None:
    policy = OneRank(some_tensors(5, 5))
    senders = {"a": Sender(), "b": Sender(), "c": Sender()}
    senders["c"].layout = "another"  # type: ignore[misc]
    sending = Sending(policy)  # type: ignore[arg-type]
    sending.open(senders)
    expected = senders["a"].checksums(policy.tensors)
    assert sending.checksums(["a", "b", "c"]) == {"a": expected, "b": expected, "c": expected}
    assert policy.num_streams == 2
