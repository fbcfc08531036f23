"""WebShop: the goals of training, warm-up and evaluation, and one episode of a goal.

The first goals are for evaluation, and are drawn with replacement as in the reference code. The
others are for training. The warm-up visits an endless sequence of generated shops.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paw.envs.base import Endless, EnvFactory, Tasks
from paw.envs.settings import WebshopConfig
from paw.envs.webshop import catalogue
from paw.envs.webshop.prompt import CompactStyle, PaperStyle, Style
from paw.envs.webshop.reward import Goal, Product, options_met, reward
from paw.envs.webshop.session import BACK, BUY, NEXT, PER_PAGE, PREVIOUS, Session
from paw.errors import UserError
from paw.types import Outcome, Task

HELD_OUT = "test"
WARMUP_VISITS = 64
"""Number of goals that the warm-up plays in each generated shop."""
NOT_FOUND = 1_000
"""Page number of a product that a search does not find."""


class Visit(NamedTuple):
    shop: int
    """0 is the factory's own catalogue. Other numbers are seeds of generated ones."""
    goal: Goal


class WebshopFactory(EnvFactory):
    """The goals of one catalogue: the user's copy of WebShop's files, or a generated shop."""

    Config = WebshopConfig
    name = "webshop"
    distinct_eval = False

    def __init__(self, config: WebshopConfig) -> None:
        if config.train_split != "train":
            raise UserError(
                f"env.train_split = '{config.train_split}': WebShop's split to train on is 'train'"
            )
        _check_held_out(config.eval_split)
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        if config.data:
            self.catalogue = catalogue.load(config.data.expanduser(), config)
        else:
            self.catalogue = self._generated(0)
        tasks = []
        for i, goal in enumerate(self.catalogue.goals):
            visit = Visit(shop=0, goal=goal)
            tasks.append(Task(f"goal/{i}", kind=goal.product.category, payload=visit))
        self._test = tasks[: self.catalogue.n_test]
        self._train = tasks[self.catalogue.n_test :]

    def tasks(self, split: str, seed: int) -> Tasks:
        """Return the goals of a split. Raises UserError if it is not train, test or warmup."""
        if split == "train":
            return self._train
        if split == "warmup":
            return Endless(lambda i: self._warmup_task(i, seed))
        _check_held_out(split)
        return self._test

    def make(self) -> "WebshopEnv":
        return WebshopEnv(
            self.config, lambda shop: self._generated(shop) if shop else self.catalogue
        )

    def fingerprint(self) -> str:
        """Return the catalogue's kind and hash, and how goals and rewards are made."""
        stock = self.catalogue
        kind = self.config.catalogue if self.config.data else "generated"
        goals = f"{len(stock.goals)} {self.config.goals} goals"
        return f"webshop {kind}, {goals}, nouns {stock.nouns}, {stock.digest[:16]}"

    def _warmup_task(self, i: int, seed: int) -> Task:
        shop_number, visit_number = divmod(i, WARMUP_VISITS)
        shop = 1 + shop_number + seed * 1_000_000
        goals = self._generated(shop).goals
        goal = goals[visit_number % len(goals)]
        return Task(
            f"warmup/{shop}/{visit_number}", kind=goal.product.category, payload=Visit(shop, goal)
        )

    def _generated(self, seed: int) -> catalogue.Catalogue:
        return catalogue.generated(self.config.products, self.config.goals, self.config.nouns, seed)


