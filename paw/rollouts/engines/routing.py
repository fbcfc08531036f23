"""Which server gets a request: the one that already has the episode's earlier prompts in its cache.

The next turn of an episode costs that server only what is new. The first prompts of a group are equal,
so its members begin on one server. A server that is clearly busier than another is passed over: the
episode moves, and stays where it has gone.
"""

from collections.abc import Mapping

BUSIER_BY = 8
BUSIER_TIMES = 1.25
"""A server is clearly busier if it has more than BUSIER_TIMES as many requests as the least busy one,
and more than BUSIER_BY more."""


class Router:
    """Remembers which server has the prompts of which episode and group."""

    def __init__(self) -> None:
        self._server_of_episode: dict[tuple[int, int], str] = {}
        self._server_of_group: dict[int, str] = {}

    def choose(self, episode: tuple[int, int] | None, loads: Mapping[str, int]) -> str:
        """The server that gets the next request of an episode, by its (group, member).

        `loads` has the number of requests under way at each server that may be asked, at least one.
        The least busy one gets requests without an episode.
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
        """Forget all episodes: servers with new weights compute every prompt anew."""
        self._server_of_episode.clear()
        self._server_of_group.clear()


def _clearly_busier(load: int, least_load: int) -> bool:
    return load > max(BUSIER_TIMES * least_load, least_load + BUSIER_BY)
