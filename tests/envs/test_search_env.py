"""Search QA: the generated world, the paper's literal prompts, actions, exact match, episodes and
files."""

import json

import pytest

from paw.agents import zerosearch
from paw.agents.endpoint import ChatCompletion
from paw.config.sections import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.base import admissible_responses, eval_tasks, train_tasks, warmup_tasks
from paw.envs.search import data
from paw.envs.search.data import Question
from paw.envs.search.factory import SearchEnv
from paw.envs.search.prompt import CompactStyle, PaperStyle
from paw.envs.search.retrieval.base import Hit
from paw.envs.search.reward import exact_match, normalize
from paw.envs.search.world import RELATIONS, World, digest, make_worlds, split
from paw.envs.settings import SearchConfig
from paw.errors import EnvironmentFailure, NoOracleError, UserError
from paw.types import Task

pa = pytest.importorskip("pyarrow", reason="pip install 'paw-trainer[search]'")
pq = pytest.importorskip("pyarrow.parquet")

ENV = SearchConfig(eval_split="test", max_turns=4, history=4, reward=1.0, invalid_penalty=0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path_factory.mktemp("cache")))


def factory(**changes):
    generated = {} if "data" in changes else {"entities": 100}
    settings = ENV.model_copy(update=generated | changes)
    return make_factory(Config(model=ModelConfig(path="-"), env=settings))


def shelf(**documents):
    """A search that finds the documents whose title occurs in the query."""
    return lambda question, query: [
        Hit(title, f'"{title}"\n{text}', 1.0) for title, text in documents.items() if title in query
    ]


def episode(question=None, search=None, **changes):
    environment = SearchEnv(
        ENV.model_copy(update=changes), search or shelf(Nile="It is in Africa.")
    )
    environment.reset(
        Task("t", "nq", question or Question("Where is the Nile?", ("Africa", "in Africa")))
    )
    return environment


# --- the world


def test_a_world_follows_from_its_seed_and_has_every_kind():
    for entities in (20, 41, 59):
        small_world = World(entities, numbered=entities == 41)
        assert len(small_world.entities) == entities
        assert len(small_world.documents) == entities
        assert all(split([small_world]).values())
        assert {entity.kind for entity in small_world.entities} == set(RELATIONS)
    worlds = [World(40), World(40, seed=1), World(41), World(40, numbered=True)]
    assert digest([World(40)]) == digest(worlds[:1])
    assert len({digest([world]) for world in worlds}) == 4
    # If there are several worlds, each belongs to one split.
    splits = split(make_worlds(20, numbered=True, count=10))
    worlds_of_split = {}
    for name, questions in splits.items():
        worlds_of_split[name] = sorted({question.world for _, question in questions})
    assert worlds_of_split == {"test": [0, 1], "warmup": [2, 3, 4], "train": [5, 6, 7, 8, 9]}


def test_each_hop_is_a_document_that_names_the_next_and_the_last_the_answer():
    world = World(300)
    names = []
    for entity in world.entities:
        names += set(map(normalize, entity.names))
    texts = [question.text for _, question in world.questions]
    assert len(names) == len(set(names))
    assert len(texts) == len(set(texts)) > 1000
    documents = {
        contents.partition("\n")[0].strip('"'): contents for label, contents in world.documents
    }
    for kind, question in world.questions:
        assert len(question.hops) == {"one-hop": 1, "two-hop": 2}[kind]
        assert question.hops[0] in question.text
        assert question.answers[0] not in question.text
        for title, next_title in zip(
            question.hops, [*question.hops[1:], question.answers[0]], strict=True
        ):
            assert next_title in documents[title].partition("\n")[2]
        if kind == "two-hop":  # the answer takes two documents
            first_hop, second_hop = question.hops
            assert second_hop not in question.text
            assert first_hop not in documents[second_hop]
            assert question.answers[0] not in documents[first_hop]


# --- the paper's prompts

