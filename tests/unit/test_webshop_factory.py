"""WebShop's tasks are pure functions that never mix; the buyer wins every goal it can reach, random play none."""

import random

import pytest

from paw.config import Config, ModelConfig
from paw.envs import make_factory
from paw.envs.base import admissible_responses, eval_tasks, train_tasks, warmup_tasks
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import generator
from paw.envs.webshop.buyer import next_action, wanted_options
from paw.envs.webshop.factory import WebshopFactory
from paw.envs.webshop.prompt import PaperStyle
from paw.envs.webshop.session import Session
from paw.errors import UserError
from paw.recipe import load
from paw.rollout.success import success_metrics
from paw.types import Group, Trajectory, Turn


def factory(products=200, goals="synthetic", **settings) -> WebshopFactory:
    settings = {"eval_split": "test", "max_turns": 15, "products": products, "goals": goals, **settings}
    return WebshopFactory(WebshopConfig(**settings))


def episode(environment, task, respond) -> list:
    environment.reset(task)
    outcomes = []
    while not outcomes or not outcomes[-1].done:
        outcomes.append(environment.step(respond(environment)))
    return outcomes


def at_random(rng: random.Random):
    """Any action that does something, or a search for what the task is about."""

    def respond(environment) -> str:
        query = environment.format_action(f"search[{environment.session.goal.query}]")
        return rng.choice(admissible_responses(environment) or [query])

    return respond


def score_of(factory: WebshopFactory, respond, count: int) -> tuple[float, float]:
    """(share won, mean score)."""
    environment = factory.make()
    last = [episode(environment, task, respond)[-1] for task in eval_tasks(factory, "test", count, 0)]
    return sum(o.won for o in last) / len(last), sum(o.score for o in last) / len(last)


@pytest.mark.parametrize("style", ["paper", "compact"])
@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_the_buyer_buys_what_is_wanted_and_random_play_does_not(style, goals):
    shop = factory(style=style, goals=goals)
    assert score_of(shop, lambda environment: environment.oracle(), 100) == (1.0, 1.0)
    won, score = score_of(shop, at_random(random.Random(0)), 100)
    assert won <= 0.05 and score < 0.3


def test_the_buyer_reaches_every_goal_from_anywhere():
    shop = factory()
    rng, style = random.Random(0), PaperStyle()
    for task in eval_tasks(shop, "test", 60, 1):
        session = Session(shop.catalogue, task.payload.goal)
        for _ in range(rng.randrange(12)):
            clicks = [
                action for action in session.available() if action.startswith("click") and "buy now" not in action
            ]
            session.step(rng.choice(["search[tea]", f"search[{task.payload.goal.name}]", *clicks]))
        steps = 0
        while session.reward is None and steps < 15:
            session.step(next_action(session, style.queries(session)))
            steps += 1
        assert session.reward == 1.0


def test_the_buyer_takes_another_product_that_earns_as_much_and_values_that_are_near():
    shop = factory()
    goal = next(goal for goal in shop.catalogue.goals if len(goal.options) == 2)
    product = shop.catalogue.by_asin[goal.asin.lower()]
    assert wanted_options(product, goal, "rules") == goal.options
    people = {str(i): f"{value} " for i, value in enumerate(goal.options.values())}
    near = type(goal)(**{**{name: getattr(goal, name) for name in goal.__slots__}, "options": people})
    assert wanted_options(product, near, "rules") == goal.options
    assert wanted_options(product, type(goal)(**{**_fields(goal), "options": {}}), "rules") == {}


def _fields(goal) -> dict:
    return {name: getattr(goal, name) for name in goal.__slots__}


def test_tasks_are_pure_and_splits_share_no_goal():
    shop = factory()
    tasks = train_tasks(shop, 3, 4, seed=1)
    assert tasks == train_tasks(factory(), 3, 4, seed=1) != train_tasks(shop, 3, 4, seed=2)
    assert [t for step in range(4) for t in train_tasks(shop, step, 2, 1)] == train_tasks(shop, 0, 8, 1)
    assert warmup_tasks(shop, 10, 3, 0)[1] == warmup_tasks(shop, 11, 1, 0)[0]
    n = len(shop.catalogue.goals)
    train = {task.id for task in train_tasks(shop, 0, n, 0)}
    test = {task.id for task in eval_tasks(shop, "test", 0, 0)}
    assert len(train) + len(test) == n == len(train | test)
    assert test == {f"goal/{i}" for i in range(shop.catalogue.n_test)}
    drawn = [task.id for task in eval_tasks(shop, "test", 400, 5)]
    assert drawn == [task.id for task in eval_tasks(shop, "test", 400, 5)] and set(drawn) < test
    assert {task.kind for task in eval_tasks(shop, "test", 0, 0)} == set(generator.ROOTS)


