"""The plots of the story grammar: who wants what, what stands in the way, what is tried, who helps, how it ends."""

from __future__ import annotations

from collections.abc import Callable

from ..grammar import Story
from . import courage, folly, friends, quests

PLOTS: dict[str, tuple[Callable[[Story], None], int]] = {
    "lost_thing": (quests.lost_thing, 14), "small_saves_big": (friends.small_saves_big, 6), "flattery": (folly.flattery, 8), "race": (folly.race, 5),
    "lonely": (friends.lonely, 8), "fear": (courage.fear, 8), "cure": (quests.cure, 8), "sharing": (friends.sharing, 8), "liar": (folly.liar, 4),
    "dragon": (courage.dragon, 8), "winter": (folly.winter, 5), "quarrel": (friends.quarrel, 8), "way_home": (quests.way_home, 8),
    "building": (courage.building, 8), "contest": (quests.contest, 6), "magic": (folly.magic, 6), "seed": (courage.seed, 6),
}  # fmt: skip
"""Each plot with its share."""