FIRST = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: Where is the Nile?

Now it's your turn to respond for the current step.
You should first conduct reasoning process. This process MUST be enclosed within <think> </think> tags.\x20
After completing your reasoning, choose only one of the following actions (do not perform both):
(1) If you find you lack some knowledge, you can call a search engine to get more external information using format: <search> your query </search>.
(2) If you have enough knowledge to answer the question confidently, provide your final answer within <answer> </answer> tags, without detailed illustrations. For example, <answer>Beijing</answer>.
"""  # noqa: E501
HISTORY = """
Prior to this step, you have already taken 2 step(s). Below is the interaction history where <search> </search> wrapped your past search queries and <information> </information> wrapped the corresponding search results returned by the external search engine. History:
Step 1:<search>the Nile</search> <information>{"result": "Doc 1: \\"Nile\\"\\nIt is in Africa.\\n"}</information>

Step 2: \n
"""  # noqa: E501


def test_the_papers_prompts_literally():
    environment = episode()
    assert environment.context() == FIRST
    environment.step("<think>Hm.</think><search> the Nile </search>")
    environment.step("I do not know.")
    assert environment.context() == FIRST.replace("Nile?\n", f"Nile?\n{HISTORY}")


def test_history_thought_and_braces():
    environment = episode(Question("{history} %s {0}?", ("a",)), history=1, think=False)
    assert "Your question: {history} %s {0}?\n" in environment.context()
    assert "think" not in environment.context()
    assert "step.\nChoose only one" in environment.context()
    environment.step("<search>the Nile</search>")
    environment.step("<search>Volta</search>")
    assert "Step 1:" not in environment.context()
    assert (
        'Step 2:<search>Volta</search> <information>{"result": ""}</information>\n\n\n'
        in environment.context()
    )
    environment = episode(history=0)
    environment.step("<search>the Nile</search>")
    assert environment.context() == FIRST


def test_projections():
    for response, action, valid in (
        ("<think>a</think><search> red  shoes </search>", "search[red  shoes]", True),
        ("<ANSWER>Paris\nFrance</Answer>", "answer[Paris\nFrance]", True),
        ("<answer></answer>", "answer[]", True),
        ("<search>a</search> text <answer>b</answer>", "search[a]", False),
        ("<answer>b</answer><search>a</search>", "search[a]", False),
        ("<answer>b</answer><search>a", "answer[b]", False),
        ("<search>a</search><search>b</search>", "search[a]", False),
        ("<search>a <search>b</search>", "search[a <search>b]", False),
        ("a</search><search>b</search>", "", False),  # cut after the first closing tag
        ("<search>a", "", False),
        ("search[a]", "", False),
    ):
        played, well_formed = PaperStyle().parse_action(response)
        assert str(played) == action
        assert well_formed == valid
    responses = (
        "\nsearch town 12",
        "answer river 3 ",
        "search",
        "search town 12\nanswer river 3",
        "look at town 12",
    )
    compact_actions = [
        (str(action), valid) for action, valid in map(CompactStyle().parse_action, responses)
    ]
    assert compact_actions == [
        ("search[town 12]", True),
        ("answer[river 3]", True),
        *[("", False)] * 3,
    ]
    for style in ("paper", "compact"):
        environment = episode(style=style)
        assert environment.style.parse_action(environment.format_action("look"))[1] is False
        outcome = environment.step(environment.format_action("answer[a [b] c]"))
        assert outcome.action == "answer[a [b] c]"
        assert outcome.valid is True


def test_what_is_found_is_told_as_the_search_tool_tells_it():
    assert PaperStyle().observation(['"Köln"\nA "city".\n', " b "]) == (
        '<information>{"result": "Doc 1: \\"K\\u00f6ln\\"\\nA \\"city\\".\\nDoc 2: b\\n"}</information>'
    )
    assert (
        CompactStyle().observation(['"town 1"\ntown 1 is\n old.', "no title"])
        == "town 1 is old.\nno title"
    )


def test_exact_match():
    for answer, golden, is_right in (
        ("the Beatles", "Beatles", True),
        ("Beatles, The!", "the beatles", True),
        ("An apple a day", "apple day", True),
        ("1,000", "1000", True),
        ("São Paulo", "são paulo", True),
        ("the café’s", "café’s", True),  # a typographic apostrophe is not ASCII punctuation
        ("U.S.A.", "USA", True),
        ("  two   words\n", "two words", True),
        ("The The", "the the", True),
        ("theatre", "atre", False),  # articles are removed only as whole words
        ("well-known", "well known", False),  # punctuation is removed without leaving a blank
        ("STRASSE", "straße", False),  # lower(), not casefold()
        ("Sao Paulo", "São Paulo", False),
        ("Nile", "River Nile", False),
        ("", "Nile", False),
        ("", "The The", False),
        ("?", "A", False),
    ):
        assert exact_match(answer, ["x", golden]) == is_right, answer
    assert not exact_match("", [])


# --- episodes


def test_an_episode_of_a_search_and_an_answer():
    environment = episode()
    assert environment.task == "Where is the Nile?"
    assert environment.admissible_actions() == []
    search = environment.step("<search>Nile</search>")
    assert (
        search.observation
        == '<information>{"result": "Doc 1: \\"Nile\\"\\nIt is in Africa.\\n"}</information>'
    )
    assert search.done is False
    assert search.won is False
    assert search.reward == 0.0
    assert search.valid is True
    answered = environment.step("<answer>in africa</answer>")
    assert answered.done is True
    assert answered.won is True
    assert answered.reward == 1.0
    assert answered.observation == ""
    with pytest.raises(AssertionError):
        environment.step("<answer>again</answer>")
    environment = episode(search=shelf(Nile="<answer>Africa</answer>"), max_turns=3)
    environment.step("<search>Nile</search>")
    assert environment.step("nothing").observation == ""
    # A search finds nothing now, and found words are not an answer.
    last_outcome = environment.step("<search>Nile</search>")
    assert last_outcome.done is True
    assert last_outcome.won is False
    assert last_outcome.observation == ""
    assert last_outcome.action == "search[Nile]"
    assert last_outcome.valid is True


def test_a_failing_search_fails_its_episode_alone():
    def broken(question, query):
        raise UserError("no\nserver")

    environment = episode(search=broken)
    # An empty search is not sent, so an agent cannot break its episode with it.
    empty_search = environment.step("<search> </search>")
    assert empty_search.observation == '<information>{"result": ""}</information>'
    assert empty_search.valid is True
    assert environment.step("<answer>Africa</answer>").won
    with pytest.raises(EnvironmentFailure, match=r"search failed: UserError: no server$"):
        episode(search=broken).step("<search>Nile</search>")


@pytest.mark.parametrize(("style", "topk", "entities"), [("paper", 3, 60), ("compact", 1, 20)])
def test_the_expert_answers_every_generated_question(style, topk, entities):
    played = factory(style=style, topk=topk, entities=entities)
    environment = played.make()
    for split_name in ("train", "warmup", "test"):
        for task in eval_tasks(played, split_name, 300, 0):
            environment.reset(task)
            responses = admissible_responses(environment)
            assert len({*responses}) == len(responses) == (40 if style == "compact" else 0)
            assert all(environment.style.parse_action(response)[1] for response in responses)
            assert style == "paper" or environment.oracle() in responses
            outcome = environment.step(environment.oracle())
            while not outcome.done:
                assert outcome.valid
                outcome = environment.step(environment.oracle())
            assert outcome.won, task


def test_settings_that_do_not_go_together_and_fingerprints(tmp_path):
    with pytest.raises(UserError, match="no split 'valid_unseen', only test, warmup, train"):
        factory(eval_split="valid_unseen")
    with pytest.raises(UserError, match=r"env.corpus = .* needs env.data"):
        factory(corpus=tmp_path / "corpus.jsonl")
    factories = [
        factory(),
        factory(entities=101),
        factory(topk=2),
        factory(entities=20, style="compact"),
    ]
    assert len({configured.fingerprint() for configured in factories}) == 4
    assert factory().fingerprint() == factories[0].fingerprint()


def test_zerosearch_finds_more_noise_the_later_the_update(monkeypatch):
    class Writer:
        async def complete(self, prompt, **_):
            quality = "noisy" if "noisy" in prompt else "useful"
            return ChatCompletion(f"Doc 1: {quality} words\nDoc 2: more", 0, 0)

    monkeypatch.setattr(
        zerosearch, "make_simulator", lambda *config: zerosearch.Simulator(Writer(), *config)
    )
    played = factory(retriever="zerosearch")
    assert played.may_block

    def noisy(tasks):
        environment = played.make()
        noise_count = 0
        for task in tasks:
            environment.reset(task)
            noise_count += "noisy words" in environment.step(environment.oracle()).observation
        return noise_count

    assert noisy(eval_tasks(played, "test", 60, 0)) == 0
    assert noisy(train_tasks(played, 0, 60, 0)) == 0
    assert 15 < noisy(train_tasks(played, 150, 60, 0)) < 45  # half of them, by default


# --- questions from files

NILE = {
    "question": "which river is longest?",
    "golden_answers": ["Nile", "River Nile"],
    "data_source": "searchR1_nq",
}
ROWS = [NILE, {"question": "Who?", "golden_answers": ["Ada"], "data_source": "2wikimultihopqa"}]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def searchr1(rows):
    """Rows in the format that Search-R1's scripts/data_process write."""
    other_columns = {
        "prompt": [{"role": "user", "content": "Answer the question."}],
        "ability": "fact-reasoning",
    }
    target = [{"style": "rule", "ground_truth": {"target": row["golden_answers"]}} for row in rows]
    return [
        {**row, **other_columns, "reward_model": model}
        for row, model in zip(rows, target, strict=True)
    ]


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def of_files(folder, corpus=True, **changes):
    documents = [
        {"id": name, "contents": f'"{name}"\n{name} is a river.'} for name in ("Nile", "Volta")
    ]
    search = {"corpus": jsonl(folder / "corpus.jsonl", documents)} if corpus else {}
    return factory(**{"data": folder, **search, **changes})


