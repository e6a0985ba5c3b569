"""The seven travel tools as an MCP server of its own process: ``python -m arenarl.envs.travel_server [--seed N]``.

Tool names follow Open-Travel (ArenaRL, data section): poi_search, around_search, direction, weather, search_flights,
search_train_tickets, web_search. Results are small tables: one header line, one line a row, columns
separated by a space (every name is one word). Every tool only
reads, so one server can serve any number of episodes at once.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Awaitable, Callable, Collection

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from arenarl.envs.travel_world import CATEGORIES, DAYS, Ride, World, query_words


def _known(kind: str, value: str, options: Collection[str]) -> str:
    """The option that equals ``value`` up to case, or an error that lists the nearest ones for the model to read."""
    by_lower = {option.lower(): option for option in options}
    if value.strip().lower() in by_lower:
        return by_lower[value.strip().lower()]
    near = [by_lower[n] for n in difflib.get_close_matches(value.lower(), by_lower, n=3, cutoff=0.5)] or sorted(
        options
    )[:5]
    raise ToolError(f"unknown {kind} {value!r}; did you mean {', '.join(near)}?")


def _table(header: str, rows: list[tuple[object, ...]]) -> str:
    return "\n".join([header, *(" ".join(map(str, row)) for row in rows)])


def _two_different(origin: str, destination: str) -> tuple[str, str]:
    if origin == destination:
        raise ToolError(f"origin and destination are both {origin!r}; name two different ones")
    return origin, destination


def _rides(kind: str, rides: list[Ride]) -> str:
    return _table(f"{kind} usd minutes", [(r.code, r.usd, r.minutes) for r in rides])


class TravelTools:
    """The tools over one world. Each returns the text that the model reads.

    Raises:
        ToolError: from every tool, for names that the world does not know; the text says which are near.
    """

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)

    def poi_search(self, city: str, category: str) -> str:
        """Places of a category in a city, with price and rating."""
        rows = self.world.search(self._city(city), _known("category", category, CATEGORIES))
        return _table("name usd rating", [(p.name, p.usd, p.rating) for p in rows])

    def around_search(self, city: str, place: str, category: str) -> str:
        """Places of a category near a place, nearest first; distance in units of 100 metres."""
        city = self._city(city)
        rows = self.world.around(city, self._place(city, place), _known("category", category, CATEGORIES))
        return _table("name usd rating distance", [(p.name, p.usd, p.rating, d) for d, p in rows])

    def direction(self, city: str, origin: str, destination: str) -> str:
        """Ways to get from one place to another in a city."""
        city = self._city(city)
        pair = _two_different(self._place(city, origin), self._place(city, destination))
        return _rides("mode", self.world.routes(city, *pair))

    def weather(self, city: str, day: str) -> str:
        """Weather forecast of a city for a day of the week."""
        return _table("sky celsius", [self.world.weather(self._city(city), _known("day", day, DAYS))])

    def search_flights(self, origin: str, destination: str, day: str) -> str:
        """Flights between two cities on a day of the week."""
        pair = _two_different(self._city(origin), self._city(destination))
        return _rides("flight", self.world.flights(*pair, _known("day", day, DAYS)))

    def search_train_tickets(self, origin: str, destination: str, day: str) -> str:
        """Trains between two cities on a day of the week."""
        pair = _two_different(self._city(origin), self._city(destination))
        return _rides("train", self.world.trains(*pair, _known("day", day, DAYS)))

    def web_search(self, query: str) -> str:
        """Search the web. Name a city to find the event of the week."""
        words = query_words(query)
        found = [self.world.event(c) for c in self.world.cities if c.lower() in words]
        if len(found) != 1:
            raise ToolError(f"{len(found) or 'no'} cities in {query!r}; name one city")
        return _table("event usd", [(e.name, e.usd) for e in found])

    def _city(self, name: str) -> str:
        return _known("city", name, self.world.cities)

    def _place(self, city: str, name: str) -> str:
        return _known(f"place in {city}", name, self.world.places(city))


TOOLS = ("poi_search", "around_search", "direction", "weather", "search_flights", "search_train_tickets", "web_search")


def build_server(seed: int = 0) -> MCPServer:
    """The server for one world; also usable in process, as any MCPServer is."""
    server, tools = MCPServer("travel"), TravelTools(seed)
    for name in TOOLS:
        server.tool(structured_output=False)(_without_thread(getattr(tools, name)))
    return server


def _without_thread(tool: Callable[..., str]) -> Callable[..., Awaitable[str]]:
    """The tool as a coroutine. A plain function would go to a thread, which costs ten times what these tools do."""

    @functools.wraps(tool)
    async def call(**arguments: str) -> str:
        return tool(**arguments)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the world")
    build_server(parser.parse_args().seed).run("stdio")


if __name__ == "__main__":
    main()
