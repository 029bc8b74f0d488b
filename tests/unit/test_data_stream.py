import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from dapo_megatron.config import DataConfig
from dapo_megatron.data.prompts import PromptRenderer
from dapo_megatron.data.rows import Row, prompt_uid
from dapo_megatron.data.stream import PromptStream, eval_prompts
from dapo_megatron.weights.char_tokenizer import build_char_tokenizer

TOKENIZER = build_char_tokenizer()


def make_rows(count, length=3):
    return [Row(prompt_uid(t), t, str(i), "s") for i, t in enumerate(f"{i:0{length}d}" for i in range(count))]


def make_stream(rows=None, seed=1, **data):
    return PromptStream(make_rows(10) if rows is None else rows, TOKENIZER, DataConfig(**{"format": "plain", **data}), seed)


def take(stream, count):
    return [stream.next() for _ in range(count)]


def test_every_epoch_holds_every_row_once_in_another_order():
    stream = make_stream()
    epochs = [take(stream, 10) for _ in range(3)]
    for epoch in epochs:
        assert sorted(p.gold for p in epoch) == sorted(str(i) for i in range(10))
    orders = [[p.gold for p in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [p.index for epoch in epochs for p in epoch] == list(range(30))
    assert {p.gold: p.uid for p in epochs[0]} == {p.gold: p.uid for p in epochs[2]}


def test_epoch_changes_at_the_boundary():
    stream = make_stream()
    assert stream.epoch == 0
    take(stream, 9)
    assert (stream.position, stream.epoch) == (9, 0)
    stream.next()
    assert (stream.position, stream.epoch) == (10, 1)


def test_a_position_always_gives_the_same_prompt():
    reference = take(make_stream(), 35)
    stream = make_stream()
    for position in (34, 0, 17, 10, 9, 9, 29):
        stream.position = position
        assert stream.next() == reference[position]
        assert stream.position == position + 1
    stream.position = 5
    assert take(stream, 30) == reference[5:]


def test_order_depends_on_the_seed_and_on_no_global_state():
    reference = take(make_stream(), 25)
    random.seed(7)
    np.random.seed(7)
    state = random.getstate(), np.random.get_state()[1].tolist()
    assert take(make_stream(), 25) == reference
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    assert [p.gold for p in take(make_stream(seed=2), 10)] != [p.gold for p in reference[:10]]


def test_without_shuffling_the_order_is_the_data_sets():
    assert [p.gold for p in take(make_stream(shuffle=False), 12)] == [*map(str, range(10)), "0", "1"]


@pytest.mark.parametrize("position", [0, 7, 10, 23])
def test_resume_goes_on_where_it_stopped(position):
    stream = make_stream()
    take(stream, position)
    state = stream.state_dict()
    expected = take(stream, 15)
    resumed = make_stream()
    resumed.load_state_dict(state)
    assert take(resumed, 15) == expected


def test_resume_on_other_data_is_an_error():
    state = make_stream().state_dict()
    other_gold = [*make_rows(9), Row("u", "009", "changed", "s")]
    cases = [
        (make_stream(make_rows(11)), "num_prompts was 10 and is 11"),
        (make_stream(other_gold), "fingerprint"),
        (make_stream(list(reversed(make_rows(10)))), "fingerprint"),
        (make_stream(template="{prompt}!"), "fingerprint"),
        (make_stream(seed=2), "seed was 1 and is 2"),
        (make_stream(shuffle=False), "shuffle was True and is False"),
    ]
    for stream, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            stream.load_state_dict(state)
        assert stream.position == 0
        assert "seed" in message or "data.on_change=continue" in str(error.value)


def test_resume_on_other_data_goes_on_if_told_to():
    before = make_stream()
    take(before, 7)
    grown = make_rows(20)
    for rows, data in ((grown, {}), (None, {"template": "{prompt}!"}), (None, {"shuffle": False})):
        resumed = make_stream(rows, on_change="continue", **data)
        assert "changed" not in resumed.summary
        resumed.load_state_dict(before.state_dict())
        assert resumed.position == 7 and "going on at prompt 7, epoch 0 (data.on_change=continue)" in resumed.summary
        assert resumed.next() == make_stream(rows, **data).at(7)
    unchanged = make_stream(on_change="continue")
    unchanged.load_state_dict(before.state_dict())
    assert "changed" not in unchanged.summary and unchanged.next() == before.next()
    with pytest.raises(ValueError, match=r"seed was 1 and is 2.*restore run.seed"):
        make_stream(seed=2, on_change="continue").load_state_dict(before.state_dict())


def test_too_long_prompts_are_counted_and_leave_no_hole():
    rows = make_rows(10)
    long = [Row(prompt_uid("9" * 8), "9" * 8, "long", "s"), Row(prompt_uid("8" * 9), "8" * 9, "long", "s")]
    stream = make_stream([*rows[:4], long[0], *rows[4:], long[1]], max_prompt_tokens=7)
    assert (stream.num_skipped_too_long, len(stream)) == (2, 10)
    assert take(stream, 20) == take(make_stream(rows), 20)
    assert make_stream([*rows, *long], max_prompt_tokens=8).num_skipped_too_long == 1
    assert stream.mean_prompt_tokens == np.mean([len(prompt.token_ids) for prompt in take(stream, 10)])
    with pytest.raises(ValueError, match="max_prompt_tokens: 2 leaves none of 10 prompts"):
        make_stream(rows, max_prompt_tokens=2)


def test_eval_prompts_have_indices_of_their_own():
    data = DataConfig(format="plain", max_prompt_tokens=3)
    prompts = eval_prompts([Row("u", "0123", "x", "s"), *make_rows(5)], TOKENIZER, data)
    assert [p.gold for p in prompts] == ["0", "1", "2", "3", "4"]
    assert [p.index for p in prompts] == [-1, -2, -3, -4, -5]
    assert eval_prompts(make_rows(5), TOKENIZER, data, limit=2) == eval_prompts(make_rows(2), TOKENIZER, data)


def test_wrong_seed_and_position():
    with pytest.raises(ValueError, match=r"run.seed: -1"):
        make_stream(seed=-1)
    with pytest.raises(ValueError, match="must not be negative"):
        make_stream().position = -1


def render(prompt, **data):
    renderer = PromptRenderer(TOKENIZER, DataConfig(**data))
    text = renderer.text(Row("u", prompt, "1", "s"))
    [ids] = renderer.encode([Row("u", prompt, "1", "s")])
    assert TOKENIZER.decode(ids) == text.lower()
    return text


def test_chat_rendering():
    text = render("2+2?", system="be brief", few_shot=[["1+1?", "2"]], template="q: {prompt}\n(x)")
    assert text == "<system>be brief<user>q: 1+1?\n(x)<assistant>2</s><user>q: 2+2?\n(x)<assistant>"
    assert render("a") == "<user>a<assistant>"


def test_turns_of_a_row_are_kept_and_the_template_goes_around_the_last():
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"))
    assert render(turns, system="s", template="({prompt})") == "<system>s<user>a<assistant>b</s><user>(c)<assistant>"
    own = (("system", "mine"), ("user", "c"))
    assert render(own, system="s", few_shot=[["x", "y"]]) == "<system>mine<user>x<assistant>y</s><user>c<assistant>"


def test_plain_rendering():
    assert render("2+2?", format="plain", few_shot=[["1+1?", "2"]], system="s") == "s\n1+1?\n2\n2+2?"


def test_text_that_looks_like_special_braces_is_left_alone():
    assert "\\boxed{x}" in PromptRenderer(TOKENIZER, DataConfig()).text(Row("u", "\\boxed{x} {0}", "1", "s"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"template": "no place"}, r"data.template: 'no place' lacks \{prompt\}"),
        ({"few_shot": [["only a question"]]}, r"data.few_shot\[0\]"),
        ({"format": "html"}, "data.format: 'html' must be chat or plain"),
    ],
)
def test_wrong_rendering_settings(data, message):
    with pytest.raises(ValueError, match=message):
        PromptRenderer(TOKENIZER, DataConfig(**data))


