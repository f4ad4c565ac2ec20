# ruff: noqa: SIM905 (tables of words)
"""The vocabulary of the story grammar: characters, things, places and abilities.

The vocabulary is small, so that a model with a few million parameters can learn to use it coherently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ability = Literal["fly", "dig", "swim", "gnaw", "climb", "strong", "wise", "run"]
Gender = Literal["he", "she"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of character. `home` follows the word "lived". If `gender` is None, each story draws one."""

    noun: str
    ability: Ability
    food: str
    home: str
    size: Literal["small", "middle", "big"]
    gender: Gender | None = None
    is_person: bool = False
    weight: int = 3


def _animals(rows: str) -> tuple[Kind, ...]:
    """Parses lines of `noun, ability, food, home, size[, weight]`."""
    kinds = []
    for row in rows.strip().splitlines():
        noun, ability, food, home, size, *rest = (field.strip() for field in row.split(","))
        kinds.append(Kind(noun, ability, food, home, size, weight=int(rest[0]) if rest else 3))  # type: ignore[arg-type]
    return tuple(kinds)


ANIMALS = _animals("""
fox, run, grapes, in a den under the old oak, middle, 12
crow, fly, cheese, in a nest at the top of a tall tree, small, 10
cat, climb, fish, in a warm house in the village, small, 9
dog, run, a bone, on a farm near the village, middle, 9
mouse, gnaw, cheese, in a tiny hole in the wall, small, 9
rabbit, dig, carrots, in a burrow under the hill, small, 8
bear, strong, honey, in a cave in the hills, big, 8
wolf, run, meat, in the dark forest, big, 7
lion, strong, meat, on the wide plain, big, 7
owl, wise, a warm supper, in a hollow tree, small, 7
frog, swim, flies, by the pond, small, 7
hen, wise, corn, on a little farm, small, 5
duck, swim, bread, by the pond, small, 6
goose, swim, corn, on a little farm, middle
goat, climb, fresh grass, on the side of the hill, middle, 4
pig, dig, apples, on a little farm, middle, 5
horse, run, oats, in a red barn, big, 5
donkey, strong, oats, in a red barn, big, 4
cow, strong, fresh grass, in the green meadow, big
sheep, strong, clover, in the green meadow, middle
lamb, run, clover, in the green meadow, small
squirrel, climb, nuts, in a hollow tree, small, 6
hedgehog, dig, apples, under a heap of leaves, small, 5
tortoise, wise, cabbage, near the pond, small, 5
turtle, swim, cabbage, near the lake, small, 4
hare, run, carrots, in the long grass, small, 5
deer, run, berries, in the deep forest, big, 4
mole, dig, roots, under the meadow, small, 4
badger, dig, roots, in a burrow under the hill, middle
otter, swim, fish, beside the river, middle, 4
beaver, gnaw, bark, beside the river, middle
rat, gnaw, cheese, in an old barn, small
sparrow, fly, seeds, in a nest under the roof, small, 5
robin, fly, seeds, in a nest in the garden, small, 4
raven, fly, bread, on top of the old tower, small
swan, swim, water plants, on the quiet lake, middle
eagle, fly, fish, high on a rock, middle
bee, fly, honey, in a busy hive, small
ant, strong, crumbs, under a flat stone, small, 4
grasshopper, climb, leaves, in the long grass, small
snail, climb, leaves, under a cabbage leaf, small
monkey, climb, nuts, in the tall trees, middle, 4
elephant, strong, leaves, near the wide river, big, 4
tiger, strong, meat, in the jungle, big
kitten, climb, milk, in a warm house in the village, small, 4
puppy, run, a bone, on a farm near the village, small, 4
chick, run, seeds, on a little farm, small
rooster, fly, corn, on a little farm, small
parrot, fly, nuts, in a house by the sea, small
seal, swim, fish, by the cold sea, middle, 1
whale, swim, fish, in the deep blue sea, big, 1
snake, climb, eggs, under a flat stone, middle
butterfly, fly, sweet flowers, in the garden, small
spider, climb, flies, in a corner of the barn, small
penguin, swim, fish, on the white ice, small
pony, run, oats, in a red barn, middle
fish, swim, crumbs, in the clear river, small, 1
dove, fly, seeds, on the roof of the church, small
crab, dig, seaweed, on the sandy shore, small, 1
bat, fly, flies, in a dark cave, small
""")


