"""The engine of the story grammar: characters with pronouns, a template language, and stories.

In templates, `[a|b]` is a random choice and may be nested; `{h}` and `{h.his}` are forms of a character; `^`
capitalizes the next letter. The first letters of sentences and quotations are capitalized automatically, except after a
closing quotation mark.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from . import lexicon
from .lexicon import Kind

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_START = re.compile(r'(^|[.!?] |(?:^|[.!?:"] )"|\^)([a-z])')
_PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}


@dataclass(slots=True)
class Character:
    """A character in a story. If `name` is None, the character has no proper name. After the introduction, the form
    "intro" is a plain reference.
    """

    rng: random.Random
    kind: Kind
    gender: str
    adjective: str
    name: str | None = None
    introduced: bool = False

    @property
    def noun(self) -> str:
        return self.kind.noun

    def form(self, what: str | None) -> str:
        """Returns the form that has this name in templates. Raises KeyError for an unknown name."""
        he, him, his, himself = _PRONOUNS[self.gender]
        match what:
            case None:
                return self._reference()
            case "the":
                return f"the {self.noun}"
            case "a":
                return with_article(self.noun)
            case "intro":
                return self._reference() if self.introduced else self._full()
            case "name":
                return self.name or f"the {self.noun}"
            case "adj":
                return self.adjective
            case "noun":
                return self.noun
            case "s":
                return self._reference() + "'s"
            case "food":
                return self.kind.food
            case "home":
                return self.kind.home
            case "a_adj":
                return with_article(f"{self.adjective} {self.noun}")
        return {
            "he": he, "him": him, "his": his, "himself": himself, "He": he.capitalize(), "His": his.capitalize(),
            "theirs": "hers" if self.gender == "she" else "his",
        }[what]  # fmt: skip

    def _full(self) -> str:
        plain = with_article(f"{self.adjective} {self.noun}".strip())
        word = "called" if self.rng.random() < 0.3 else "named"
        return plain if self.name is None else f"{plain} {word} {self.name}"

    def _reference(self) -> str:
        """Returns a reference to a character that has been introduced: usually the name, if there is one."""
        if self.name is None:
            return f"the {self.noun}"
        return self.name if self.rng.random() < 0.85 else f"the {self.noun}"


@dataclass(slots=True)
class Thing:
    """An object in a story, with an adjective."""

    rng: random.Random
    noun: str
    adjective: str

    def form(self, what: str | None) -> str:
        full = f"{self.adjective} {self.noun}"
        match what:
            case None:
                return self.noun if self.rng.random() < 0.6 else full
            case "full":
                return full
            case "a":
                return with_article(full)
            case "the":
                return f"the {full}"
        raise KeyError(what)


@dataclass(slots=True)
class Text:
    """A template value with a single form."""

    value: str

    def form(self, what: str | None) -> str:
        if what is not None:
            raise KeyError(what)
        return self.value


@dataclass(slots=True)
class Story:
    """A story, with its cast and its sentences so far. `facts` are questions with answers.

    `leads` are the characters chosen in advance, by the key of their part, in the order of the request.
    """

    rng: random.Random
    plot: str
    leads: dict[str, Character] = field(default_factory=dict)
    cast: dict[str, Character] = field(default_factory=dict)
    words: dict[str, Thing | Text] = field(default_factory=dict)
    paragraphs: list[list[str]] = field(default_factory=lambda: [[]])
    facts: list[tuple[str, str]] = field(default_factory=list)
    about: list[str] = field(default_factory=list)
    """The things that a request for this story may name, most important first: "a fox", "a golden ring"."""

    def expand(self, template: str) -> str:
        """Returns a template with choices made, forms filled in and letters capitalized."""
        filled = self._fill(template)
        return _START.sub(lambda match: match[1].replace("^", "") + match[2].upper(), filled).replace("^", "")

    def _fill(self, template: str) -> str:
        while True:
            chosen = _CHOICE.sub(lambda match: self.rng.choice(match[1].split("|")), template)
            if chosen == template:
                break
            template = chosen
        filled = _FIELD.sub(lambda match: self._value(match[1]).form(match[2]), template)
        return re.sub(r" +", " ", filled).replace(" ,", ",").replace(" .", ".").strip()

    def say(self, *templates: str) -> None:
        """Adds sentences to the current paragraph."""
        self.paragraphs[-1].extend(self.expand(template) for template in templates)

    def maybe(self, chance: float, *templates: str) -> None:
        if self.rng.random() < chance:
            self.say(*templates)

    def one_of(self, *templates: str) -> None:
        """Adds one of several templates to the current paragraph, for choices that are hard to read in brackets."""
        self.say(self.rng.choice(templates))

    def paragraph(self) -> None:
        if self.paragraphs[-1]:
            self.paragraphs.append([])

    def fact(self, question: str, answer: str) -> None:
        self.facts.append((self.expand(question), self.expand(answer)))

    def text(self, separator: str) -> str:
        return separator.join(" ".join(sentences) for sentences in self.paragraphs if sentences)

    def _value(self, key: str) -> Character | Thing | Text:
        return self.cast[key] if key in self.cast else self.words[key]

    # --- drawing from the lexicon

    def character(self, key: str, *, role: str = "any", ability: str | None = None) -> Character:
        """Adds a character to the cast: the lead for `key`, if there is one, or else a new character whose kind and
        name differ from those of the others. `role` is animal, child, adult or any.
        """
        if key in self.leads:
            self.cast[key] = self.leads[key]
            return self.cast[key]
        others = [*self.cast.values(), *self.leads.values()]
        while True:
            found = draw(self.rng, role)
            if ability is not None and found.kind.ability != ability:
                continue
            if any(found.noun == o.noun or (found.name and found.name == o.name) for o in others):
                continue
            self.cast[key] = found
            return found

    def thing(self, key: str) -> Thing:
        noun, adjectives = self.rng.choice(list(lexicon.OBJECTS.items()))
        made = Thing(self.rng, noun, self.rng.choice(adjectives.split()))
        self.words[key] = made
        return made

    def let(self, key: str, value: str) -> None:
        """Fixes a chosen word for the rest of the story."""
        self.words[key] = Text(self._fill(value))

    def place(self, key: str) -> None:
        """Adds a random place. For the key "spot", `{spot}` in a template becomes the place ("the pond"), and
        `{in_spot}` becomes the place with its preposition ("by the pond").
        """
        place, preposition = self.rng.choice(list(lexicon.PLACES.items()))
        self.words[key] = Text(place)
        self.words["in_" + key] = Text(f"{preposition} {place}")


KINDS = {"animal": lexicon.ANIMALS, "child": lexicon.CHILDREN, "adult": lexicon.ADULTS}
NAMED = {"child": 0.92, "animal": 0.4, "adult": 0.12}
"""The share of characters with a proper name by role, unless the caller chooses it."""


def draw(rng: random.Random, role: str) -> Character:
    """Returns a random character for a role. Kinds are drawn by weight, except for a few rare ones."""
    if role == "any":
        role = rng.choices(("animal", "child", "adult"), (60, 25, 15))[0]
    kind = rng.choices(KINDS[role], [k.weight for k in KINDS[role]])[0]
    if role != "child" and rng.random() < 0.06:
        kind = _rare(rng, role)
    return _person(rng, kind, role, NAMED[role])


def draw_leads(rng: random.Random, count: int, named: float | None = None) -> list[Character]:
    """Returns `count` characters of different kinds for a request. Compared with `draw`, rare kinds and adults are more
    likely.

    `named` is the share of characters with a proper name. If it is None, each role has its usual share.
    """
    leads: list[Character] = []
    while len(leads) < count:
        role = rng.choices(("animal", "child", "adult"), (60, 12, 28))[0]
        common = rng.random() < 0.5
        kind = rng.choices(KINDS[role], [k.weight if common else 1 for k in KINDS[role]])[0]
        if role != "child" and rng.random() < 0.3:
            kind = _rare(rng, role)
        if kind.noun not in [lead.noun for lead in leads]:
            leads.append(_person(rng, kind, role, NAMED[role] if named is None else named))
    return leads


def _person(rng: random.Random, kind: Kind, role: str, named: float) -> Character:
    gender = kind.gender or rng.choice(("he", "she"))
    adjectives = lexicon.ADULT_ADJECTIVES if role == "adult" else lexicon.HERO_ADJECTIVES
    name = _name(rng, gender, role) if rng.random() < named else None
    return Character(rng, kind, gender, rng.choice(adjectives), name)


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" and not words.startswith(("uni", "one")) else "a ") + words


def _rare(rng: random.Random, role: str) -> Kind:
    """Returns a rare kind of character, with the ability, food and size of a common one."""
    base = rng.choice(lexicon.ANIMALS if role == "animal" else lexicon.ADULTS)
    noun = rng.choice(lexicon.RARE_ANIMALS if role == "animal" else lexicon.RARE_PEOPLE)
    home = rng.choice(lexicon.RARE_HOMES) if role == "animal" else "in a small house near the town"
    return Kind(noun, base.ability, base.food, home, base.size, rng.choice(("he", "she")), base.is_person)


def _name(rng: random.Random, gender: str, role: str) -> str:
    if rng.random() < 0.12:  # a new name, which the model has to copy
        ends = lexicon.NAME_ENDS_SHE if gender == "she" else lexicon.NAME_ENDS_HE
        return rng.choice(lexicon.NAME_STARTS) + rng.choice(ends)
    if role == "animal" and rng.random() < 0.7:
        return rng.choice(lexicon.PET_NAMES)
    return rng.choice(lexicon.GIRL_NAMES if gender == "she" else lexicon.BOY_NAMES)
