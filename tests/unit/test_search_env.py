"""Search QA without files: the generated world, the paper's prompts literally, actions, exact match, episodes."""

import json
import re
import threading
import time

import pytest

from paw.config import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.base import admissible_responses, eval_tasks, train_tasks, warmup_tasks
from paw.envs.search.data import Question
from paw.envs.search.factory import SearchEnv
from paw.envs.search.prompt import Action, CompactStyle, PaperStyle, make_style
from paw.envs.search.retrieval.base import Hit, make_retriever
from paw.envs.search.reward import exact_match, normalize
from paw.envs.search.world import RELATIONS, World, digest, make_worlds, split
from paw.envs.settings import SearchConfig
from paw.errors import EnvironmentFailure, UserError
from paw.types import Task

ENV = SearchConfig(eval_split="test", max_turns=4, history=4, reward=1.0, invalid_penalty=0.01)


def factory(entities=100, topk=3, search=None, **changes):
    env = ENV.model_copy(update={"entities": entities, "topk": topk, **(search or {}), **changes})
    return make_factory(Config(model=ModelConfig(path="-"), env=env))


def shelf(**documents):
    """A search that finds the documents whose title is in the query."""
    return lambda _, query: [Hit(t, f'"{t}"\n{text}', 1.0) for t, text in documents.items() if t in query]


def episode(question=None, search=None, **changes):
    environment = SearchEnv(ENV.model_copy(update=changes), search or shelf(Nile="It is in Africa."))
    environment.reset(Task("t", "nq", question or Question("Where is the Nile?", ("Africa", "in Africa"))))
    return environment


# --- the world ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    return World(300)


@pytest.mark.parametrize("entities", range(20, 60))
def test_a_world_has_as_many_entities_as_asked_for_and_every_kind(entities):
    world = World(entities, numbered=entities % 2 == 0)
    assert len(world.entities) == len(world.documents) == entities
    assert {entity.kind for entity in world.entities} == set(RELATIONS)
    assert all(split([world]).values())


def test_a_world_follows_from_its_seed():
    worlds = [World(40), World(40, seed=1), World(41), World(40, numbered=True)]
    assert digest([World(40)]) == digest(worlds[:1])
    assert len({digest([world]) for world in worlds}) == 4


def test_of_several_worlds_each_is_in_one_split():
    made = split(make_worlds(20, numbered=True, count=10))
    assert {name: {q.world for _, q in part} for name, part in made.items()} == {
        "test": {0, 1},
        "warmup": {2, 3, 4},
        "train": {5, 6, 7, 8, 9},
    }


def test_names_and_aliases_are_unique(world):
    names = [normalize(name) for entity in world.entities for name in set(map(normalize, entity.names))]
    assert len(names) == len(set(names)) and all(names)


def test_questions_are_unique_and_the_splits_apart(world):
    texts = [question.text for _, question in world.questions]
    assert len(texts) == len(set(texts)) > 1000
    assert {kind for kind, _ in world.questions} == {"one-hop", "two-hop"}


def test_each_hop_is_a_document_that_names_the_next_and_the_last_the_answer(world):
    documents = {contents.partition("\n")[0].strip('"'): contents for _, contents in world.documents}
    for kind, question in world.questions:
        assert len(question.hops) == {"one-hop": 1, "two-hop": 2}[kind]
        assert question.hops[0] in question.text and question.answers[0] not in question.text
        for title, said in zip(question.hops, [*question.hops[1:], question.answers[0]], strict=True):
            assert said in documents[title].partition("\n")[2]


def test_a_two_hop_question_takes_two_documents(world):
    documents = {contents.partition("\n")[0].strip('"'): contents for _, contents in world.documents}
    for kind, question in world.questions:
        if kind == "two-hop":
            first, second = question.hops
            assert second not in question.text
            assert question.answers[0] not in documents[first]
            assert first not in documents[second]


