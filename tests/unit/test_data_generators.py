import json
import random
import re

import numpy as np
import pytest

from dapo_megatron.config import SourceConfig
from dapo_megatron.data.sources import load_rows
from dapo_megatron.reward.verifiers import make_verifier, validate_gold


def load(generator, split="train", **args):
    return load_rows(SourceConfig(path=f"generator:{generator}", split=split, args=args))


def operands(row):
    return tuple(sorted(map(int, re.findall(r"\d+", row.prompt))))


def test_arithmetic_golds_are_right():
    tasks = [{"allow_negative": True}, {"num_terms": 3, "max_operand": 4}, {"operations": "+", "max_operand": 20}]
    rows = [*load("arithmetic", tasks=tasks), *load("arithmetic", "test", tasks=tasks)]
    assert len(rows) > 900
    for row in rows:
        expression = re.fullmatch(r"What is ([\d +*-]+)\?", row.prompt)[1]
        assert row.gold == str(eval(expression))  # Python's precedence is the reference
        validate_gold("exact_answer", row.gold)
    assert any(row.gold.startswith("-") for row in rows)


def test_arithmetic_is_all_problems_once_and_negative_results_are_a_choice():
    both = [*load("arithmetic"), *load("arithmetic", "test")]
    # sums and products of 0..9, and the differences that aren't negative
    assert len(both) == len({row.prompt for row in both}) == 100 + 100 + 55
    assert not any(row.gold.startswith("-") for row in both)


def test_train_and_test_share_no_operands_across_tasks():
    tasks = [{}, {"operations": "*", "max_operand": 12}, {"operations": "+", "max_operand": 30, "max_problems": 200}]
    train, test = load("arithmetic", tasks=tasks), load("arithmetic", "test", tasks=tasks)
    assert not {operands(row) for row in train} & {operands(row) for row in test}
    assert 0.1 < len(test) / (len(train) + len(test)) < 0.4
    # other tasks of the same seed stay on their side, too
    assert not {operands(row) for row in load("arithmetic")} & {operands(row) for row in test}
    assert len(load("arithmetic", tasks=tasks, test_fraction=0.0)) == len(train) + len(test)


def test_max_problems_and_order():
    rows = load("arithmetic", tasks=[{"max_problems": 40}], test_fraction=0.0)
    assert len(rows) == 40
    assert [row.prompt for row in rows] != sorted(row.prompt for row in rows)
    assert rows != load("arithmetic", tasks=[{"max_problems": 40}], test_fraction=0.0, seed=1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tasks": [{"operations": "+/"}]}, r"tasks\[0\].operations: '\+/'"),
        ({"tasks": [{"max_operands": 3}]}, r"tasks\[0\].max_operands is unknown; did you mean max_operand"),
        ({"tasks": [{"max_operand": "9"}]}, r"max_operand: '9' must be of type int"),
        ({"tasks": [{"min_operand": 9, "max_operand": 3}]}, "no range"),
        ({"tasks": [{"num_terms": 1}]}, "num_terms: 1 must be at least 2"),
        ({"tasks": [{"max_operand": 99999}]}, "lower max_operand"),
        ({"tasks": []}, "no problem in it"),
        ({"test_fraction": 1.5}, "test_fraction"),
    ],
)
def test_arithmetic_wrong_args(args, message):
    with pytest.raises(ValueError, match=message):
        load("arithmetic", **args)


def test_wrong_split():
    with pytest.raises(ValueError, match="split 'dev' must be train or test"):
        load("arithmetic", "dev")


def test_generators_leave_the_global_random_state_alone():
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    for name in ("arithmetic", "choice"):
        load(name)
    assert (random.random(), np.random.rand()) == expected


def test_choice():
    rows, test = load("choice", num_rows=100, length=3, accept="02468"), load("choice", "test", num_rows=100, length=3)
    assert len({row.prompt for row in rows}) == 100 and all(re.fullmatch("[0-9a-z]{3}", row.prompt) for row in rows)
    assert not {row.prompt for row in rows} & {row.prompt for row in test}
    verify = make_verifier("choice")
    assert verify("4", rows[0].gold).correct and not verify("5", rows[0].gold).correct
    assert rows == load("choice", num_rows=100, length=3, accept="02468")
    with pytest.raises(ValueError, match="raise length"):
        load("choice", num_rows=100, length=1)
    with pytest.raises(ValueError, match="accept is empty"):
        load("choice", accept="")


def test_reasoning_gym_items_go_through_their_own_scorer():
    pytest.importorskip("reasoning_gym")
    args = {"name": "chain_sum", "size": 40, "cfg": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    rows, test = load("reasoning_gym", **args), load("reasoning_gym", "test", **args)
    assert not {row.prompt for row in rows} & {row.prompt for row in test}
    verify = make_verifier("reasoning_gym")
    for row in rows:
        validate_gold("reasoning_gym", row.gold)
        answer = json.loads(row.gold)["answer"]
        assert verify(f"Answer: {answer}", row.gold).correct
        assert not verify(f"Answer: {answer}1", row.gold).correct
    with pytest.raises(ValueError, match="reasoning-gym made no data set 'nope'"):
        load("reasoning_gym", name="nope")
    with pytest.raises(ValueError, match="chain_sum"):
        load("reasoning_gym", name="chain_sum", cfg={"no_such": 1})
