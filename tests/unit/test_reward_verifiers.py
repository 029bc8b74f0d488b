import itertools
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dapo_megatron.reward.answers import canonical_number, normalize_answer
from dapo_megatron.reward.verifiers import VERIFIERS, Verdict, make_verifier, validate_gold

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    "answer",
    [
        "Answer: 34", "answer : 34", "Answer: 34.", "**Answer:** 34", "**Answer: 34**", "**Answer**: 34",
        r"Answer: \(34\)",
        r"Answer: \[34\]", "Answer: 34.0", "Answer: 034", "Answer: 34</s>", "Answer: 34<|im_end|>", "Answer: $34$",
        "Answer: $34$.", r"Answer: \boxed{34}", r"Answer: $\boxed{34}$.", "Answer: x = 34", "Answer: +34",
        r"Answer: 34^\circ",
        "Answer: The area is $34$.", "Answer: $x$ = $34$", "Answer: so $x_1 = 34$", "Answer: f(3) = 34", "Answer: $m + n = 34$",
        "Answer: a 34 square inches", r"Answer: \$34", "Answer: 34 </s> <|im_end|>\n", r"Answer: $\text{Area} = 34$",
        "Answer: 33\nNo.\nAnswer: 34", "Answer:\n34", r"Answer: \text{34}", "Answer: 34 dollars",
    ],
)  # fmt: skip
def test_math_dapo_reads_spellings_of_34(answer):
    verify = make_verifier("math_dapo")
    assert verify(f"So it is done.\n{answer}", "34") == Verdict(True, "34")
    assert not verify(f"So it is done.\n{answer}", "35").correct


@pytest.mark.parametrize(
    "response",
    [
        "34", "", "The result is 34.", r"\boxed{34}", "Answer: 33 or 34", "Answer: 33, 34", "Answer: $34$ or $35$",
        "Answer: 3,4",
        r"Answer: \boxed{34} or \boxed{35}", "Answer: 34\nAnswer: 35", "Answer: 34.5", "Answer: -34", "Answer:",
        "Answer: 34\n" + "x" * 300,
        "Answer: x != 34", "Answer: x >= 34", r"Answer: $x \ge y = 34$", "Answer: 34 or 35 = 34", "Answer: x = 33, y = 34",
        "Answer: 33 = 34", "Answer: 2x = 34", "Answer: 35 but $34$ maybe", "Answer: It is $34$, not 35", "Answer: not $34$",
        "Answer: It isn't $34$", "Answer: not x = 34", "Answer: 3 4", "Answer: 3 a 4", "Answer: 3ways4", r"Answer: 3\text{}4",
        "Answer: 3 ways 4", "Answer: 3$4", r"Answer: \boxed{3}4", r"Answer: 3\ 4", "Answer: 3<|x|>4", r"Answer: 3\dots 4",
        r"Answer: 3{,}4",
    ],
)  # fmt: skip
def test_math_dapo_rejects(response):
    assert not make_verifier("math_dapo")(response, "34").correct


def test_math_dapo_box_without_answer_line_is_a_choice():
    assert make_verifier("math_dapo", {"strict": False})(r"so \boxed{33} no, \boxed{34}", "34") == Verdict(True, "34")
    assert make_verifier("math_dapo", {"strict": False})(r"\boxed{34}. Answer: 35", "34") == Verdict(False, "35")
    assert make_verifier("math_dapo")(r"\boxed{34}", "34") == Verdict(False, None)


def test_math_dapo_long_integers_are_not_compared_as_floats():
    gold, other = "22099999999999998951424", "22099999999999998951425"
    assert float(gold) == float(other)
    verify = make_verifier("math_dapo")
    assert verify(f"Answer: {gold}", gold).correct
    assert not verify(f"Answer: {other}", gold).correct


def test_math_dapo_text_golds_do_not_crash():
    verify = make_verifier("math_dapo")
    assert verify(r"Answer: \frac12", r"\frac{1}{2}").correct
    assert verify("Answer: p - q", "p-q").correct
    assert not verify("Answer: 1,234", r"\text{Evelyn}").correct


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("034", "34"), ("34.0", "34"), ("34.", "34"), ("-0", "0"), ("\u22125", "-5"), ("1,234,567", "1234567"),
        (".5", "0.5"),
        ("1.50", "1.5"), ("+7", "7"), ("1,23", None), ("12,3456", None), ("1e5", None), ("", None), ("-", None),
        (".", None),
    ],
)  # fmt: skip
def test_canonical_number(text, number):
    assert canonical_number(text) == number