def test_documents_say_things_in_different_words(world):
    said = "\n".join(contents for _, contents in world.documents)
    sentences = [sentence for relations in RELATIONS.values() for one in relations for sentence in one.sentences]
    assert all(re.search(sentence.format(s="[A-Z].*", o="[A-Z].*"), said) for sentence in sentences)
    named, numbered = World(20), World(20, numbered=True)
    assert named.documents[0][1] == (
        '"Nakuk Nanorn"\nNakuk Nanorn is a nurse. Nakuk Nanorn was born in Wuvex. Nakuk Nanorn works for Geholal Works.'
    )
    assert numbered.documents[0][1] == '"person 1"\nperson 1 was born in town 7. person 1 works for company 16.'


# --- the paper's prompts ------------------------------------------------------------------------------------------

FIRST = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: Where is the Nile?

Now it's your turn to respond for the current step.
You should first conduct reasoning process. This process MUST be enclosed within <think> </think> tags.\x20
After completing your reasoning, choose only one of the following actions (do not perform both):
(1) If you find you lack some knowledge, you can call a search engine to get more external information using format: <search> your query </search>.
(2) If you have enough knowledge to answer the question confidently, provide your final answer within <answer> </answer> tags, without detailed illustrations. For example, <answer>Beijing</answer>.
"""  # noqa: E501
THIRD = """
You are an expert agent tasked with answering the given question step-by-step.
Your question: Where is the Nile?

Prior to this step, you have already taken 2 step(s). Below is the interaction history where <search> </search> wrapped your past search queries and <information> </information> wrapped the corresponding search results returned by the external search engine. History:
Step 1:<search>the Nile</search> <information>{"result": "Doc 1: \\"Nile\\"\\nIt is in Africa.\\n"}</information>

Step 2: \n

