"""Search QA from files: parquet and JSON lines, what is damaged, the tasks made of them."""

import json

import pytest

from paw.config import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.base import eval_tasks, train_tasks, warmup_tasks
from paw.envs.search import data
from paw.envs.settings import SearchConfig
from paw.errors import NoOracleError, UserError

pa = pytest.importorskip("pyarrow", reason="pip install 'paw-trainer[search]'")
pq = pytest.importorskip("pyarrow.parquet")

NILE = {"question": "which river is longest?", "golden_answers": ["Nile", "River Nile"], "data_source": "searchR1_nq"}
ROWS = [NILE, {"question": "Who?", "golden_answers": ["Ada"], "data_source": "2wikimultihopqa"}]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def searchr1(rows):
    """As Search-R1's scripts/data_process write a row."""
    extra = {"prompt": [{"role": "user", "content": "Answer the question."}], "ability": "fact-reasoning"}
    target = [{"style": "rule", "ground_truth": {"target": row["golden_answers"]}} for row in rows]
    return [{**row, **extra, "reward_model": model} for row, model in zip(rows, target, strict=True)]


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def factory(folder, corpus=True, **changes):
    documents = [
        {"id": str(i), "contents": f'"{name}"\n{name} is a river.'} for i, name in enumerate(["Nile", "Volta"])
    ]
    search = {"corpus": jsonl(folder / "corpus.jsonl", documents)} if corpus else {}
    env = {"data": folder, "eval_split": "test", "max_turns": 4} | search | changes
    return make_factory(Config(model=ModelConfig(path="-"), env=SearchConfig(**env)))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path_factory.mktemp("cache")))


def contents(tasks):
    return [(task.kind, task.payload.text, task.payload.answers) for task in tasks]


EXPECTED = [("nq", "which river is longest?", ("Nile", "River Nile")), ("2wikimultihopqa", "Who?", ("Ada",))]


def test_parquet_and_json_lines_say_the_same(tmp_path):
    assert contents(data.load(jsonl(tmp_path / "a.jsonl", ROWS))) == EXPECTED
    assert contents(data.load(parquet(tmp_path / "a.parquet", ROWS))) == EXPECTED
    rows = searchr1(ROWS)
    assert contents(data.load(parquet(tmp_path / "b.parquet", rows))) == EXPECTED
    without = [{key: value for key, value in row.items() if key != "golden_answers"} for row in rows]
    assert contents(data.load(parquet(tmp_path / "c.parquet", without))) == EXPECTED
    path = jsonl(tmp_path / "capitals.jsonl", [{"question": "Capital of Chad?", "golden_answers": "N'Djamena"}])
    assert contents(data.load(path)) == [("capitals", "Capital of Chad?", ("N'Djamena",))]
    sources = ("searchR1_nq", "RUC-NLPIR/FlashRAG_datasets/TriviaQA", "bamboogle", "my_own", "uniq")
    assert [*map(data.short_name, sources)] == ["nq", "triviaqa", "bamboogle", "my_own", "uniq"]


GOOD = json.dumps(ROWS[0]).encode()


def refused(path) -> str:
    with pytest.raises(UserError) as error:
        data.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_damaged_json_lines_are_named(tmp_path):
    path = tmp_path / "test.jsonl"
    for content, words in (
        (GOOD + b"\n" + GOOD[:40], ", line 2: Invalid JSON: EOF while"),
        (GOOD + b'\n\n{"question": "\xff"}', ", line 3: Invalid JSON: invalid unicode"),
        (GOOD + b"\n[1]", ", line 2: Input should be an object, not [1]"),
        (b'{"golden_answers": ["a"]}', ", line 1: question: Field required"),
        (b'{"question": " ", "golden_answers": ["a"]}', ", line 1: question: String should match pattern"),
        (b'{"question": "a", "golden_answers": []}', ", line 1: golden_answers: List should have at least 1 item"),
        (b'{"question": "a", "golden_answers": [7]}', ", line 1: golden_answers: 0: Input should be a valid string"),
        (b"\n\n", "holds no question"),
    ):
        path.write_bytes(content)
        assert words in refused(path)


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "test.parquet"
    whole = parquet(path, ROWS).read_bytes()
    for content in (whole[:-20], GOOD, b"", whole[:4] + b"\xff" * 36 + whole[40:]):
        path.write_bytes(content)
        assert "no whole parquet" in refused(path)
    assert "no column 'question'; it has golden_answers" in refused(parquet(path, [{"golden_answers": ["a"]}]))
    missing = {"question": "Why?", "golden_answers": None, "data_source": "nq"}
    assert ", row 3: golden_answers: Input should be a valid list" in refused(parquet(path, [*ROWS, missing]))
    assert "row 1: question: Input should be" in refused(parquet(path, [{"question": 3, "golden_answers": ["a"]}]))


def test_a_folder_has_one_file_of_a_split(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        factory(tmp_path, data=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds neither test.parquet and test.jsonl"):
        factory(tmp_path)
    jsonl(tmp_path / "test.jsonl", ROWS)
    played = factory(tmp_path)
    assert [task.payload.text for task in eval_tasks(played, "test", 0, 0)] == [q for _, q, _ in EXPECTED]
    assert factory(tmp_path).fingerprint() == played.fingerprint() and "corpus.jsonl" in played.fingerprint()
    with pytest.raises(UserError, match=r"needs documents: set env.corpus"):
        factory(tmp_path, corpus=False)
    one = factory(tmp_path, data=jsonl(tmp_path / "nq.jsonl", ROWS[:1]))  # is every split
    assert len(eval_tasks(one, "test", 0, 0)) == len(train_tasks(one, 0, 1, 0)) == 1
    assert one.fingerprint() != played.fingerprint()
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"train.jsonl, line 1"):  # before a model is loaded
        factory(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    parquet(tmp_path / "test.parquet", ROWS)
    with pytest.raises(UserError, match="holds both"):
        factory(tmp_path)
    (tmp_path / "test.parquet").rename(tmp_path / "test.csv")
    with pytest.raises(UserError, match=r"test.csv is neither .parquet nor .jsonl"):
        factory(tmp_path, data=tmp_path / "test.csv")


def test_questions_of_files_have_no_expert(tmp_path):
    jsonl(tmp_path / "test.jsonl", ROWS)
    played = factory(tmp_path)
    environment = played.make()
    environment.reset(eval_tasks(played, "test", 0, 0)[0])
    with pytest.raises(NoOracleError):
        environment.oracle()
    assert environment.step("<search>river Volta</search>").observation.startswith('<information>{"result": "Doc 1: ')
    assert environment.step("<answer>the nile</answer>").won
    with pytest.raises(UserError, match="leave env"):
        warmup_tasks(played, 0, 1, 0)