def test_normalize_answer_is_stable():
    for answer in ("34", "1,234", r"\frac12", "x=5", "**3**", "$a$ or $b$", "5..", "3!"):
        once = normalize_answer(answer)
        assert normalize_answer(once) == once


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("72", r"\boxed{72}"), ("0.5", r"\boxed{\frac12}"), ("0.5", r"\boxed{1/2}"), ("1234", r"\boxed{1,234}"),
        ("10", r"\boxed{\$10}"), ("10", r"\boxed{10\text{ cm}}"), ("73", r"\boxed{073}"), ("x=5", r"\boxed{5}"),
        ("10^8", r"\boxed{100000000}"), (r"3\sqrt{13}", r"\boxed{\sqrt{117}}"), (r"x \in [-2,7]", r"\boxed{[-2,7]}"),
        ("90", r"\boxed{90^\circ}"), (r"\{1, 2\}", r"\boxed{\{2, 1\}}"), ("5! + 1", r"\boxed{1 + 5!}"),
        ("34", r"\boxed{x_1 = 34}"), ("34", r"\boxed{\theta = 34^{\circ}}"), ("17/3", r"\boxed{5\frac{2}{3}}"),
        ("34", r"\boxed{\frac{68}{2}}"), ("34", r"\boxed{\sqrt{1156}}"),
        (r"\frac{\sqrt{3}}{2}", r"\boxed{\frac{3}{2\sqrt{3}}}"),
        (r"1+\sqrt2", r"\boxed{\sqrt{2} + 1}"), (r"\frac{3\pi}{2}", r"\boxed{1.5\pi}"), ("5", r"\boxed{x = 5}"),
        ("p - q", "Answer: $-q + p$"),
        (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{(3, \pi/2)}"), ("34", r"\boxed{33} wait, \boxed{34}"),
        ("$\\frac{1}{2}$", r"\boxed{0.5}"), (r"52_8", r"\boxed{52_8}"), (r"50\%", r"\boxed{50\%}"),
    ],
)  # fmt: skip
def test_math_verify_accepts(gold, response):
    verdict = make_verifier("math_verify")(f"Therefore {response}.", gold)
    assert verdict.correct and verdict.extracted


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("1/3", r"\boxed{0.333}"), ("(1,2)", r"\boxed{[1,2]}"), ("(1,2)", r"\boxed{(2,1)}"), ("50", r"\boxed{50\%}"),
        ("0.5", r"\boxed{50\%}"), ("52", r"\boxed{52_8}"), ("34", "I think it is 33 or 34"),
        ("34", r"\boxed{33 or 34}"),
        ("34", r"\boxed{33, 34}"), ("34", r"\boxed{34 \pm 0}"), (r"\sqrt{51}", r"\boxed{7.141428}"),
        ("34", r"\boxed{34"),
        ("34", r"\boxed{17\cdot 2}"), ("34", r"\boxed{34+0}"), ("34", r"\boxed{33=34}"), ("1/3", r"\boxed{0.33333333}"),
        ("34", r"\boxed{34^1}"), ("34", r"\boxed{17 17}"), ("34", r"\boxed{(17)(17)}"), ("120", r"\boxed{5!}"),
        ("34", r"\boxed{x=33, y=34}"), ("34", r"\boxed{2x = 34}"), ("x=5", r"\boxed{3+2}"), ("x=5", r"\boxed{4=5}"),
        (r"\frac{17}{3}", r"\boxed{5+\frac{2}{3}}"), ("1/2", r"\boxed{0.50000001}"), (r"\frac{1}{7}", r"\boxed{0.142857}"),
        (r"\frac{\pi}{3}", r"\boxed{0.333333333\pi}"), (r"\sqrt{2}", r"\boxed{\frac{99}{70}}"), (r"2\pi", r"\boxed{1 = 2\pi}"),
        ("34", "34"), ("22099999999999998951424", r"\boxed{22099999999999998951425}"),
    ],
)  # fmt: skip
def test_math_verify_rejects(gold, response):
    assert not make_verifier("math_verify")(response, gold).correct


