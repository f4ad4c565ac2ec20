"""Plots about courage: a character dares, or goes on, although others are afraid or laugh.

Each plot fills a `Story` with a complete story, and adds questions about it with their answers.
"""

from __future__ import annotations

from ..grammar import Story
from ..lexicon import TIMES
from ..scenes import FEELINGS, happy_end, meet, moral, opening, thanks

FEARS = {
    "the dark": ("night fell early and the path was black", "walked into the dark, one step at a time"),
    "water": ("the way led through a wide stream", "stepped into the cold water and waded across"),
    "thunder": (
        "a great storm broke, with thunder and lightning",
        "ran through the storm with the thunder over {h.his} head",
    ),
    "high places": ("the only way led over a high bridge", "crossed the high bridge without looking down"),
    "the deep forest": ("the way led through the deep forest", "walked right through the deep forest"),
    "the cold": ("snow began to fall and the wind was cold", "went out into the deep snow"),
}


def fear(s: Story) -> None:
    """Tells how a hero overcomes fear to help a friend in trouble."""
    s.character("h", role=s.rng.choice(("animal", "child")))
    s.character("f", role=s.rng.choice(("animal", "animal", "child")))
    s.let("fear", s.rng.choice(list(FEARS)))
    shown, brave = FEARS[s.words["fear"].form(None)]
    s.place("p")
    s.let("trouble", "[hurt {f.his} foot|got lost|fallen into a hole|fallen ill]")
    opening(
        s,
        "[{h.He} was afraid of {fear}|There was one thing {h.he} feared, and that was {fear}|{h.He} was not brave at all, for {h.he} feared {fear}].",
    )
    s.maybe(0.5, "[The others laughed at {h.him}|Everyone knew it].")
    s.say(
        "{h.His} best friend was {f.intro}.",
        '"[One day you will be brave|Everyone is afraid of something]," {f} [always said|used to say].',
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(
        "{time}, {f} went to {p} and did not come [back|home].",
        '"[Where can {f.he} be|Why is {f.he} not here]?" thought {h}.',
    )
    s.say(
        "[A bird brought the news|Then {h.he} heard the news|At last somebody told {h.him}]: {f} had {trouble} and [needed help|could not get home]."
    )
    s.say(
        "{h} [wanted to run there at once|set out at once|jumped up], but " + shown + ".",
        "{h.His} [legs|knees|hands] [shook|trembled].",
    )
    s.say(
        '"I am afraid," {h.he} said[| to {h.himself}], "but [my friend needs me|{f} is more important than my fear|I must go]."'
    )
    s.say("{h} took a deep breath and " + brave + ".")
    s.paragraph()
    s.say(
        "[At last|Finally] {h.he} found {f} {in_p}.",
        '"[You came|You found me]!" cried {f}. "[And you were so afraid of {fear}|You are the bravest friend in the world]!"',
    )
    s.say(
        '"[I was afraid|I was very afraid]," said {h}, "but [I thought of you|I wanted to help you|I love you more than I fear {fear}]."'
    )
    s.say("[Together they went home|Slowly they went home together|{h} helped {f} all the way home].")
    moral(s, "[being brave means to be afraid and go on|love is stronger than fear|we are braver than we think]", 0.6)
    happy_end(
        s,
        "From that day on, {h} was [never afraid of {fear} again|not afraid of {fear} any more].",
        "And nobody [laughed at {h}|called {h} a coward] again.",
    )
    s.fact("What was {h.name} afraid of?", "{h.name} was afraid of {fear}.")
    s.fact("Who was {h.s} [best friend|friend]?", "{f.name} was {h.his} best friend.")
    s.fact("What happened to {f.name}?", "{f.name} had {trouble}.")
    s.fact("Where [was {f.name}|did {h.name} find {f.name}]?", "{h.name} found {f.name} {in_p}.")
    s.about = [s.cast["h"].form("a"), s.cast["f"].form("a"), s.words["fear"].form(None)]


def dragon(s: Story) -> None:
    """Tells how the hero asks a monster, which everyone fears, what is wrong."""
    s.character("h", role=s.rng.choice(("child", "child", "animal", "adult")))
    for _ in range(50):
        m = s.character("m", role="adult" if s.rng.random() < 0.6 else "animal")
        if m.kind.size == "big" or m.noun in ("dragon", "giant", "troll", "witch"):
            break
        del s.cast["m"]
    else:
        m = s.character("m", role="adult")
    s.let("noise", "[roared|howled|cried|stamped {m.his} feet] [every night|all night long]")
    s.let("woe", "[had a thorn in {m.his} foot|was all alone|was hungry|could not sleep|had a bad tooth]")
    woe = s.words["woe"].form(None)
    fix = {"thorn": "[carefully|gently] pulled out the thorn", "alone": "stayed and played with {m.him} all day",
           "hungry": "brought {m.him} [a big pot of soup|bread and apples]", "sleep": "sang {m.him} a soft song until {m.he} fell asleep",
           "tooth": "tied a string to the bad tooth and pulled it out"}  # fmt: skip
    s.let("fix", next(text for word, text in fix.items() if word in woe))
    s.let(
        "gift",
        "[carried wood for the village|watched over the village|lit the fires in winter|told stories to the children]",
    )
    opening(
        s,
        "[{h.He} was curious and not easily afraid|{h.He} always wanted to know why|{h.He} was small, but {h.he} was brave].",
    )
    s.say("[Near|Not far from] the village lived {m.intro} who {noise}.")
    s.say(
        "[Everyone was afraid of {m.the}|The people were so afraid that they hid in their houses|Nobody dared to go out after dark]."
    )
    s.paragraph()
    s.say(
        '"[We must chase {m.the} away|Somebody must fight {m.the}]!" said [the people|the mayor|the men of the village].'
    )
    s.maybe(
        0.6,
        "[A strong man|A soldier|A proud knight] went up with [a sword|swords and torches|a loud voice], but came back [running|without shoes|white with fear].",
    )
    s.say('"[Maybe {m.he} is only sad|Let me talk to {m.him}]," said {h}.')
    s.say("Everyone laughed, but {h} [set out alone|went all the same|took a lamp and went].")
    s.paragraph()
    s.say(
        '"[Go away!|Who is there?|What do you want?]" [roared|shouted|cried] {m}.',
        "{h.s} heart beat fast, but {h.he} [did not run away|stood still].",
    )
    s.say('"[Why are you so loud|Why do you make so much noise|What is wrong]?" {h.he} asked.')
    s.say(
        "{m} looked [surprised|down].",
        '"[Nobody ever asked me that|Nobody ever talks to me]," said {m}.',
        "Then {m.he} told {h} that {m.he} {woe}.",
    )
    s.say("So {h} {fix}.", "{m} [smiled for the first time|wept with joy|was so thankful that {m.he} laughed].")
    s.paragraph()
    s.say(
        "{h} brought {m} [down to the village|to the village square], and [at first everyone was afraid|the people stared].",
        "But soon they saw that {m.he} was [kind|gentle|good].",
    )
    moral(
        s,
        "[we should ask before we fear|a kind word is stronger than a sword|those who seem angry are often only sad]",
        0.5,
    )
    happy_end(
        s, "From that day on, {m} {gift}, and nobody was afraid any more.", "And {h} and {m} were friends for ever."
    )
    s.fact("Why was {m.name} so loud?", "{m.name} {woe}.")
    s.fact("[How did {h.name} help {m.name}|What did {h.name} do]?", "{h.name} {fix}.")
    s.fact("Who was not afraid of {m.name}?", "{h.name} was not afraid.")
    s.about = [m.form("a"), s.cast["h"].form("a"), "a village"]


def building(s: Story) -> None:
    """Tells how the hero makes something, fails, takes advice and succeeds."""
    s.character("h")
    s.character("k", role=s.rng.choice(("animal", "adult")))
    s.character("x")
    plan = s.rng.choice((
        ("a boat", "sail across the lake", "it filled with water and sank", "It needs [tar between the boards|a tighter bottom]", "sailed across the lake"),
        ("a kite", "see it dance in the sky", "it fell straight down", "It needs a [longer|longer] tail", "rose up high into the sky"),
        ("a little house", "stay warm in winter", "the wind blew it down", "You must [build it of stone|put strong posts in the ground]", "stood firm in the wind"),
        ("a bridge", "cross the stream", "it broke in the middle", "Put [a strong post|a big stone] under the middle", "held firm under {h.his} feet"),
        ("a wagon", "carry apples to the market", "a wheel came off", "The wheels must be [round and even|fixed with a strong pin]", "rolled along without a sound"),
        ("a bed of flowers", "give flowers to {h.his} mother", "nothing grew at all", "Flowers need water and [sun|light]", "bloomed in every colour"),
        ("a fiddle", "make music for everyone", "it only squeaked", "The strings must be [tighter|thinner]", "sang like a bird"),
    ))  # fmt: skip
    s.let("made", plan[0])
    s.let("why", plan[1])
    s.let("fail", plan[2])
    s.let("advice", plan[3])
    s.let("works", plan[4])
    opening(s, "[{h.He} had a dream|{h.He} had a great wish]: {h.he} wanted to make {made} and {why}.")
    s.maybe(0.6, '"[You cannot do that|You will never do it|That is silly]," said {x.intro}. But {h} did not listen.')
    s.paragraph()
    s.say(
        "{h.He} [worked all day|worked from morning to night|began at once].",
        "[In the evening|At last|When it was done] {h.he} tried it, but {fail}.",
    )
    s.say(
        '"[Never mind|I will try again]," said {h}, and {h.he} [began again|started all over again].',
        "The [second|next] time, {fail} again.",
    )
    s.maybe(0.6, '"[I told you so|You should give up]," said the neighbours.', "{h} was " + FEELINGS + ".")
    s.paragraph()
    meet(s, "k")
    s.say(
        "{k} looked at the work [for a while|and nodded].",
        '"{advice}," {k.he} said. "[Let me show you|Come, I will show you]."',
    )
    s.say(
        "They worked [side by side|together] [until noon|for three days|until the stars came out].",
        "[Then they tried it|Then the great moment came].",
    )
    s.say("[This time|Now] it {works}!", "{h} [cheered|jumped for joy].")
    thanks(s)
    moral(
        s,
        "[those who never give up will succeed|we learn from our mistakes|good advice is worth more than gold|two can do what one cannot]",
        0.5,
    )
    happy_end(
        s,
        "And whenever somebody wanted to make something new, {h} [helped|showed them how].",
        "Everyone came to look, and {h} was proud.",
    )
    s.fact("What did {h.name} [make|want to make]?", "{h.name} wanted to make {made}.")
    s.fact("What went wrong?", "At first {fail}.")
    s.fact("Who [helped {h.name}|gave good advice]?", "{k.name} [helped {h.him}|gave good advice].")
    s.about = [s.cast["h"].form("a"), s.words["made"].form(None), s.cast["k"].form("a")]


def seed(s: Story) -> None:
    """Tells how the hero cares for a strange seed or egg that others laugh at."""
    s.character("h")
    s.character("x")
    s.place("p")
    egg = s.rng.random() < 0.5
    s.let(
        "o",
        "[a strange egg|a big blue egg|a cold grey egg]"
        if egg
        else "[a tiny seed|a strange black seed|a dry little seed]",
    )
    s.let("it", "egg" if egg else "seed")
    s.let(
        "care",
        "kept it warm [day and night|under a blanket]"
        if egg
        else "planted it and gave it water [every day|each morning]",
    )
    s.let("became", "[a little dragon|a white swan|a golden bird|a small green dragon|a baby eagle]" if egg
          else "[a tall tree full of golden apples|a rose of many colours|a tree with silver leaves|a pumpkin as big as a house]")  # fmt: skip
    opening(s, "[{h.He} was patient and kind|{h.He} took good care of small things].")
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(
        "{time}, {h} found {o} {in_p}.", '"[I will take care of you|Poor little {it}]," {h.he} said, and took it home.'
    )
    s.say('"Throw it away!" said {x.intro}. "[Nothing will come of it|It is dead]."')
    s.say("But {h} {care}.", "[Days went by|Weeks went by|A whole month passed], and nothing happened.")
    s.say(
        '"[You are wasting your time|I told you so]," [laughed|said] {x}.',
        '"[Good things take time|I can wait]," said {h}.',
    )
    s.paragraph()
    s.say(
        "[Then, one morning|At last, one night|One bright morning], "
        + ("the egg cracked[|, and cracked again]." if egg else "a green tip came out of the ground.")
    )
    s.say(("Out of it came" if egg else "It grew and grew and became") + " {became}!")
    s.say(
        "{x} [could not believe {x.his} eyes|stared with an open mouth].",
        '"[You were right|I should not have laughed]," said {x}.',
    )
    s.say("[{h} only smiled|{h} was full of joy], and [everyone came to see it|all the neighbours came to look].")
    moral(s, "[good things take time|patience is rewarded|we should not laugh at small things]", 0.55)
    happy_end(s, "And {h} [loved it|took care of it] for [the rest of {h.his} life|many years].")
    s.fact("What did {h.name} find?", "{h.name} found {o}.")
    s.fact(
        "What [came out of|became of] the {it}?", "It became {became}." if not egg else "{became} came out of the egg."
    )
    s.fact("Who laughed at {h.name}?", "{x.name} laughed at {h.him}.")
    s.about = [s.cast["h"].form("a"), s.words["o"].form(None), s.cast["x"].form("a")]
