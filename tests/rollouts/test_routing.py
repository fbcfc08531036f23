"""Routing: a request goes to the server that has its prompt cached, unless that server is clearly
busier."""

import random
from itertools import cycle

import pytest
import torch
from test_servers import VOCABULARY, Peer, ask, expected_tokens, finish
from torch import nn

from paw.config.recipe import load
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.rollouts.engines.base import Request
from paw.rollouts.engines.pool import SendingPool
from paw.rollouts.engines.routing import BUSIER_BY, Router
from paw.rollouts.engines.server import ServerEngine
from paw.rollouts.engines.transfer import FileTransfer
from paw.rollouts.sync import push_weights


def test_a_turn_goes_back_to_the_server_of_the_turns_before():
    router = Router()
    assert router.choose((0, 0), {"a": 3, "b": 0}) == "b"
    assert router.choose((0, 0), {"a": 0, "b": 3}) == "b"
    assert router.choose(None, {"a": 0, "b": 3}) == "a"


def test_members_of_a_group_begin_on_one_server_and_groups_spread_over_all():
    router = Router()
    loads = dict.fromkeys("abcd", 0)
    for group in range(16):
        servers = {router.choose((group, member), loads) for member in range(4)}
        assert len(servers) == 1
        loads[servers.pop()] += 4
    assert loads == dict.fromkeys("abcd", 16)


def test_an_episode_leaves_a_server_that_is_clearly_busier_and_stays_where_it_goes():
    router = Router()
    router.choose((0, 0), {"a": 0, "b": 1})
    assert router.choose((0, 0), {"a": BUSIER_BY, "b": 0}) == "a"
    assert router.choose((0, 0), {"a": BUSIER_BY + 1, "b": 0}) == "b"
    assert router.choose((0, 0), {"a": 0, "b": BUSIER_BY}) == "b"
    assert router.choose((0, 0), {"a": 100, "b": 120}) == "b"


def test_a_server_that_is_left_out_gets_nothing_and_new_weights_begin_anew():
    router = Router()
    router.choose((0, 0), {"a": 0, "b": 0})
    assert router.choose((0, 0), {"b": 9, "c": 5}) == "c"
    router.forget()
    assert router.choose((0, 0), {"a": 0, "c": 0}) == "a"


@pytest.mark.parametrize("servers", [4, 8])
def test_most_turns_find_their_prefix_while_loads_stay_even(servers):
    """32 groups of 8 play 10 turns. Steps of environments take as long as answers."""
    rng = random.Random(servers)
    router = Router()
    loads = {f"server {i}": 0 for i in range(servers)}
    episodes = [(group, member) for group in range(32) for member in range(8)]
    server_of: dict[tuple[int, int], str] = {}
    turns_left = dict.fromkeys(episodes, 10)
    waiting = list(episodes)
    running: list[tuple[int, int]] = []
    turns_back = 0
    largest_gap = 0
    while waiting or running:
        if waiting and (not running or rng.random() < 0.5):
            episode = waiting.pop(rng.randrange(len(waiting)))
            server = router.choose(episode, loads)
            turns_back += server == server_of.get(episode)
            server_of[episode] = server
            loads[server] += 1
            running.append(episode)
        else:
            episode = running.pop(rng.randrange(len(running)))
            loads[server_of[episode]] -= 1
            turns_left[episode] -= 1
            if turns_left[episode]:
                waiting.append(episode)
        largest_gap = max(largest_gap, max(loads.values()) - min(loads.values()))
    assert turns_back >= 0.9 * 9 * len(episodes)
    assert largest_gap <= 2 * BUSIER_BY


def pool_of(urls, **options):
    pool = SendingPool(
        urls,
        FileTransfer(torch.float32, 5.0),
        end_ids={3},
        vocabulary=VOCABULARY,
        timeout_s=5.0,
        ranks=Ranks(),
        **options,
    )
    return ServerEngine(pool, 64)


def test_episodes_stay_on_their_servers_until_new_weights_come():
    peers = [Peer() for _ in range(3)]
    engine = pool_of([peer.url for peer in peers])
    push_weights(nn.Linear(2, 2), engine, version=1)
    server_of = {}
    for turn in range(3):
        for group in range(6):
            for member in range(2):
                episode_key = 100 * turn + 10 * group + member
                request = Request(
                    episode_key, [1, 2, 3], episode_key, 1.0, 8, episode=(group, member)
                )
                engine.submit(request)
        for completion in finish(engine):
            group = completion.key % 100 // 10
            server_of.setdefault(group, set()).add(completion.server)
    engine.close()
    assert all(len(servers) == 1 for servers in server_of.values())
    assert len(set.union(*server_of.values())) == 3


class SmallRouter(Peer):
    """A router in front of servers. It hands requests to them in turn."""

    def __init__(self, peers):
        super().__init__()
        self.peers = cycle(peers)

    def sample(self, handler, body):
        self.asked += 1
        next(self.peers).sample(handler, body)


def test_requests_go_through_a_router_and_weights_past_it():
    peers = [Peer() for _ in range(2)]
    router = SmallRouter(peers)
    engine = pool_of([router.url], behind_router=[peer.url for peer in peers])
    model = nn.Linear(2, 2)
    for version in (1, 2):
        push_weights(model, engine, version=version)
        completions = ask(engine)
        assert [completion.token_ids for completion in completions] == [
            expected_tokens(key) for key in range(6)
        ]
        assert {tuple(completion.versions) for completion in completions} == {(version,) * 4}
        assert {completion.server for completion in completions} == {router.url}
    assert router.asked == 12
    assert [peer.asked for peer in peers] == [6, 6]
    assert all(torch.equal(peer.loaded["weight"], model.weight) for peer in peers)

    peers[0].habit = "takes no weights"
    with pytest.raises(UserError) as refusal:
        push_weights(model, engine, version=3)
    engine.close()
    assert str(refusal.value).startswith(f"engine.urls: {peers[0].url} has not taken the weights")
    assert str(refusal.value).endswith("remove it there, or restart it")
    assert "\n" not in str(refusal.value)


def test_a_router_needs_the_servers_behind_it():
    servers = {"engine.type": "server", "engine.router": "http://127.0.0.1:1"}
    with pytest.raises(UserError, match=r"engine\.router.*it needs engine\.urls"):
        load("quickstart", {**servers, "engine.servers": "1"})
    config = load("quickstart", {**servers, "engine.urls": "http://127.0.0.1:2"})
    assert config.engine.router == "http://127.0.0.1:1"
