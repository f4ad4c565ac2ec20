"""Scenes that many plots share: openings, thanks, endings."""

from __future__ import annotations

from .grammar import Character, Story

FEELINGS = "[sad|very sad|so sad that {h.he} cried|unhappy]"


def opening(s: Story, trait: str) -> None:
    """Introduces the hero `h` at home, with a sentence about the trait that the plot needs.

    If two characters were requested, both are in the first sentence, in the order of the request.
    """
    if len(s.leads) == 2:
        _open_with_both(s, *s.leads.values())
        s.say(trait)
        return
    style = s.rng.random()
    if style < 0.36:
        s.say(
            "[Once upon a time|Once upon a time|Once upon a time|Long ago|Long, long ago|A long time ago|Many years ago],"
            " [there was {h.intro} who lived {h.home}|there lived {h.intro} {h.home}|{h.home} there lived {h.intro}"
            "|{h.intro} lived {h.home}|there was {h.intro}]."
        )
    elif style < 0.48:
        s.say("[There was once|Once there was|There once was|Once there lived] {h.intro}[| who lived {h.home}].")
    elif style < 0.56:
        s.say(
            "[Far away, beyond the hills,|In a land far away,|Far, far away,|In a small village,] there lived {h.intro}."
        )
    elif style < 0.62:
        s.say("[This is the story of|Let me tell you about|This is a tale about] {h.intro}.", "{h.He} lived {h.home}.")
    elif style < 0.68:
        s.say(
            "[It was a cold winter|It was a warm summer|It was a bright spring|It was a windy autumn] [day|morning|evening]."
        )
        s.say("{h.intro} [sat|was] {h.home}[| and looked out at the sky].")
    elif style < 0.76 and s.cast["h"].name:
        s.say("{h.name} was {h.a_adj}.", "{h.He} lived {h.home}.")
    elif style < 0.86:
        s.say("{h.intro} [once lived|lived|had always lived] {h.home}.")
    elif style < 0.93:
        s.say("{h.home}[, long ago,|] there [lived|was] {h.intro}.")
    else:
        s.say(
            "[One day|One fine day|One morning|One evening|Every day], {h.intro} sat {h.home} and [thought|sang|looked at the sky]."
        )
    s.say(trait)


def _open_with_both(s: Story, first: Character, second: Character) -> None:
    for lead in (first, second):
        if s.rng.random() < 0.45:
            lead.adjective = ""
    a, b = first.form("intro"), second.form("intro")
    s.one_of(
        f"[Once upon a time|Long ago|Long, long ago|A long time ago|Many years ago], there [was|lived] {a}, and there [was|lived] {b}[| too].",
        f"[Once upon a time|Once upon a time,|Once|Long ago] there [lived|were] {a} and {b}.",
        f"[Once upon a time|Long ago|Many years ago], {a} and {b} [lived|both lived] [in the same land|not far from each other|near a small village].",
        f"{a} and {b} [once lived|lived] [in the same land|not far from each other|near the same village].",
        f"[This is the story of|Let me tell you about|This is a tale about] {a} and {b}.",
        f"[Far away, beyond the hills,|In a land far away,|Far, far away,|In a small village,] there lived {a} and {b}.",
        f"There was once {a}, and there was [once|also] {b}.",
    )
    first.introduced = second.introduced = True
    s.say("{h.the} [lived|had always lived] {h.home}.")


def thanks(s: Story, helper: str = "k") -> None:
    """Adds a scene in which the hero thanks the helper, who answers in some variants."""
    k = "{" + helper + "}"
    s.one_of(
        '"Thank you, thank you!" said {h}. "You are [a true friend|very kind|so good to me]."',
        f'"How can I ever thank you?" asked {{h}}. "[Be my friend|Just be kind to others|You need not thank me]," said {k}.',
        f'{{h}} [hugged|thanked] {k} [with all {{h.his}} heart|again and again|many times]. "[I am glad I could help|That is what friends are for]," said {k}.',
        f'"You [saved|helped] me," said {{h}}. "I will never forget it." ^{k} [smiled|was glad].',
    )


def meet(s: Story, who: str, doing: str = "") -> None:
    """Adds a scene in which the hero meets a new character."""
    w = "{" + who
    where = (
        doing or "[sitting on a stone|resting under a tree|looking up at the sky|eating " + w + ".food}|on the path]"
    )
    s.one_of(
        f"[Soon|After a while|Before long|Then|On the way] {{h.he}} met {w}.intro}} [{where}|].",
        f"[There|Soon|Just then] {{h}} saw {w}.intro}} {where}.",
        f"[Then|Just then|At that moment] {w}.intro}} came [along|by|down the path|out from behind a tree].",
    )


def happy_end(s: Story, *own: str) -> None:
    """Adds one of the plot's own endings or a general one, and sometimes a closing sentence.

    A story about two leads uses only the plot's own endings.
    """
    general = (
        []
        if len(s.leads) == 2
        else [
            "[From that day on|After that|Since that day|Ever since then], {h} was [happy|never sad again|full of joy|the happiest {h.noun} in the land].",
            "{h} [went home|went back home|walked home] [with a happy heart|singing all the way|with a smile] and slept [well|soundly] that night.",
            "And {h} [lived happily ever after|was happy for the rest of {h.his} days|lived happily for many years].",
        ]
    )
    s.one_of(*own, *own, *general)
    s.maybe(0.16, "[The end.|And that is the end of the story.|That is the whole story.]")


def moral(s: Story, lesson: str, chance: float = 0.5) -> None:
    """States the lesson with probability `chance`, and adds a question about it."""
    s.let("lesson", lesson)
    s.maybe(
        chance,
        "[{h} learned that|So {h} learned that|That day {h} learned that|This story teaches us that|Remember that|And so we see that] {lesson}.",
    )
    s.fact(
        "[What is the moral of the story|What do we learn from the story|What is the lesson of the story|What did {h} learn]?",
        "[The story teaches us that|We learn that|The lesson is that] {lesson}.",
    )
