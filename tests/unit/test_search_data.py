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
    assert contents(data.load(parquet(tmp_path / "b.parquet", searchr1(ROWS)))) == EXPECTED


def test_a_row_without_golden_answers_takes_the_target_of_its_reward_model(tmp_path):
    rows = [{key: value for key, value in row.items() if key != "golden_answers"} for row in searchr1(ROWS)]
    assert contents(data.load(parquet(tmp_path / "a.parquet", rows))) == EXPECTED


def test_only_the_columns_that_count_are_read(tmp_path, monkeypatch):
    read = []
    original = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda file, columns: read.append(columns) or original(file, columns=columns)
    )
    data.load(parquet(tmp_path / "a.parquet", searchr1(ROWS)))
    assert read == [["question", "golden_answers", "data_source", "reward_model.ground_truth.target"]]


def test_one_answer_may_be_a_text_and_a_source_may_be_missing(tmp_path):
    path = jsonl(tmp_path / "capitals.jsonl", [{"question": "Capital of Chad?", "golden_answers": "N'Djamena"}])
    assert contents(data.load(path)) == [("capitals", "Capital of Chad?", ("N'Djamena",))]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("searchR1_nq", "nq"),
        ("RUC-NLPIR/FlashRAG_datasets/TriviaQA", "triviaqa"),
        ("bamboogle", "bamboogle"),
        ("my_own", "my_own"),
        ("uniq", "uniq"),
    ],
)
def test_names_of_the_seven_sets(source, name):
    assert data.short_name(source) == name


GOOD = json.dumps(ROWS[0]).encode()
DAMAGED_LINES = {
    "cut off": (GOOD + b"\n" + GOOD[:40], "line 2 is no JSON"),
    "not UTF-8": (GOOD + b'\n\n{"question": "\xff"}', "line 3 is no JSON"),
    "nested without end": (b"[" * 100_000, "line 1 is no JSON"),
    "no object": (GOOD + b"\n[1]", "line 2: [1] is no object"),
    "no question": (b'{"golden_answers": ["a"]}', "line 1: 'question' is missing"),
    "an empty question": (b'{"question": " ", "golden_answers": ["a"]}', "line 1: 'question' is ' '"),
    "no answers": (b'{"question": "a"}', "line 1: 'golden_answers' is missing"),
    "answers of none": (b'{"question": "a", "golden_answers": []}', "line 1: 'golden_answers' is missing"),
    "a number as answer": (b'{"question": "a", "golden_answers": [7]}', "line 1: 'golden_answers' is [7]"),
    "an empty answer": (b'{"question": "a", "golden_answers": [""]}', "line 1: 'golden_answers' is ['']"),
    "a source that is none": (b'{"question": "a", "golden_answers": "b", "data_source": 3}', "line 1: 'data_source'"),
    "nothing": (b"\n\n", "holds no question"),
}


@pytest.mark.parametrize("what", DAMAGED_LINES)
def test_damaged_json_lines_are_named(what, tmp_path):
    content, words = DAMAGED_LINES[what]
    path = tmp_path / "test.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        data.load(path)
    assert str(path) in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


def damaged_parquet(what, path):
    match what:
        case "cut off":
            path.write_bytes(parquet(path, ROWS).read_bytes()[:-20])
        case "no parquet":
            path.write_bytes(GOOD)
        case "nothing":
            path.write_bytes(b"")
        case "a page overwritten":
            content = bytearray(parquet(path, ROWS).read_bytes())
            content[4:40] = b"\xff" * 36
            path.write_bytes(content)
        case "no question":
            parquet(path, [{"golden_answers": ["a"]}])
        case "a missing answer":
            parquet(path, [*ROWS, {"question": "Why?", "golden_answers": None, "data_source": "nq"}])
        case "questions of numbers":
            parquet(path, [{"question": 3, "golden_answers": ["a"]}])
    return path


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "cut off": "no whole parquet",
        "no parquet": "no whole parquet",
        "nothing": "no whole parquet",
        "a page overwritten": "no whole parquet",
        "no question": "no column 'question'; it has golden_answers",
        "a missing answer": "row 3: 'golden_answers' is missing",
        "questions of numbers": "row 1: 'question' is 3",
    }.items(),
)
def test_damaged_parquet_is_named(what, words, tmp_path):
    path = damaged_parquet(what, tmp_path / "test.parquet")
    with pytest.raises(UserError) as error:
        data.load(path)
    assert str(path) in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


def test_a_folder_has_one_file_of_a_split(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        factory(tmp_path, data=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds neither test.parquet and test.jsonl"):
        factory(tmp_path)
    jsonl(tmp_path / "test.jsonl", ROWS)
    assert [task.payload.text for task in eval_tasks(factory(tmp_path), "test", 0, 0)] == [q for _, q, _ in EXPECTED]
    parquet(tmp_path / "test.parquet", ROWS)
    with pytest.raises(UserError, match="holds both"):
        factory(tmp_path)
    (tmp_path / "test.parquet").rename(tmp_path / "test.csv")
    with pytest.raises(UserError, match=r"test.csv is neither .parquet nor .jsonl"):
        factory(tmp_path, data=tmp_path / "test.csv")


def test_a_damaged_training_file_is_told_of_at_the_start(tmp_path):
    jsonl(tmp_path / "test.jsonl", ROWS)
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"train.jsonl: line 1"):
        factory(tmp_path)


def test_questions_of_files_need_documents(tmp_path):
    jsonl(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(UserError, match=r"needs documents: set env.corpus"):
        factory(tmp_path, corpus=False)


def test_one_file_is_every_split(tmp_path):
    played = factory(tmp_path, data=jsonl(tmp_path / "nq.jsonl", ROWS))
    assert len(eval_tasks(played, "test", 0, 0)) == 2
    assert {task.kind for task in train_tasks(played, 0, 2, 0)} == {"nq", "2wikimultihopqa"}


def test_tasks_of_files_are_seeded_and_go_through_everything(tmp_path):
    rows = [{"question": f"{i}?", "golden_answers": ["a"]} for i in range(10)]
    jsonl(tmp_path / "train.jsonl", rows)
    jsonl(tmp_path / "test.jsonl", rows)
    played = factory(tmp_path)

    def asked(tasks):
        return [task.payload.text for task in tasks]

    epoch = [text for step in range(5) for text in asked(train_tasks(played, step, 2, 7))]
    assert sorted(epoch) == sorted(row["question"] for row in rows) and epoch != [row["question"] for row in rows]
    assert asked(train_tasks(played, 3, 2, 7)) == epoch[6:8]
    assert len(set(asked(eval_tasks(played, "test", 4, 1)))) == 4
    assert asked(eval_tasks(played, "test", 4, 1)) == asked(eval_tasks(played, "test", 4, 1))
    assert asked(eval_tasks(played, "test", 4, 1)) != asked(eval_tasks(played, "test", 4, 2))
    assert len(eval_tasks(played, "test", 0, 1)) == len(eval_tasks(played, "test", 99, 1)) == 10


def test_the_fingerprint_follows_the_content(tmp_path):
    jsonl(tmp_path / "test.jsonl", ROWS)
    before = factory(tmp_path).fingerprint()
    assert factory(tmp_path).fingerprint() == before and "corpus.jsonl" in before
    jsonl(tmp_path / "test.jsonl", ROWS[:1])
    assert factory(tmp_path).fingerprint() != before


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