def _people(rows: str) -> tuple[Kind, ...]:
    """Parses lines of `noun, gender, ability, food, home, weight`."""
    kinds = []
    for row in rows.strip().splitlines():
        noun, gender, ability, food, home, weight = (field.strip() for field in row.split(","))
        kinds.append(
            Kind(noun, ability, food, home, "middle", gender, is_person=True, weight=int(weight))  # type: ignore[arg-type]
        )
    return tuple(kinds)


CHILDREN = _people("""
girl, she, climb, pancakes, in a small house near the forest, 20
boy, he, climb, apple pie, in a small house near the forest, 20
""")

ADULTS = _people("""
king, he, wise, roast goose, in a great castle, 8
queen, she, wise, honey cake, in a great castle, 6
prince, he, run, apple pie, in a great castle, 6
princess, she, climb, honey cake, in a high tower, 8
farmer, he, strong, bread and cheese, on a little farm, 5
miller, he, strong, fresh bread, in the mill by the river, 4
baker, he, strong, fresh bread, in a small shop in the village, 4
tailor, he, wise, soup, in a small shop in the village, 4
shepherd, he, run, bread and cheese, on the side of the hill, 4
fisherman, he, swim, fish soup, in a hut by the sea, 4
woodcutter, he, strong, hot soup, at the edge of the forest, 4
hunter, he, run, hot soup, at the edge of the forest, 2
knight, he, strong, roast meat, in a stone castle, 4
witch, she, wise, mushroom soup, in a crooked house in the forest, 4
wizard, he, wise, hot tea, in a tall tower, 4
fairy, she, fly, honey, inside a blue flower, 4
giant, he, strong, a whole cow, in a huge house on the mountain, 4
dragon, he, fly, roast meat, in a cave in the mountains, 9
dwarf, he, dig, mushroom soup, under the mountain, 3
elf, he, climb, berries, in the deep forest, 3
troll, he, strong, fish soup, under the stone bridge, 3
sailor, he, swim, fish soup, in a house by the sea, 3
soldier, he, strong, hot soup, in a small house near the town, 2
grandmother, she, wise, apple pie, in a small house near the forest, 2
gardener, she, dig, fresh bread, in a small house near the castle, 2
mermaid, she, swim, seaweed, in the deep blue sea, 2
robot, he, strong, a drop of oil, in a small shop in the town, 2
""")

# The long tail teaches copying: each kind is rare, so the model must copy its name from the prompt.
RARE_ANIMALS = """camel zebra giraffe kangaroo panda koala hippo rhino leopard cheetah jaguar lizard gecko salmon trout shark
dolphin octopus jellyfish starfish lobster shrimp pelican flamingo ostrich peacock pigeon seagull stork heron
crane hawk falcon magpie woodpecker cuckoo turkey llama alpaca buffalo bison moose reindeer walrus hamster
ferret weasel stoat marten chipmunk skunk raccoon lynx puma hyena jackal coyote gorilla lemur sloth anteater
armadillo ladybird beetle cricket moth dragonfly wasp worm toad newt salamander crocodile alligator chameleon
mule ox bull calf foal piglet gosling duckling cub fawn nightingale lark wren finch swallow goldfish minnow
eel unicorn griffin phoenix goblin gnome ghost snowman""".split()
RARE_HOMES = ("in the deep forest", "near the wide river", "on the side of the hill", "not far from the sea")
RARE_PEOPLE = """blacksmith carpenter painter teacher doctor nurse pirate captain merchant thief beggar potter weaver shoemaker
cobbler butcher barber clockmaker musician singer dancer clown juggler magician beekeeper postman
lighthouse-keeper cook maid servant monk nun duke duchess emperor astronaut""".split()

