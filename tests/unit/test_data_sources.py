import gzip
import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dapo_megatron.config import SourceConfig
from dapo_megatron.data.rows import overlap
from dapo_megatron.data.sources import load_rows

SHARED = Path(__file__).parents[3] / "shared" / "data"
FLAT = {"prompt_key": "question", "answer_key": "answer"}


def verl(problem, answer, **extra):
    turns = [{"role": "user", "content": problem}]
    return {"data_source": "math", "prompt": turns, "reward_model": {"ground_truth": answer}, **extra}


def write_lines(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_verl_rows_from_every_file_kind_are_the_same(tmp_path):
    records = [verl("1+1?", "2"), verl("2+2?", "4")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    paths = [write_lines(tmp_path / name, records) for name in ("d.jsonl", "d.jsonl.gz")] + [str(tmp_path / "d.parquet")]
    first, *others = [list(load_rows(SourceConfig(path=path))) for path in paths]
    assert [(row.prompt, row.gold, row.data_source) for row in first] == [
        ((("user", "1+1?"),), "2", "math"),
        ((("user", "2+2?"),), "4", "math"),
    ]
    assert all(other == first for other in others)


def test_local_folder_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [{"question": "a?", "answer": "1"}, {"question": "b?", "answer": "2"}])
    write_lines(folder / "test.jsonl", [{"question": "c?", "answer": "3"}])
    assert [row.gold for row in load_rows(SourceConfig(path=str(folder), **FLAT))] == ["1", "2"]
    assert [row.gold for row in load_rows(SourceConfig(path=str(folder), split="test", **FLAT))] == ["3"]
    with pytest.raises(ValueError, match=r"split dev: datasets can't load it"):
        load_rows(SourceConfig(path=str(folder), split="dev", **FLAT))


def test_flat_rows_pattern_and_number_golds(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"question": "a?", "answer": "so 6*7\n#### 42 "}])
    assert load_rows(SourceConfig(path=path, answer_pattern="#### (.*)", **FLAT))[0].gold == "42"
    path = write_lines(tmp_path / "d.jsonl", [{"question": q, "answer": a} for q, a in (("a", 70.0), ("b", 7), ("c", 0.5))])
    assert [row.gold for row in load_rows(SourceConfig(path=path, **FLAT))] == ["70", "7", "0.5"]


def test_dotted_key_prefers_the_literal_column(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"q": "a?", "x.y": "1", "x": {"y": "2"}}, {"q": "b?", "x": {"y": "3"}}])
    assert [row.gold for row in load_rows(SourceConfig(path=path, prompt_key="q", answer_key="x.y"))] == ["1", "3"]


def test_duplicates_and_conflicts_are_dropped_and_counted(tmp_path, caplog):
    records = [("a b", "1"), ("c", "2"), ("a  b\n", "1"), ("d", "3"), ("c", "9"), ("e", "5"), ("c", "2")]
    path = write_lines(tmp_path / "d.jsonl", [verl(*record) for record in records])
    with caplog.at_level(logging.INFO):
        rows = load_rows(SourceConfig(path=path, limit=2))
    assert [row.gold for row in rows] == ["1", "3"]
    assert (rows.num_read, rows.num_duplicates, rows.num_conflicting, rows.num_over_limit) == (7, 1, 3, 1)
    assert len(caplog.records) == 1
    assert "1 duplicates, 3 rows with conflicting golds, 1 over the limit" in caplog.text


def test_gold_answers_are_checked_with_source_and_problem_named(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [verl("one", "1"), verl("the second\none", "two"), verl("three", "drei")])
    checked = []

    def check(gold):
        checked.append(gold)
        if not gold.isdigit():
            raise ValueError(f"gold answer {gold!r}: verifier v needs a number")

    with pytest.raises(ValueError, match="verifier v needs a number") as error:
        load_rows(SourceConfig(path=path), check)
    uid = load_rows(SourceConfig(path=path))[1].uid
    assert (
        str(error.value)
        == f"data source {path}, problem {uid} ('the second one'...): gold answer 'two': verifier v needs a number"
    )
    assert checked == ["1", "two"]
    assert len(load_rows(SourceConfig(path=path), lambda gold: None)) == 3