class WebshopEnv:
    """Plays one session at a time. `catalogue_of` returns the catalogue of a shop by its number."""

    task: str = ""

    def __init__(
        self, config: WebshopConfig, catalogue_of: Callable[[int], catalogue.Catalogue]
    ) -> None:
        self.config = config
        self._catalogue_of = catalogue_of
        style = PaperStyle if config.style == "paper" else CompactStyle
        self.style: Style = style(history=config.history, think=config.think)
        # Set by `reset` and `step`.
        self.session: Session
        self._past: list[tuple[str, str]] = []
        """(observation, action) of each turn so far."""
        self._text = ""
        """The last observation."""
        self._actions: dict[str, str] = {}
        """The session's action, by name, for each action that can be played now."""

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a Visit."""
        visit: Visit = task.payload
        self.session = Session(self._catalogue_of(visit.shop), visit.goal)
        self.task = visit.goal.instruction
        self._past = []
        self._look()
        return self._text

    def context(self) -> str:
        return self.style.prompt(self.session, self._past)

    def step(self, response: str) -> Outcome:
        """Play the action parsed from `response`.

        The session ends with a purchase or after env.max_turns turns.
        """
        action, valid = self.style.parse_action(response, self._actions)
        self.session.step(self._actions.get(action, action))
        self._past.append((self._text, action))

        score = self.session.reward  # None until something is bought
        if score is None:
            self._look()
        won = score == 1
        return Outcome(
            observation=self._text if score is None else "",  # the last page shows the reward
            reward=self.config.reward if won else 0.0,
            done=score is not None or len(self._past) >= self.config.max_turns,
            won=won,
            action=action,
            valid=valid,
            score=score or 0.0,
        )

    def oracle(self) -> str:
        return self.format_action(next_action(self.session, self.style.queries(self.session)))

    def admissible_actions(self) -> list[str]:
        """Return the actions `click[...]` that currently have an effect.

        A `search[...]` with any words is possible on every page, but is not listed.
        """
        return list(self._actions.values())

    def format_action(self, action: str) -> str:
        names = [name for name, session_action in self._actions.items() if session_action == action]
        return self.style.format_action(names[0] if names else action)

    def _look(self) -> None:
        """Read the page."""
        self._text = self.style.observation(self.session)
        self._actions = self.style.actions(self.session)


def _check_held_out(split: str) -> None:
    if split != HELD_OUT:
        raise UserError(
            f"env.eval_split = '{split}': WebShop's split to evaluate on is '{HELD_OUT}'"
        )


# --- the oracle, a rule-based buyer who knows which product a goal was made from


def next_action(session: Session, queries: Sequence[str]) -> str:
    """Return the buyer's next action.

    The buyer searches with the best of `queries`, turns pages until the product is listed, opens
    it, chooses its options and buys it. If another open product also has the full reward, the buyer
    buys that one.
    """
    goal = session.goal
    product = session.product
    if session.searching:
        pages = [_page_of(goal.product, session.catalogue.search(query)) for query in queries]
        best = pages.index(min(pages))
        return f"search[{queries[best]}]"
    if product is None:
        return f"click[{_towards(goal.product, session)}]"

    wanted = wanted_options(product, goal)
    fits = product.asin == goal.product.asin
    if not fits:
        fits = reward(product, goal, wanted, session.catalogue.nouns) == 1
    if session.sub_page or not fits:
        return f"click[{PREVIOUS}]"
    for value in wanted.values():
        if value not in session.options.values():
            return f"click[{value}]"
    return f"click[{BUY}]"


def _towards(wanted: Product, session: Session) -> str:
    """Return what to click on a page of results in order to reach the product."""
    page = _page_of(wanted, session.hits)
    if page == session.page:
        return wanted.asin.lower()
    if page == NOT_FOUND:
        return BACK
    return NEXT if page > session.page else PREVIOUS


def wanted_options(product: Product, goal: Goal) -> dict[str, str]:
    """Return the options of `product` that meet those of `goal`, as far as it has them."""
    wanted = set(goal.options.values())
    exact: dict[str, str] = {}
    for name, offered in product.options.items():
        for value in offered:
            if value in wanted:
                exact[name] = value
    if wanted <= set(exact.values()):
        return exact

    # Text that people wrote may be only similar to a value.
    chosen: dict[str, str] = {}
    for name, offered in product.options.items():
        met = {value: options_met(goal, {**chosen, name: value}) for value in offered}
        best = max(offered, key=lambda value: met[value], default="")
        if best and met[best] > options_met(goal, chosen):
            chosen[name] = best
    return chosen


def _page_of(wanted: Product, hits: Sequence[Product]) -> int:
    """Return the results page that lists the product, from 1; NOT_FOUND if there is none."""
    for i, product in enumerate(hits):
        if product.asin == wanted.asin:
            return i // PER_PAGE + 1
    return NOT_FOUND
