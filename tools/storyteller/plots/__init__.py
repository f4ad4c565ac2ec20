"""The plots of the story grammar. Typically, a character wants something, meets an obstacle, tries, and gets help."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..grammar import Character, Story
from . import courage, folly, friends, quests

PLOTS: dict[str, tuple[Callable[[Story], None], int]] = {
    "lost_thing": (quests.lost_thing, 14), "small_saves_big": (friends.small_saves_big, 6), "flattery": (folly.flattery, 8), "race": (folly.race, 5),
    "lonely": (friends.lonely, 8), "fear": (courage.fear, 8), "cure": (quests.cure, 8), "sharing": (friends.sharing, 8), "liar": (folly.liar, 4),
    "dragon": (courage.dragon, 8), "winter": (folly.winter, 5), "quarrel": (friends.quarrel, 8), "way_home": (quests.way_home, 8),
    "building": (courage.building, 8), "contest": (quests.contest, 6), "magic": (folly.magic, 6), "seed": (courage.seed, 6),
}  # fmt: skip
"""The plots, with their weights in the choice of a story's plot."""

PAIRS = {
    "small_saves_big": ("b", 24), "flattery": ("t", 8), "race": ("b", 8), "fear": ("f", 8), "cure": ("g", 4), "liar": ("k", 5),
    "dragon": ("m", 24), "winter": ("l", 8), "quarrel": ("f", 8), "contest": ("r", 24), "seed": ("x", 4),
}  # fmt: skip
"""Plots with two leading parts: the key of the second part, and the plot's weight among those that fit the
two leads.
"""
RULERS = ("king", "queen", "prince", "princess")
MONSTERS = ("dragon", "giant", "troll", "witch")


def castings(leads: Sequence[Character]) -> list[tuple[str, dict[str, Character], int]]:
    """Returns (plot, cast, weight) of each plot that fits the leads. The first of `leads` is the hero; the second, if
    any, has the other leading part.

    The order of `leads` is that of the request, because a fixed order is easier for a small model to learn.
    """
    if len(leads) == 1:
        found = [(plot, {"h": leads[0]}, share) for plot, (_, share) in PLOTS.items()]
    else:
        found = [(plot, {"h": leads[0], key: leads[1]}, share) for plot, (key, share) in PAIRS.items()]
    return [(plot, cast, share) for plot, cast, share in found if _fits(plot, cast)]


def _fits(plot: str, cast: dict[str, Character]) -> bool:
    hero = cast["h"]
    match plot:
        case "small_saves_big":
            return hero.kind.size == "small" and ("b" not in cast or cast["b"].kind.size == "big")
        case "dragon":
            return "m" not in cast or cast["m"].kind.size == "big" or cast["m"].noun in MONSTERS
        case "contest":
            return hero.noun not in RULERS and ("r" not in cast or cast["r"].noun in RULERS)
    return True
