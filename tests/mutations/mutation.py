"""What a fault is: one change of the code, with the test that has to notice it and a piece of what that test then says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str  # stands in the file exactly once
    new: str
    test: str  # node id
    says: str  # the reason for the failure: a part of the failing assertion


def unit(name: str, file: str, old: str, new: str, test: str, says: str) -> Mutation:
    return Mutation(name, f"dapo_megatron/{file}", old, new, f"tests/unit/test_{test}", says)


def distributed(name: str, file: str, old: str, new: str, test: str, says: str) -> Mutation:
    return Mutation(name, f"dapo_megatron/{file}", old, new, f"tests/distributed/test_{test}", says)