@pytest.mark.parametrize(
    "expression",
    [
        "9^{9^{9^9}}", "9^9^9^9", "1000000!", "(10!)!", "5!!!!!!", "((9^{999})^{999})^{999}", "9^{99999999}",
        "(" * 400 + "1" + ")" * 400,
        r"\sum_{k=1}^{999999} k", r"\binom{99999}{500}", "9**9**9", r"10^{-1000000}", r"2^{999 \cdot 999}", "1" * 5000,
    ],
)  # fmt: skip
def test_math_verify_refuses_what_would_burn_time(expression):
    verify = make_verifier("math_verify")
    verify(r"\boxed{\frac{1}{2}}", "0.25")  # imports are not what is timed
    begin = time.perf_counter()
    assert not verify(f"\\boxed{{{expression}}}", "7").correct
    assert time.perf_counter() - begin < 0.5


def test_math_verify_gives_the_same_in_threads():
    pairs = [("0.5", r"\boxed{\frac12}"), (r"3\sqrt{13}", r"\boxed{\sqrt{117}}"), ("7", r"\boxed{\sqrt{50}}")] * 4
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda p: make_verifier("math_verify")(p[1], p[0]).correct, pairs))
    assert verdicts == [True, True, False] * 4


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
def test_math_verify_on_math500_golds():
    rows = [json.loads(line) for line in (SHARED / "math500" / "test.jsonl").read_text().splitlines()][:100]
    verify = make_verifier("math_verify")
    for row in rows:
        validate_gold("math_verify", row["answer"])
        assert verify(f"\\boxed{{{row['answer']}}}", row["answer"]).correct
    pairs = [(a["answer"], b["answer"]) for a, b in itertools.pairwise(rows)]
    different = [(gold, answer) for gold, answer in pairs if normalize_answer(gold) != normalize_answer(answer)]
    accepted = [(gold, answer) for gold, answer in different if verify(f"\\boxed{{{answer}}}", gold).correct]
    assert len(different) > 50
    assert accepted == []


@pytest.mark.parametrize(
    ("response", "gold", "extracted"),
    [
        ("6 * 7\n#### 42", "42", "42"), ("#### $1,234", "1234", "1234"), ("#### 1234.00", "1,234", "1234"),
        ("#### -5\nmore 7", "-5", "-5"),
        ("so\nAnswer: 42 apples", "42", "42"), ("#### 5 + 3 = 8", "8", "8"), ("#### 34 ####", "34", "34"),
        ("Answer: **34**", "34", "34"), ("#### \u20ac34.50 per half-hour.", "34.5", "34.5"), ("#### .5", "0.5", "0.5"),
        ("Answer: She makes $18 every day.<|im_end|>", "18", "18"), ("Answer: x = 34</s>", "34", "34"),
        ("#### Rs.34", "34", "34"),
        (r"Answer: \$34", "34", "34"), ("#### 34km", "34", "34"), ("#### -$34", "-34", "-34"),
    ],
)  # fmt: skip
def test_gsm8k_accepts(response, gold, extracted):
    assert make_verifier("gsm8k")(response, gold) == Verdict(True, extracted)


@pytest.mark.parametrize("response", ["42", "#### 41 or 42", "####", "#### 42.5", "#### 5 #### 6", "#### 4,2"])
def test_gsm8k_rejects(response):
    assert not make_verifier("gsm8k")(response, "42").correct


@pytest.mark.parametrize(
    "response",
    ["Answer: not 34", "34k", "34%", "34 thousand", "34 dozen", "34M", "x != 34", "34 or 35 = 34", "33 = 34", "x >= 34",
     "maybe 34",
     "34-", "34 +", "34!", "2^34", "e^34", "34 or", "minus 34", "3<|x|>4", "30 + 4", "34 + =", "~34", "about 34-35"],
)  # fmt: skip
def test_gsm8k_takes_one_number_that_nothing_is_done_to(response):
    for marker in ("Answer: ", "#### "):
        assert not make_verifier("gsm8k")(marker + response, "34").correct
    for response, gold in (("12-", "12"), ("5 + =", "5"), (".5", "5")):
        assert not make_verifier("gsm8k")(f"#### {response}", gold).correct


@pytest.mark.parametrize(
    "text", [" " * 40_000 + "x", "</s>" * 10_000, "_{" * 20_000 + "=", "a" * 40_000 + "=1=", "####" * 10_000]
)
def test_verdicts_on_long_junk_take_no_time(text):
    begin = time.perf_counter()
    for name in ("math_dapo", "math_verify", "gsm8k", "exact_answer"):
        assert not make_verifier(name)(text, "34").correct
        assert not make_verifier(name)(f"Answer: {text}", "34").correct
        assert not make_verifier(name)(f"\\boxed{{{text}}}", "34").correct
    assert time.perf_counter() - begin < 3


