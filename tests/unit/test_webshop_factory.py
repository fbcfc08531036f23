"""WebShop's tasks are pure functions that never mix; the buyer wins every goal it can reach, random play none."""

import random

import pytest

from paw.envs import make_factory
from paw.envs.base import admissible_responses, eval_tasks, train_tasks, warmup_tasks
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import generator
from paw.envs.webshop.factory import WebshopFactory
from paw.errors import UserError
from paw.recipe import load


def factory(**settings) -> WebshopFactory:
    return WebshopFactory(WebshopConfig(**{"eval_split": "test", "max_turns": 15, "products": 200, **settings}))


def episode(environment, task, respond=lambda environment: environment.oracle()) -> list:
    environment.reset(task)
    outcomes = []
    while not outcomes or not outcomes[-1].done:
        outcomes.append(environment.step(respond(environment)))
    return outcomes


@pytest.mark.parametrize("style", ["paper", "compact"])
@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_the_buyer_buys_what_is_wanted_and_random_play_does_not(style, goals):
    shop, rng = factory(style=style, goals=goals), random.Random(0)

    def at_random(environment) -> str:
        """Any action that does something, or a search for what the task is about."""
        query = environment.format_action(f"search[{environment.session.goal.product.query}]")
        return rng.choice(admissible_responses(environment) or [query])

    environment, tasks = shop.make(), eval_tasks(shop, "test", 60, 0)
    assert all((last := episode(environment, task)[-1]).won and last.score == 1 for task in tasks)
    ends = [episode(environment, task, at_random)[-1] for task in tasks]
    assert sum(end.won for end in ends) <= 3 and sum(end.score for end in ends) < 18


def test_tasks_are_pure_and_splits_share_no_goal():
    shop = factory()
    tasks = train_tasks(shop, 3, 4, seed=1)
    assert tasks == train_tasks(factory(), 3, 4, seed=1) != train_tasks(shop, 3, 4, seed=2)
    n = len(shop.catalogue.goals)
    train = {task.id for task in train_tasks(shop, 0, n, 0)}
    held_out = eval_tasks(shop, "test", 0, 0)
    test = {task.id for task in held_out}
    assert len(train) + len(test) == n == len(train | test)
    assert test == {f"goal/{i}" for i in range(shop.catalogue.n_test)}
    assert {task.id for task in eval_tasks(shop, "test", 400, 5)} < test
    assert {task.kind for task in held_out} == set(generator.SHOP["roots"])


def test_the_warm_up_visits_shops_of_its_own():
    shop = factory(products=60, style="compact")
    tasks = warmup_tasks(shop, 0, 130, 0)
    assert len({task.id for task in tasks} | {warmup_tasks(shop, 0, 1, 1)[0].id}) == 131
    assert {task.payload.shop for task in tasks} == {1, 2, 3}
    assert all(task.payload.goal.product.asin.lower() not in shop.catalogue.by_asin for task in tasks)
    environment = shop.make()
    for task in (*tasks[60:66], *train_tasks(shop, 0, 2, 0)):
        assert episode(environment, task)[-1].won


def test_outcomes_of_an_episode():
    shop = factory(reward=10.0)
    environment, (task,) = shop.make(), eval_tasks(shop, "test", 1, 0)
    *turns, last = episode(environment, task)
    assert (last.reward, last.done, last.won, last.score) == (10.0, True, True, 1.0)
    assert last.observation == "" and last.action == "click[buy now]"
    assert all((turn.reward, turn.done, turn.won, turn.score) == (0.0, False, False, 0.0) for turn in turns)
    assert environment.reset(task) == "'Search'" == environment.anchor()
    assert environment.task == task.payload.goal.instruction and environment.admissible_actions() == []
    found = environment.step(environment.oracle())
    assert found.observation == environment.anchor() and found.observation.startswith("'Back to Search' [SEP] 'Page 1")
    assert found.valid and found.action == f"search[{task.payload.goal.product.query}]"
    assert environment.admissible_actions()[:2] == ["click[back to search]", "click[next >]"]
    environment.step(environment.format_action(environment.admissible_actions()[2]))
    partly = environment.step(environment.format_action("click[buy now]"))
    assert 0 < partly.score < 1 and partly.reward == 0 and partly.done and not partly.won
    outcomes = episode(factory(max_turns=3).make(), task, lambda environment: "no tags")
    assert [(o.done, o.valid, o.score) for o in outcomes] == [(False, False, 0), (False, False, 0), (True, False, 0)]


def test_no_other_splits_and_fingerprints_tell_catalogues_apart(tmp_path):
    for key, split in (("eval_split", "valid_unseen"), ("train_split", "test")):
        with pytest.raises(UserError, match=f"env.{key} = '{split}'"):
            factory(**{key: split})
    with pytest.raises(UserError, match=r"env\.eval_split = 'dev'"):
        eval_tasks(factory(), "dev", 1, 0)
    generator.write(tmp_path, products=60)
    changes = [{}, {"goals": "human"}, {"products": 60}, {"data": tmp_path}]
    assert len({factory(**change).fingerprint() for change in changes}) == 4
    assert factory().fingerprint() == factory().fingerprint()


def test_the_recipe_is_small_enough_for_its_model():
    shop = make_factory(load("webshop-quickstart"))
    environment, lines, words = shop.make(), set(), 0
    for task in warmup_tasks(shop, 0, 150, 0):
        environment.reset(task)
        done = False
        while not done:
            lines.update(admissible_responses(environment))
            words = max(words, len(environment.context().split()))
            done = environment.step(environment.oracle()).done
    assert len(lines) < 300 and words < 200
