"""Choosing the server for a request: the one that has the episode's earlier prompts in its cache.

That server computes only the new tokens of the next turn. The first prompts of a group are equal,
so its members begin on one server. If that server is clearly busier than another one, the episode
moves to the least busy one and stays there.
"""

from collections.abc import Mapping

BUSIER_BY = 8
BUSIER_TIMES = 1.25
"""A server is clearly busier if it has more than BUSIER_TIMES as many requests as the least busy
server, and also more than BUSIER_BY more."""


class Router:
    """Remembers which server has the prompts of which episode and group."""

    def __init__(self) -> None:
        self._server_of_episode: dict[tuple[int, int], str] = {}
        self._server_of_group: dict[int, str] = {}

    def choose(self, episode: tuple[int, int] | None, loads: Mapping[str, int]) -> str:
        """Return the server for the next request of an episode, given as (group, member).

        `loads` has the number of pending requests of each available server. There is at least one.
        A request without an episode goes to the least busy server.
        """
        least_busy = min(loads, key=lambda server: loads[server])
        if episode is None:
            return least_busy

        group, _ = episode
        server = self._server_of_episode.get(episode) or self._server_of_group.get(group)
        if server is None or server not in loads:
            server = least_busy
        if _clearly_busier(loads[server], loads[least_busy]):
            server = least_busy
        self._server_of_episode[episode] = server
        self._server_of_group.setdefault(group, server)
        return server

    def forget(self) -> None:
        """Forget all episodes, because servers with new weights compute every prompt again."""
        self._server_of_episode.clear()
        self._server_of_group.clear()


def _clearly_busier(load: int, least_load: int) -> bool:
    return load > max(BUSIER_TIMES * least_load, least_load + BUSIER_BY)