@pytest.mark.parametrize("response", ["Answer: 14", " answer: 14\n", "7 + 7. Answer:14", "Answer: 014", "Answer: 14<|im_end|>"])
def test_exact_answer_accepts(response):
    assert make_verifier("exact_answer")(response, "14").correct


@pytest.mark.parametrize(
    "response",
    [
        "14",
        "Answer: 14.",
        "Answer: 14 apples",
        "Answer: 13 Answer: 14",
        "Answer: 14\nAnswer: 14",
        "Answer: 15",
        "Answer: 1 4",
        "Answer: 1<|x|>4",
        "Answer: 1</s>4",
    ],
)
def test_exact_answer_rejects(response):
    assert not make_verifier("exact_answer")(response, "14").correct


def test_choice_looks_at_the_first_character_only():
    verify = make_verifier("choice")
    assert verify("4x", "02468") == Verdict(True, "4")
    assert verify("x4", "02468") == Verdict(False, "x")
    assert verify(" 4", "02468") == Verdict(False, " ")
    assert verify("", "02468") == Verdict(False, None)


def test_reasoning_gym_gives_no_partial_credit():
    item = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    verify, gold = make_verifier("reasoning_gym"), json.dumps(item)
    assert verify("<answer>3</answer>", gold) == Verdict(True, "3")
    assert verify("hm\nAnswer: 3.0", gold) == Verdict(True, "3.0")  # the library's scorer, not string equality
    assert not verify("3", gold).correct
    assert not verify("<answer>3</answer><answer>4</answer>", gold).correct
    assert not verify("Answer: 1 or 2 or 3", gold).correct
    assert verify("Answer: 3<|im_end|>", gold).correct
    for attempts in (
        "<answer>4</answer><answer>3</answer>",
        "<answer>4<answer>3</answer>",
        "<answer>3</answer></answer>",
        "<answer>3",
        "Answer: 4 Answer: 3",
    ):
        assert verify(attempts, gold) == Verdict(False, None)


def test_every_verifier_can_be_pickled_and_survives_junk():
    golds = dict.fromkeys(VERIFIERS, "3") | {
        "reasoning_gym": json.dumps({"answer": "3", "metadata": {"source_dataset": "chain_sum"}})
    }
    for name in VERIFIERS:
        verify = pickle.loads(pickle.dumps(make_verifier(name)))
        for junk in (
            "",
            "\x00",
            "Answer: " + "{" * 50,
            r"\boxed{\frac{}{}}",
            "Answer: $$",
            "####",
            "<answer></answer>",
            "Answer: \\",
        ):
            assert not verify(junk, golds[name]).correct, (name, junk)


def test_unknown_names_are_told_with_the_closest():
    with pytest.raises(ValueError, match=r"reward.verifier: 'math_dap' is unknown; did you mean math_dapo.*gsm8k"):
        make_verifier("math_dap")
    with pytest.raises(ValueError, match=r"reward.verifier_args of math_dapo: 'strct'.*did you mean strict"):
        make_verifier("math_dapo", {"strct": True})
    with pytest.raises(ValueError, match="known: none"):
        make_verifier("choice", {"accept": "a"})


def test_validate_gold():
    good = {
        "math_dapo": "p - q",
        "math_verify": r"\frac{1}{2}",
        "gsm8k": "1,234",
        "exact_answer": "-3",
        "choice": "02468",
    }
    for name, gold in good.items():
        validate_gold(name, gold)
    validate_gold("reasoning_gym", json.dumps({"answer": "3", "metadata": {"source_dataset": "chain_sum"}}))
    bad = {
        "math_dapo": "$$",
        "math_verify": "",
        "gsm8k": "a lot",
        "exact_answer": "3.5",
        "choice": "",
        "reasoning_gym": "3",
    }
    for name, gold in bad.items():
        with pytest.raises(ValueError, match=f"verifier {name} needs"):
            validate_gold(name, gold)


def test_reasoning_gym_items_without_one_answer_are_judged_by_their_scorer():
    pytest.importorskip("reasoning_gym")
    import reasoning_gym

    item = next(iter(reasoning_gym.create_dataset("propositional_logic", size=1, seed=0)))
    assert item["answer"] is None
    gold = json.dumps(item)
    validate_gold("reasoning_gym", gold)
    verdict = make_verifier("reasoning_gym")(f"Answer: {item['metadata']['example_answer']}", gold)
    assert verdict.correct and not verdict.error
    assert not make_verifier("reasoning_gym")("Answer: nonsense", gold).correct