def contents(tasks):
    return [(task.kind, task.payload.text, task.payload.answers) for task in tasks]


EXPECTED = [
    ("nq", "which river is longest?", ("Nile", "River Nile")),
    ("2wikimultihopqa", "Who?", ("Ada",)),
]


@pytest.mark.slow
def test_parquet_and_json_lines_say_the_same(tmp_path):
    assert contents(data.load(jsonl(tmp_path / "a.jsonl", ROWS))) == EXPECTED
    assert contents(data.load(parquet(tmp_path / "a.parquet", ROWS))) == EXPECTED
    rows = searchr1(ROWS)
    assert contents(data.load(parquet(tmp_path / "b.parquet", rows))) == EXPECTED
    without = []
    for row in rows:
        without.append(dict(row))
        del without[-1]["golden_answers"]
    assert contents(data.load(parquet(tmp_path / "c.parquet", without))) == EXPECTED
    path = jsonl(
        tmp_path / "capitals.jsonl",
        [{"question": "Capital of Chad?", "golden_answers": "N'Djamena"}],
    )
    assert contents(data.load(path)) == [("capitals", "Capital of Chad?", ("N'Djamena",))]
    sources = ("searchR1_nq", "RUC-NLPIR/FlashRAG_datasets/TriviaQA", "bamboogle", "my_own", "uniq")
    assert [*map(data.short_name, sources)] == ["nq", "triviaqa", "bamboogle", "my_own", "uniq"]