Now it's your turn to respond for the current step.
You should first conduct reasoning process. This process MUST be enclosed within <think> </think> tags.\x20
After completing your reasoning, choose only one of the following actions (do not perform both):
(1) If you find you lack some knowledge, you can call a search engine to get more external information using format: <search> your query </search>.
(2) If you have enough knowledge to answer the question confidently, provide your final answer within <answer> </answer> tags, without detailed illustrations. For example, <answer>Beijing</answer>.
"""  # noqa: E501


def test_the_papers_prompts_literally():
    environment = episode()
    assert environment.context() == FIRST
    environment.step("<think>Hm.</think><search> the Nile </search>")
    environment.step("I do not know.")
    assert environment.context() == THIRD


def test_history_is_cut_where_it_is_set_to_be():
    environment = episode(history=1)
    environment.step("<search>the Nile</search>")
    environment.step("<search>Volta</search>")
    assert "Step 1:" not in environment.context()
    assert 'Step 2:<search>Volta</search> <information>{"result": ""}</information>\n\n\n' in environment.context()
    environment = episode(history=0)
    environment.step("<search>the Nile</search>")
    assert environment.context() == FIRST


def test_without_a_thought_the_prompt_asks_for_none():
    prompt = episode(think=False).context()
    assert "think" not in prompt and "step.\nChoose only one" in prompt


def test_a_question_with_braces_stays_as_it_is():
    assert "Your question: {history} %s {0}?\n" in episode(Question("{history} %s {0}?", ("a",))).context()


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("<think>a</think><search> red  shoes </search>", "search[red  shoes]", True),
        ("<search>a</search>", "search[a]", True),
        ("<ANSWER>Paris\nFrance</Answer>", "answer[Paris\nFrance]", True),
        ("<answer></answer>", "answer[]", True),
        ("<search>a</search> text <answer>b</answer>", "search[a]", False),
        ("<answer>b</answer><search>a</search>", "search[a]", False),
        ("<answer>b</answer><search>a", "answer[b]", False),
        ("<search>a</search><search>b</search>", "search[a]", False),
        ("<answer>a</answer><answer>b</answer>", "answer[a]", False),
        ("<search>a <search>b</search>", "search[a <search>b]", False),
        ("<search><answer>a</answer></search>", "search[<answer>a</answer>]", False),
        ("a</search><search>b</search>", "", False),  # cut after the first closing tag
        ("<answer>a</search>b</answer>", "", False),
        ("<search>a", "", False),
        ("search[a]", "", False),
        ("", "", False),
    ],
)
def test_paper_projection(response, action, valid):
    played, well_formed = PaperStyle().parse_action(response)
    assert (str(played), well_formed) == (action, valid)


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("\nsearch town 12", "search[town 12]", True),
        ("answer river 3 ", "answer[river 3]", True),
        ("search", "", False),
        ("search town 12\nanswer river 3", "", False),
        ("look at town 12", "", False),
        ("", "", False),
    ],
)
def test_compact_projection(response, action, valid):
    played, well_formed = CompactStyle().parse_action(response)
    assert (str(played), well_formed) == (action, valid)


@pytest.mark.parametrize("style", ["paper", "compact"])
@pytest.mark.parametrize("bare", ["search[town 12]", "answer[a [b] c]"])
def test_an_answer_plays_its_bare_action(style, bare):
    environment = episode(style=style)
    outcome = environment.step(environment.format_action(bare))
    assert (outcome.action, outcome.valid) == (bare, True)
    assert make_style(style, history=4, think=True).parse_action(environment.format_action("look"))[1] is False
    assert Action.parse(bare) != Action.parse("look") == Action("", "")


def test_what_is_found_is_told_as_the_search_tool_tells_it():
    style = PaperStyle()
    assert style.observation(['"Köln"\nA "city".\n', " b "]) == (
        '<information>{"result": "Doc 1: \\"K\\u00f6ln\\"\\nA \\"city\\".\\nDoc 2: b\\n"}</information>'
    )
    inner = style.observation(["x\ny"]).removeprefix("<information>").removesuffix("</information>")
    assert json.loads(inner) == {"result": "Doc 1: x\ny\n"}
    assert CompactStyle().observation(['"town 1"\ntown 1 is\n old.', "no title"]) == "town 1 is old.\nno title"


# --- exact match --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "golden", "right"),
    [
        ("the Beatles", ["Beatles"], True),
        ("Beatles, The!", ["the beatles"], True),
        ("An apple a day", ["apple day"], True),
        ("theatre", ["atre"], False),  # articles are whole words
        ("U.S.A.", ["USA"], True),
        ("well-known", ["well known"], False),  # punctuation goes without a blank
        ("  two   words\n", ["two words"], True),
        ("1,000", ["1000"], True),
        ("São Paulo", ["são paulo"], True),
        ("Sao Paulo", ["São Paulo"], False),
        ("the café’s", ["café’s"], True),  # a typographic apostrophe is no ASCII punctuation
        ("cafés", ["café’s"], False),
        ("STRASSE", ["straße"], False),  # lower(), not casefold()
        ("yes", ["Yes."], True),
        ("no", ["yes", "No"], True),
        ("no", ["yes"], False),
        ("Nile", ["River Nile"], False),
        ("", ["Nile"], False),
        ("", ["The The"], False),
        ("The The", ["the the"], True),
        ("?", ["A"], False),
        ("anything", [], False),
    ],
)
def test_exact_match(answer, golden, right):
    assert exact_match(answer, golden) is right


# --- episodes -----------------------------------------------------------------------------------------------------


def test_an_episode_of_a_search_and_an_answer():
    environment = episode()
    assert environment.anchor() == environment.task == "Where is the Nile?" and environment.admissible_actions() == []
    found = environment.step("<search>Nile</search>")
    assert found.observation == '<information>{"result": "Doc 1: \\"Nile\\"\\nIt is in Africa.\\n"}</information>'
    assert (found.done, found.won, found.reward, found.valid) == (False, False, 0.0, True)
    assert environment.anchor() == found.observation
    answered = environment.step("<answer>in africa</answer>")
    assert (answered.done, answered.won, answered.reward, answered.observation) == (True, True, 1.0, "")
    with pytest.raises(AssertionError):
        environment.step("<answer>again</answer>")


def test_a_wrong_answer_ends_it_and_words_found_are_no_answer():
    environment = episode(search=shelf(Nile="<answer>Africa</answer>"))
    environment.step("<search>Nile</search>")
    outcome = environment.step("<answer>Asia</answer>")
    assert (outcome.done, outcome.won, outcome.reward) == (True, False, 0.0)


def test_the_last_turn_finds_nothing_any_more():
    environment = episode(max_turns=2)
    assert environment.step("nothing").observation == ""
    last = environment.step("<search>Nile</search>")
    assert (last.done, last.observation, last.action, last.valid) == (True, "", "search[Nile]", True)


def test_a_new_question_starts_from_nothing():
    environment = episode()
    environment.step("<search>Nile</search>")
    environment.reset(Task("u", "nq", Question("Who?", ("Ada",))))
    assert environment.anchor() == "Who?" and "Step 1" not in environment.context()


@pytest.mark.parametrize("error", [ConnectionError("refused\nby peer"), UserError("no server"), ValueError("no JSON")])
def test_a_failing_search_fails_its_episode_alone(error):
    def broken(question, query):
        raise error

    environment = episode(search=broken)
    with pytest.raises(EnvironmentFailure, match=f"search failed: {type(error).__name__}: [^\n]+$"):
        environment.step("<search>Nile</search>")
    environment = episode(search=broken)
    empty = environment.step("<search> </search>")  # is not asked for: an agent cannot break its episode so
    assert (empty.observation, empty.valid) == ('<information>{"result": ""}</information>', True)
    assert environment.step("<answer>Africa</answer>").won


@pytest.mark.parametrize(("style", "topk", "entities"), [("paper", 3, 60), ("compact", 1, 20), ("compact", 3, 20)])
def test_the_expert_answers_every_generated_question(style, topk, entities):
    played = factory(style=style, topk=topk, entities=entities)
    environment = played.make()
    for part in ("train", "warmup", "test"):
        for task in eval_tasks(played, part, 300, 0):
            environment.reset(task)
            outcome = environment.step(environment.oracle())
            while not outcome.done:
                assert outcome.valid
                outcome = environment.step(environment.oracle())
            assert outcome.won, task


@pytest.mark.parametrize(("style", "turns"), [("paper", [True, False, True]), ("compact", [True, False, False])])
def test_the_expert_goes_on_from_what_the_prompt_still_shows(style, turns):
    """After a stray search the paper's prompt still holds the first document; the compact one has to find it again."""
    played = factory(style=style, topk=1, entities=20)
    task = next(task for task in eval_tasks(played, "train", 0, 0) if task.kind == "two-hop")
    environment, hops = played.make(), task.payload.hops
    environment.reset(task)
    environment.step(environment.oracle())
    environment.step(environment.format_action("search[something else]"))
    expected = hops[1] if turns[2] else hops[0]
    assert environment.oracle().endswith(environment.style.format_action(Action("search", expected)).split(">")[-1])
    assert expected in environment.oracle()