def test_fields_that_a_source_does_not_read_are_refused(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [verl("a", "1")])
    for fields, message in [
        ({"args": {"seed": 1}}, "args {'seed': 1} are arguments of generators"),
        ({"split": "validation"}, "split 'validation' a file has no splits"),
        ({"subset": "main"}, "subset 'main' only hub data sets"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_rows(SourceConfig(path=path, **fields))
    assert len(load_rows(SourceConfig(path=path, split="test"))) == 1  # data.eval's default
    for fields in ({"subset": "main"}, {"prompt_key": "q"}, {"answer_pattern": "(.*)"}):
        with pytest.raises(ValueError, match="remove it"):
            load_rows(SourceConfig(path="generator:choice", **fields))
    with pytest.raises(ValueError, match="hub id"):
        load_rows(SourceConfig(path="gsm8k"))


def test_subset_is_the_data_sets_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"question": "a?", "answer": "1"}])
    write_lines(folder / "b.jsonl", [{"question": "b?", "answer": "2"}])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert [row.gold for row in load_rows(SourceConfig(path=str(folder), subset="b", **FLAT))] == ["2"]
    with pytest.raises(ValueError, match=r"subset c, split train: datasets can't load it"):
        load_rows(SourceConfig(path=str(folder), subset="c", **FLAT))
    with pytest.raises(ValueError, match="Check path, subset"):
        load_rows(SourceConfig(path=str(folder), **FLAT))


def test_overlap_counts_held_out_problems_that_are_trained_on(tmp_path):
    train = load_rows(SourceConfig(path=write_lines(tmp_path / "a.jsonl", [verl("a", "1"), verl("b  c", "2"), verl("d", "3")])))
    held_out = load_rows(SourceConfig(path=write_lines(tmp_path / "b.jsonl", [verl("b c", "2"), verl("e", "3")])))
    assert overlap(train, held_out) == 1 and overlap(held_out, held_out) == 2 and overlap(train, []) == 0


def test_uid_is_the_problems_and_not_the_places(tmp_path):
    one = load_rows(SourceConfig(path=write_lines(tmp_path / "a.jsonl", [verl("a", "1"), verl("b", "2")])))
    two = load_rows(SourceConfig(path=write_lines(tmp_path / "b.jsonl", [verl("b", "2"), verl("c", "1")])))
    assert one[1].uid == two[0].uid and one[0].uid != two[1].uid


def test_parquet_reads_only_the_columns_it_uses(tmp_path, monkeypatch):
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl("a", "1", huge="x" * 100)]), path)
    asked = []
    original = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda self, *args, **kwargs: asked.append(kwargs["columns"]) or original(self, *args, **kwargs),
    )
    assert len(load_rows(SourceConfig(path=str(path)))) == 1
    assert asked == [["data_source", "prompt", "reward_model"]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "x"}, r"row 2: no key 'reward_model.ground_truth'; it has prompt"),
        ({"question": "x", "reward_model": {"ground_truth": "1"}}, r"row 2: no key 'prompt'"),
        (verl("x", None), r"row 2, reward_model.ground_truth: None is no gold answer"),
        (verl("x", "  "), "is no gold answer"),
        (verl("x", True), "True is no gold answer"),
        (verl("x", float("nan")), "nan is no gold answer"),
        (verl("x", float("-inf")), "-inf is no gold answer"),
        (verl("x", ["1", "2"]), "is no gold answer"),
        (verl("", "1"), "row 2, prompt: the last chat turn must be the user's and not empty"),
        (
            {"prompt": 3, "reward_model": {"ground_truth": "1"}},
            "row 2, prompt: '3' is neither a text nor a list of turns",
        ),
        ({"prompt": [{"role": "usr", "content": "a"}], "reward_model": {"ground_truth": "1"}}, "row 2, prompt"),
    ],
)
def test_bad_rows_are_named(tmp_path, record, message):
    path = write_lines(tmp_path / "bad.jsonl", [verl("fine", "1"), record])
    with pytest.raises(ValueError, match=message) as error:
        load_rows(SourceConfig(path=path))
    assert "bad.jsonl" in str(error.value)