GIRL_NAMES = """Lily Anna Mia Rose Sara Nora Ella Kate Greta Clara Ida Emma Lucy Molly Bella Sue Zoe Mary Jane Lena Elsa Ruby
Daisy Alice Maya Tilda Marta Nina Flora Hazel""".split()
BOY_NAMES = """Tom Ben Max Jack Sam Finn Leo Hans Peter Otto Noah Tim Hugo John Karl Paul Adam Oscar Felix Jonas Will Henry
Emil Anton Luke Robin Theo Oliver Simon Jakob""".split()
PET_NAMES = """Pip Dot Bo Coco Nib Momo Fern Bramble Tuck Willow Moss Poppy Rusty Pepper Snow Sunny Misty Button Patch Hop
Twig Biscuit Ginger Nutmeg Acorn Whisker Bun Pebble Clover Tansy""".split()
NAME_STARTS = """Ba Bel Bri Ca Cor Da Del Do El Fa Fi Ga Gil Hal Jo Ka Ki La Lu Ma Mel Mi Na Ni Or Pa Qui Ra Ro Sa Ta Tor Va
Wen Zi""".split()
NAME_ENDS_SHE = """la na ra lia nia ria sa ssa tha lina mira belle wen lyn""".split()
NAME_ENDS_HE = """do rin lo ric mo bert ran ton mund ko vik lin dor gan""".split()

HERO_ADJECTIVES = (
    """little young small clever kind brave shy cheerful curious poor quiet lonely hungry gentle merry""".split()
)
ADULT_ADJECTIVES = """old kind poor wise rich good proud young clever sad tired brave cheerful""".split()

# object, adjectives: things to own, lose, find or wish for
OBJECTS = {
    "ring": "golden silver shiny", "ball": "red golden blue", "key": "little golden rusty", "bell": "silver little golden",
    "hat": "red warm blue", "coat": "warm red blue", "lamp": "little old golden", "book": "old blue little",
    "cup": "silver golden blue", "basket": "little new brown", "kite": "red yellow blue", "drum": "little red loud",
    "flute": "wooden silver little", "spoon": "silver wooden golden", "scarf": "red warm long", "crown": "golden little shiny",
    "coin": "golden shiny silver", "button": "blue shiny red", "feather": "white blue golden", "stone": "shiny green round",
    "shell": "white pink shiny", "doll": "little wooden pretty", "boat": "little wooden blue", "box": "little wooden silver",
    "star": "little paper golden", "mirror": "little silver round", "necklace": "pretty silver golden",
    "flower": "red blue white", "apple": "red golden sweet", "map": "old little torn", "sword": "wooden shiny old",
    "candle": "little white red", "cart": "little wooden red", "ribbon": "red blue yellow", "whistle": "little silver wooden",
    "blanket": "warm soft blue", "umbrella": "red big yellow", "marble": "blue green shiny", "watch": "golden old little",
}  # fmt: skip

FOODS = """a piece of cheese|a loaf of bread|a basket of apples|a pot of honey|a big red apple|a bowl of soup|a honey cake
|a bag of nuts|a basket of berries|an apple pie|a sweet pear|a bunch of grapes|a warm pancake|a sack of corn""".replace(
    "\n", ""
).split("|")

# place: (noun with article, preposition when in it)
PLACES = {
    "the forest": "in", "the dark forest": "in", "the meadow": "in", "the garden": "in", "the village": "in",
    "the town": "in", "the market": "at", "the old mill": "at", "the river": "by", "the pond": "by", "the lake": "by",
    "the hill": "on", "the mountain": "on", "the sea": "by", "the castle": "at", "the farm": "on", "the old bridge": "at",
    "the field": "in", "the valley": "in", "the orchard": "in", "the barn": "in", "the beach": "on", "the island": "on",
    "the cave": "in", "the old well": "by", "the old tower": "at", "the stream": "by", "the park": "in",
}  # fmt: skip

TIMES = """one day|one morning|one sunny morning|one evening|one cold day|one rainy day|one winter morning|one summer day
|one fine spring day|one windy day|early one morning|one afternoon|one autumn day""".replace("\n", "").split("|")