def test_actions_of_a_numbered_world_are_whole_lines_of_it():
    played = factory(style="compact", entities=20)
    environment = played.make()
    environment.reset(train_tasks(played, 0, 1, 0)[0])
    responses = admissible_responses(environment)
    assert len(responses) == len(set(responses)) == 40 and environment.oracle() in responses
    assert all(environment.style.parse_action(response)[1] for response in responses)
    assert factory().make().admissible_actions() == []


def test_generated_tasks_are_seeded_and_their_splits_apart():
    played = factory(entities=40)
    train = [task for step in range(20) for task in train_tasks(played, step, 4, 3)]
    ids = {task.id for task in train}
    warm = {task.id for task in warmup_tasks(played, 0, 500, 3)}
    held_out = {task.id for task in eval_tasks(played, "test", 0, 3)}
    assert len(ids) == 80 and not ids & warm and not ids & held_out and not warm & held_out
    assert [t.id for t in train_tasks(played, 7, 4, 3)] == [t.id for t in train[28:32]]
    assert [t.id for t in warmup_tasks(played, 0, 4, 3)] == [t.id for t in warmup_tasks(factory(entities=40), 0, 4, 3)]


def test_fingerprints_differ_where_results_do():
    made = [factory(), factory(entities=101), factory(topk=2), factory(entities=20, style="compact")]
    assert len({one.fingerprint() for one in made}) == 4 and factory().fingerprint() == made[0].fingerprint()
    assert made[0].reward_max == 1.0 and made[0].invalid_penalty == 0.01 and made[0].may_block is False