def test_one_id_on_two_problems_is_refused(tmp_path):
    rows = [verl("a", "1", id=7), verl("b", "2", id=8), verl("other", "3", id=7)]
    lines = write_lines(tmp_path / "d.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for path in (lines, str(tmp_path / "d.parquet")):
        with pytest.raises(ValueError, match=r"row 3, id: '7' is the id of another problem in row 1: 'a' there, 'other' here"):
            load_rows(SourceConfig(path=path))
        assert len(load_rows(SourceConfig(path=path, id_key=""))) == 3  # on the user's word


def test_ids_that_are_no_clash(tmp_path):
    same_row_twice = [verl("a", "1", id="x"), verl("b", "2", id="y"), verl(" a ", "1", id="x")]
    rows = load_rows(SourceConfig(path=write_lines(tmp_path / "d.jsonl", same_row_twice)))
    assert (len(rows), rows.num_duplicates) == (2, 1) and "1 duplicates" in rows.summary()
    for other in ({}, {"id": None}, {"id": "x", "data_source": "another set"}):
        path = write_lines(tmp_path / "d.jsonl", [verl("a", "1", **other), verl("b", "2", id="x")])
        assert len(load_rows(SourceConfig(path=path))) == 2


def test_ids_of_another_column(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [verl(p, "1", id=0, extra_info={"index": i}) for i, p in enumerate("abb")])
    assert len(load_rows(SourceConfig(path=path, id_key="extra_info.index"))) == 2
    with pytest.raises(ValueError, match=r"row 1: no key 'uid'.*id_key"):
        load_rows(SourceConfig(path=path, id_key="uid"))
    path = write_lines(tmp_path / "d.jsonl", [verl(p, "1", extra_info={"index": 5}) for p in "ab"])
    with pytest.raises(ValueError, match=r"extra_info.index: '5' is the id of another problem in row 1"):
        load_rows(SourceConfig(path=path, id_key="extra_info.index"))


def test_pattern_that_finds_nothing_and_wrong_patterns(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"question": "a?", "answer": "42"}])
    with pytest.raises(ValueError, match=r"row 1, answer: answer_pattern '#### \(\.\*\)' finds nothing in '42'"):
        load_rows(SourceConfig(path=path, answer_pattern="#### (.*)", **FLAT))
    with pytest.raises(ValueError, match="is no regular expression"):
        load_rows(SourceConfig(path=path, answer_pattern="(", **FLAT))
    with pytest.raises(ValueError, match="needs a group"):
        load_rows(SourceConfig(path=path, answer_pattern="####", **FLAT))


def test_missing_empty_and_broken_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text('{"a": "1"}\n{"a": \n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": "1"}\n' * 1000)[:-20])
    (tmp_path / "no.parquet").write_text("no")
    (tmp_path / "rows.csv").write_text("a,b")
    for name, message in [
        ("absent.jsonl", "no such file"),
        ("empty.jsonl", "no problem in it"),
        ("broken.jsonl", "line 2: not JSON"),
        ("cut.jsonl.gz", "can't be read"),
        ("no.parquet", "not a parquet file"),
        ("rows.csv", "unknown kind of file"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            load_rows(SourceConfig(path=str(tmp_path / name), prompt_key="a", answer_key="a"))
        assert name in str(error.value)
    for path, message in [
        ("", "path is empty"),
        ("data/absent.jsonl", "no such file"),
        ("generator:nope", "unknown generator"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_rows(SourceConfig(path=path))


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
def test_published_files():
    rows = load_rows(SourceConfig(path=str(SHARED / "dapo-math-17k" / "dapo_math_17k.verl.jsonl.gz")))
    assert rows.num_read == 17917 == len(rows) + rows.num_duplicates + rows.num_conflicting
    assert len(rows) == 17188 - 12  # distinct but for white space, without those of several answers
    gsm8k = SourceConfig(path=str(SHARED / "gsm8k" / "test.jsonl"), answer_pattern="#### (.*)", **FLAT)
    rows = load_rows(gsm8k)
    assert len(rows) == 1319 and rows[0].gold == "18" and rows[0].data_source == "test.jsonl"