def test_chat_without_a_chat_template():
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"data.format: chat needs a tokenizer with a chat template"):
        PromptRenderer(tokenizer, DataConfig())
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    with pytest.raises(ValueError, match="chat template refuses"):
        PromptRenderer(tokenizer, DataConfig()).encode([Row("u", "a", "1", "s")])


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        TURNS,
        # a reply can't be rendered at all
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}<user>{{ m.content }}"
        "{% endfor %}",
    ],
)
def test_chat_template_without_generation_prompt(template):
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"would go on with the user's turn.*data.format=plain"):
        PromptRenderer(tokenizer, DataConfig()).encode([Row("u", "a", "1", "s")])
    assert PromptRenderer(tokenizer, DataConfig(format="plain")).encode([Row("u", "a", "1", "s")])


@pytest.mark.parametrize(
    "template",
    [
        TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}",
        TURNS + "<assistant>",  # whether asked for or not
        # Llama 2's way: a reply has no header
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}",
        # Qwen3's way: a reply is preceded by more than the generation prompt
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    ],
)
def test_chat_templates_whose_prompt_ends_at_the_reply(template):
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = template
    assert PromptRenderer(tokenizer, DataConfig()).encode([Row("u", "a", "1", "s")])


def test_iterating_is_taking():
    assert list(itertools.islice(make_stream(), 4)) == take(make_stream(), 4)


def test_nothing_here_imports_torch():
    import subprocess
    import sys

    code = (
        "import sys, dapo_megatron.data.stream, dapo_megatron.data.sources, dapo_megatron.reward.scoring, "
        "dapo_megatron.weights.source; "
        "bad = {'torch', 'transformers', 'ray', 'datasets', 'math_verify'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