def test_the_warm_up_visits_shops_of_its_own():
    shop = factory(60, style="compact")
    tasks = warmup_tasks(shop, 0, 130, 0)
    assert len({task.id for task in tasks} | {warmup_tasks(shop, 0, 1, 1)[0].id}) == 131
    assert {task.payload.shop for task in tasks} == {1, 2, 3}
    own = {product.asin for product in shop.catalogue.products}
    assert all(task.payload.goal.asin not in own for task in tasks)
    environment = shop.make()
    for task in (*tasks[60:66], *train_tasks(shop, 0, 2, 0)):
        assert episode(environment, task, lambda environment: environment.oracle())[-1].won


def test_outcomes_of_an_episode():
    shop = factory(reward=10.0)
    environment, (task,) = shop.make(), eval_tasks(shop, "test", 1, 0)
    *turns, last = episode(environment, task, lambda environment: environment.oracle())
    assert (last.reward, last.done, last.won, last.score) == (10.0, True, True, 1.0)
    assert last.observation == "" and last.action == "click[buy now]"
    assert all((turn.reward, turn.done, turn.won, turn.score) == (0.0, False, False, 0.0) for turn in turns)
    assert environment.reset(task) == "'Search'" == environment.anchor()
    found = environment.step(environment.oracle())
    assert found.observation == environment.anchor() and found.observation.startswith("'Back to Search' [SEP] 'Page 1")
    assert found.valid and found.action == f"search[{task.payload.goal.query}]"
    partly = [
        environment.step(environment.format_action(action))
        for action in (environment.admissible_actions()[2], "click[buy now]")
    ]
    assert 0 < partly[-1].score < 1 and partly[-1].reward == 0 and partly[-1].done and not partly[-1].won


def test_the_step_limit_ends_with_score_zero():
    shop = factory(max_turns=3)
    (task,) = eval_tasks(shop, "test", 1, 0)
    outcomes = episode(shop.make(), task, lambda environment: "no tags")
    assert [o.done for o in outcomes] == [False, False, True]
    assert not any(o.valid for o in outcomes) and outcomes[-1].observation == "'Search'"
    turns = [Turn([], [], [], None, "", "", outcome, "", 0) for outcome in outcomes]
    assert success_metrics([Group(task, [Trajectory(task, 0, turns)])])["score"] == 0.0


def test_playable():
    environment, (task,) = factory().make(), eval_tasks(factory(), "test", 1, 0)
    environment.reset(task)
    assert environment.task == task.payload.goal.instruction and environment.admissible_actions() == []
    environment.step(environment.format_action(f"search[{task.payload.goal.query}]"))
    assert environment.admissible_actions()[:2] == ["click[back to search]", "click[next >]"]
    assert environment.step(environment.format_action("click[next >]")).observation.startswith(
        "'Back to Search' [SEP] 'Page 2"
    )
    compact = factory(style="compact").make()
    compact.reset(task)
    first = compact.admissible_actions()[0]
    assert first.startswith("search[") and compact.format_action(first) == admissible_responses(compact)[0] != first


def test_the_users_files(tmp_path):
    generator.write(tmp_path, products=60)
    shop = factory(data=tmp_path)
    assert "small" in shop.fingerprint() and shop.fingerprint() != factory(60).fingerprint()
    with pytest.raises(UserError, match=r"items_shuffle_1000\.json is missing"):
        factory(data=tmp_path / "elsewhere")


@pytest.mark.parametrize(("key", "split"), [("eval_split", "valid_unseen"), ("train_split", "test")])
def test_there_are_no_other_splits(key, split):
    with pytest.raises(UserError, match=f"env.{key} = '{split}'"):
        factory(**{key: split})
    with pytest.raises(UserError, match=r"env\.eval_split = 'dev'"):
        eval_tasks(factory(), "dev", 1, 0)


def test_fingerprint_tells_catalogues_apart():
    assert factory().fingerprint() == factory().fingerprint()
    assert len({factory(n, goals=goals).fingerprint() for n in (200, 60) for goals in ("synthetic", "human")}) == 4


def test_the_recipe_is_small_enough_for_its_model():
    config = load("webshop-quickstart")
    shop = make_factory(Config.model_validate(config.model_dump()))
    environment, lines, words = shop.make(), set(), 0
    for task in warmup_tasks(shop, 0, 150, 0):
        environment.reset(task)
        done = False
        while not done:
            lines.update(admissible_responses(environment))
            words = max(words, len(environment.context().split()))
            done = environment.step(environment.oracle()).done
    assert len(lines) < 300 and words < 200
    assert make_factory(Config(model=ModelConfig(path="-"), env=config.env)).name == "webshop"