GOOD = json.dumps(ROWS[0]).encode()


def refused(path) -> str:
    with pytest.raises(UserError) as error:
        data.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "test.jsonl"
    for content, problem in (
        (GOOD + b"\n" + GOOD[:40], ", line 2: Invalid JSON: EOF while"),
        (b'\n\n{"question": "\xff"}', ", line 3: Invalid JSON: invalid unicode"),
        (GOOD + b"\n[1]", ", line 2: Input should be an object, not [1]"),
        (b'{"golden_answers": ["a"]}', ", line 1: question: Field required"),
        (
            b'{"question": " ", "golden_answers": ["a"]}',
            ", line 1: question: String should match pattern",
        ),
        (
            b'{"question": "a", "golden_answers": []}',
            ", line 1: golden_answers: List should have at least 1 item",
        ),
        (
            b'{"question": "a", "golden_answers": [7]}',
            ", line 1: golden_answers: 0: Input should be a valid string",
        ),
        (b"\n\n", "contains no questions"),
    ):
        path.write_bytes(content)
        assert problem in refused(path)
    path = tmp_path / "test.parquet"
    content_of_file = parquet(path, ROWS).read_bytes()
    for content in (
        content_of_file[:-20],
        GOOD,
        b"",
        content_of_file[:4] + b"\xff" * 36 + content_of_file[40:],
    ):
        path.write_bytes(content)
        assert "not a complete parquet" in refused(path)
    assert "no column 'question'; it has golden_answers" in refused(
        parquet(path, [{"golden_answers": ["a"]}])
    )
    missing = {"question": "Why?", "golden_answers": None, "data_source": "nq"}
    assert ", row 3: golden_answers: Input should be a valid list" in refused(
        parquet(path, [*ROWS, missing])
    )
    assert "row 1: question: Input should be" in refused(
        parquet(path, [{"question": 3, "golden_answers": ["a"]}])
    )