def test_settings_that_do_not_go_together(tmp_path):
    with pytest.raises(UserError, match="no split 'valid_unseen', only test, warmup, train"):
        factory(eval_split="valid_unseen")
    with pytest.raises(UserError, match="no split 'dev'"):
        factory(train_split="dev")
    with pytest.raises(UserError, match=r"env.corpus = .* needs env.data"):
        factory(search={"corpus": tmp_path / "corpus.jsonl"})


def test_zerosearch_finds_more_noise_the_later_the_update(monkeypatch):
    from paw.agents import zerosearch
    from paw.agents.endpoint import Reply

    class Writer:
        async def complete(self, prompt, **_):
            quality = "noisy" if "noisy" in prompt else "useful"
            return Reply(f"Doc 1: {quality} words\nDoc 2: more", 0, 0, cut=False)

    monkeypatch.setattr(zerosearch, "make_simulator", lambda *config: zerosearch.Simulator(Writer(), *config))
    played = factory(search={"retriever": "zerosearch"})
    assert played.may_block

    def noisy(tasks):
        environment, count = played.make(), 0
        for task in tasks:
            environment.reset(task)
            count += "noisy words" in environment.step(environment.oracle()).observation
        return count

    assert noisy(eval_tasks(played, "test", 60, 0)) == noisy(train_tasks(played, 0, 60, 0)) == 0
    assert 15 < noisy(train_tasks(played, 150, 60, 0)) < 45  # half of them, by default


def test_a_server_answers_then_goes_down(monkeypatch):
    """While it is there all is as in process; then an episode fails, and a new run is told its URL."""
    uvicorn = pytest.importorskip("uvicorn", reason="pip install 'paw-trainer[search]'")
    from paw.envs.search.retrieval import remote, server

    monkeypatch.setattr(remote, "PAUSE_S", 0.0)
    local = factory(entities=20)
    documents = World(20).documents
    app = server.make_app(make_retriever(SearchConfig(), documents), SearchConfig(), documents=len(documents))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
        played = factory(entities=20, search={"retriever": url})
        assert played.may_block
        environment, other = played.make(), local.make()
        for task, same in zip(eval_tasks(played, "test", 0, 0), eval_tasks(local, "test", 0, 0), strict=True):
            environment.reset(task)
            other.reset(same)
            outcome = environment.step(environment.oracle())
            assert outcome == other.step(other.oracle()) and "Doc 1" in outcome.observation
    finally:
        running.should_exit = True
        thread.join()
    with pytest.raises(EnvironmentFailure, match=rf"search failed: .*{url}"):
        environment.step("<search>Nile</search>")
    with pytest.raises(UserError, match=url):
        factory(entities=20, search={"retriever": url})


def test_play_at_random_hardly_wins():
    played = factory(style="compact", entities=20)
    environment, won = played.make(), 0
    tasks = eval_tasks(played, "train", 200, 0)
    for start, task in enumerate(tasks):
        environment.reset(task)
        choices = admissible_responses(environment)
        done, turn = False, 0
        while not done:
            outcome = environment.step(choices[(7 * start + 11 * turn) % len(choices)])
            done, turn = outcome.done, turn + 1
        won += outcome.won
    assert won < 0.15 * len(tasks)
