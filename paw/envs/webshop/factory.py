"""WebShop: which goals are played in training, warm-up and evaluation, and one session of them.

The first goals are for evaluation, drawn with replacement as in the reference code, the others for training. The
warm-up visits other shops, generated, endlessly many.
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
"""To each shop of the warm-up."""
LOST = 1_000
"""Page of a product that a search does not find."""


class Visit(NamedTuple):
    shop: int
    """0 is the factory's own catalogue; others are seeds of generated ones."""
    goal: Goal


class WebshopFactory(EnvFactory):
    """The goals of one catalogue, the user's copy of WebShop's or a generated one."""

    Config = WebshopConfig
    name = "webshop"
    distinct_eval = False

    def __init__(self, config: WebshopConfig) -> None:
        if config.train_split != "train":
            raise UserError(f"env.train_split = '{config.train_split}': WebShop's goals to train on are 'train'")
        _check_held_out(config.eval_split)
        self.config, self.reward_max, self.invalid_penalty = config, config.reward, config.invalid_penalty
        self.catalogue = catalogue.load(config.data.expanduser(), config) if config.data else self._generated(0)
        goals, n = enumerate(self.catalogue.goals), self.catalogue.n_test
        tasks = [Task(f"goal/{i}", goal.product.category, Visit(0, goal)) for i, goal in goals]
        self._test, self._train = tasks[:n], tasks[n:]

    def tasks(self, split: str, seed: int) -> Tasks:
        """UserError for a split other than train, test and warmup."""
        if split == "train":
            return self._train
        if split == "warmup":
            return Endless(lambda i: self._warmup_task(i, seed))
        _check_held_out(split)
        return self._test

    def make(self) -> "WebshopEnv":
        return WebshopEnv(self.config, lambda shop: self._generated(shop) if shop else self.catalogue)

    def fingerprint(self) -> str:
        """The catalogue's hash, and what goals and rewards are made with."""
        made, shop = self.catalogue, self.config
        kind = shop.catalogue if shop.data else "generated"
        return f"webshop {kind}, {len(made.goals)} {shop.goals} goals, nouns {made.nouns}, {made.digest[:16]}"

    def _warmup_task(self, i: int, seed: int) -> Task:
        number, place = divmod(i, WARMUP_VISITS)
        shop = 1 + number + seed * 1_000_000
        goals = self._generated(shop).goals
        goal = goals[place % len(goals)]
        return Task(f"warmup/{shop}/{place}", goal.product.category, Visit(shop, goal))

    def _generated(self, seed: int) -> catalogue.Catalogue:
        return catalogue.generated(self.config.products, self.config.goals, self.config.nouns, seed)


class WebshopEnv:
    """One session at a time."""

    task: str = ""

    def __init__(self, config: WebshopConfig, shop: Callable[[int], catalogue.Catalogue]) -> None:
        self.config, self._shop = config, shop
        style = PaperStyle if config.style == "paper" else CompactStyle
        self.style: Style = style(history=config.history, think=config.think)

    def reset(self, task: Task) -> str:
        """Start `task`, whose payload is a Visit."""
        visit: Visit = task.payload
        self.session = Session(self._shop(visit.shop), visit.goal)
        self.task = visit.goal.instruction
        self._past: list[tuple[str, str]] = []
        self._look()
        return self._text

    def context(self) -> str:
        return self.style.prompt(self.session, self._past)

    def step(self, response: str) -> Outcome:
        """Play what is parsed from `response`; the session ends with a purchase or after env.max_turns turns."""
        name, valid = self.style.parse_action(response, self._actions)
        self.session.step(self._actions.get(name, name))
        self._past.append((self._text, name))
        bought = self.session.reward
        if bought is None:
            self._look()
        seen = self._text if bought is None else ""  # the last page tells the reward
        done, won = bought is not None or len(self._past) >= self.config.max_turns, bought == 1
        reward = self.config.reward if won else 0.0
        return Outcome(seen, reward, done=done, won=won, action=name, valid=valid, score=bought or 0.0)

    def oracle(self) -> str:
        return self.format_action(next_action(self.session, self.style.queries(self.session)))

    def admissible_actions(self) -> list[str]:
        """`click[...]` of all that does something now; queries in words of one's own do so too, on every page."""
        return list(self._actions.values())

    def format_action(self, action: str) -> str:
        name = next((name for name, played in self._actions.items() if played == action), action)
        return self.style.format_action(name)

    def _look(self) -> None:
        self._text, self._actions = self.style.observation(self.session), self.style.actions(self.session)


def _check_held_out(split: str) -> None:
    if split != HELD_OUT:
        raise UserError(f"env.eval_split = '{split}': WebShop's goals to evaluate on are '{HELD_OUT}'")


# ---- a buyer by rules, which knows the product that a goal was made from


def next_action(session: Session, queries: Sequence[str]) -> str:
    """What it does now: search by the best of `queries`, page to the product, open it, choose its options and buy.

    It also buys another product that earns as much, where it finds it open.
    """
    goal, product = session.goal, session.product
    if session.searching:
        pages = [_page_of(goal.product, session.catalogue.search(query)) for query in queries]
        return f"search[{queries[pages.index(min(pages))]}]"
    if product is None:
        page = _page_of(goal.product, session.hits)
        if page == session.page:
            return f"click[{goal.product.asin.lower()}]"
        return f"click[{BACK if page == LOST else NEXT if page > session.page else PREVIOUS}]"
    wanted = wanted_options(product, goal)
    same = product.asin == goal.product.asin
    if session.sub_page or not (same or reward(product, goal, wanted, session.catalogue.nouns) == 1):
        return f"click[{PREVIOUS}]"
    missing = [value for value in wanted.values() if value not in session.options.values()]
    return f"click[{missing[0] if missing else BUY}]"


def wanted_options(product: Product, goal: Goal) -> dict[str, str]:
    """The options of `product` that meet those of `goal`, as far as it has them."""
    values = set(goal.options.values())
    same = {name: value for name, offered in product.options.items() for value in offered if value in values}
    if values <= set(same.values()):
        return same
    chosen: dict[str, str] = {}  # what people wrote may be near to a value only
    for name, offered in product.options.items():
        met = {value: options_met(goal, {**chosen, name: value}) for value in offered}
        best = max(offered, key=lambda value: met[value], default="")
        if best and met[best] > options_met(goal, chosen):
            chosen[name] = best
    return chosen


def _page_of(wanted: Product, hits: Sequence[Product]) -> int:
    return next((i // PER_PAGE + 1 for i, product in enumerate(hits) if product.asin == wanted.asin), LOST)