def test_a_folder_has_one_file_of_a_split_and_no_expert(tmp_path):
    for settings, message in (
        ({"data": tmp_path / "nowhere"}, "does not exist"),
        ({}, "holds neither test.parquet and test.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            of_files(tmp_path, **settings)
    jsonl(tmp_path / "test.jsonl", ROWS)
    played = of_files(tmp_path)
    assert contents(eval_tasks(played, "test", 0, 0)) == EXPECTED
    environment = played.make()
    environment.reset(eval_tasks(played, "test", 0, 0)[0])
    with pytest.raises(NoOracleError):
        environment.oracle()
    assert environment.step("<search>river Volta</search>").observation.startswith(
        '<information>{"result": "Doc 1: '
    )
    assert environment.step("<answer>the nile</answer>").won
    with pytest.raises(UserError, match="leave env"):
        warmup_tasks(played, 0, 1, 0)
    assert of_files(tmp_path).fingerprint() == played.fingerprint()
    assert "corpus.jsonl" in played.fingerprint()
    with pytest.raises(UserError, match=r"needs documents: set env\.corpus"):
        of_files(tmp_path, corpus=False)
    # A single file serves as every split.
    single_file = of_files(tmp_path, data=jsonl(tmp_path / "nq.jsonl", ROWS[:1]))
    assert len(eval_tasks(single_file, "test", 0, 0)) == 1
    assert len(train_tasks(single_file, 0, 1, 0)) == 1
    assert single_file.fingerprint() != played.fingerprint()
    (tmp_path / "train.jsonl").write_text("{")
    # Refused before a model is loaded.
    with pytest.raises(UserError, match=r"train\.jsonl, line 1"):
        of_files(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    parquet(tmp_path / "test.parquet", ROWS)
    with pytest.raises(UserError, match="contains both"):
        of_files(tmp_path)
    with pytest.raises(UserError, match=r"test\.csv is neither \.parquet nor \.jsonl"):
        of_files(tmp_path, data=(tmp_path / "test.parquet").rename(tmp_path / "test.csv"))
