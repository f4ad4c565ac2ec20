"""Plots about vanity, boasting, lies, idleness and greed, and their consequences.

Each plot fills a `Story` with a complete story, and adds questions about it with their answers.
"""

from __future__ import annotations

from ..grammar import Story
from ..lexicon import FOODS, TIMES
from ..scenes import happy_end, moral, opening


def flattery(s: Story) -> None:
    """Tells how a trickster gets a character's food by flattery."""
    s.character("h", role="animal")
    s.character("t", role="animal")
    s.let("food", s.rng.choice(FOODS))
    s.let("gift", "[sing|dance|whistle|jump]")
    s.let(
        "gift_noun",
        {"sing": "voice", "dance": "dancing", "whistle": "whistle", "jump": "jump"}[s.words["gift"].form(None)],
    )
    opening(s, "[{h.He} was very proud of {h.himself}|{h.He} liked to be praised|{h.He} was always hungry].")
    s.paragraph()
    s.one_of(
        "{h} had {food} and [sat down to eat it|was just about to eat it|held it tight].",
        "[That day|In the morning] {h} had found {food}, and {h.he} was looking for a quiet place to eat.",
    )
    s.say("{t.intro} [smelled the food and came near|came by and saw it|saw it and licked {t.his} lips].",
          "{t} [was hungry|wanted the food|had not eaten all day], but {t.he} was [clever|sly|full of tricks].")  # fmt: skip
    s.say(
        '"[Good day|Good morning|Hello], dear {h.noun}," said {t}. "[How fine you look today|What bright eyes you have|How beautiful you are]!"'
    )
    s.say(
        '"[Everyone says|They tell me|I have heard] that nobody can {gift} as well as you. [Will you {gift} for me|Please {gift} for me|Let me see it, just once]."'
    )
    s.say(
        "{h} was so [proud|pleased] that {h.he} [forgot all about the food|put down the food|let go of the food] and began to {gift}."
    )
    s.say(
        "[At once|Quick as a flash|In a moment] {t} [snatched the food|took the food and ran|grabbed the food] and [ate it all|swallowed it whole|was gone]."
    )
    s.paragraph()
    if s.rng.random() < 0.7:
        s.say(
            '"[Thank you for the meal|That was very tasty], my friend," [laughed|said] {t}. "[Your {gift_noun} is fine, but your head is empty|Next time, do not believe every kind word]."'
        )
        s.say("{h} was [ashamed|sad and hungry|angry with {h.himself}].")
        s.let("end", "{t.name} ate the food, and {h.name} went hungry.")
    else:
        s.say(
            'But {t} saw how sad {h} was, and {t.he} felt sorry. "[Forgive me|I am sorry]," said {t}. "[I was so hungry|It was a mean trick]."'
        )
        s.say("[The next day|In the evening] {t} brought {h} something to eat, and they ate together.")
        s.let("end", "{t.name} was sorry and brought {h.name} something to eat.")
    moral(
        s,
        "[we should not trust those who flatter us|sweet words may hide a trick|pride makes us foolish|not every kind word is true]",
        0.6,
    )
    s.maybe(0.5, "[From that day on|After that], {h} was [more careful|wiser|not so proud any more].")
    s.maybe(0.25, "[The end.|And that is the end of the story.]")
    s.fact("What did {h.name} have?", "{h.name} had {food}.")
    s.fact("Who [tricked {h.name}|took the food|ate the food]?", "{t.name} [tricked {h.name}|took the food].")
    s.fact("What did {t.name} ask {h.name} to do?", "{t.name} asked {h.name} to {gift}.")
    s.fact("How does the story end?", "{end}")
    s.about = [s.cast["t"].form("a"), s.cast["h"].form("a"), s.words["food"].form(None)]


def race(s: Story) -> None:
    """Tells how a boaster races a slow character and loses."""
    s.character("b", role="animal")
    s.character("h", role="animal")
    s.character("j", role="animal")
    s.let("goal", "[the old mill|the big oak|the river|the bridge|the top of the hill|the red barn|the old well]")
    s.let(
        "nap",
        "[lay down under a tree and fell asleep|stopped to eat {b.food}|sat down to rest and closed {b.his} eyes|stopped to play with a butterfly]",
    )
    opening(s, "[{h.He} was slow, but {h.he} never gave up|{h.He} could not run fast|Everyone said {h.he} was slow].")
    s.say("{b.intro} [lived nearby|lived in the same place|was {h.his} neighbour] and was very proud of being fast.")
    s.paragraph()
    s.say('"[You are so slow|How slow you are]!" {b} [laughed|said] [every day|again and again|one day]. "[Do you ever get anywhere|I could run twice around the world before you reach the gate]."')  # fmt: skip
    s.say('"Let us have a race," said {h}. "[We will run to {goal}|The first one at {goal} wins]."')  # fmt: skip
    s.say('{b} laughed [loudly|until {b.he} cried]. "[I will win easily|That will be fun|As you like]," {b.he} said.')
    s.say('{j.intro} was the judge. "[One, two, three, go|Ready, steady, go]!" cried {j}.')
    s.paragraph()
    s.say(
        "{b} [ran off|shot away] like the wind and was soon far ahead.",
        '"[I have lots of time|There is no hurry|That slow {h.noun} will need all day]," thought {b}.',
    )
    s.say("So {b.he} {nap}.")
    s.say(
        "But {h} [went on, step by step|walked on and on|never stopped].",
        "[{h.He} passed {b} without a sound|Slowly {h.he} went past {b}|{h.He} did not look left or right].",
    )
    s.say(
        "[When {b} looked up|When at last {b} remembered the race|When {b} thought of the race again], [it was too late|the sun was low in the sky]."
    )
    s.say("{b.He} ran as fast as {b.he} could, but {h} was already [there|at {goal}].")
    s.say('"{h.the} [wins|has won]!" cried {j}[|, and all the animals cheered].')
    s.paragraph()
    s.one_of(
        '"[Well done|You have won]," said {b}. "I will never laugh at you again."',
        "{b} [was ashamed|hung {b.his} head|did not boast any more].",
    )
    moral(
        s,
        "[slow and steady wins the race|it is not always the fastest who wins|those who boast may lose in the end]",
        0.7,
    )
    s.maybe(0.5, "After that, {h} and {b} [were friends|often walked together|became good friends].")
    s.maybe(0.25, "[The end.|And that is the end of the story.]")
    s.fact("Who won the race?", "{h.name} won the race.")
    s.fact("Why did {b.name} lose?", "{b.name} lost because {b.he} {nap}.")
    s.fact("Where did they run?", "They ran to {goal}.")
    s.fact("Who was the judge?", "{j.name} was the judge.")
    s.about = [s.cast["h"].form("a"), s.cast["b"].form("a")]


def liar(s: Story) -> None:
    """Tells how a character who lies for fun is not believed when it tells the truth."""
    s.character("h", role=s.rng.choice(("child", "animal", "child")))
    danger = s.rng.choice(("wolf", "fire", "flood"))
    s.let("cry", {"wolf": "a wolf is coming", "fire": "the barn is on fire", "flood": "the river is rising"}[danger])
    s.let("came", {"wolf": "a real wolf came out of the forest", "fire": "the barn really began to burn",
                   "flood": "the river really began to rise"}[danger])  # fmt: skip
    s.let("loss", {"wolf": "the wolf [chased|carried off] the sheep", "fire": "the barn burned to the ground",
                   "flood": "the water carried the bridge away"}[danger])  # fmt: skip
    s.character("k")
    opening(
        s,
        "[{h.He} liked to play tricks on people|{h.He} often told lies for fun|{h.He} was often bored and thought of tricks].",
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say('{time}, {h} ran [through the village|down the hill|along the road] and shouted, "Help! ^help! Look, {cry}!"')
    s.say(
        "Everyone came running[| to help].",
        "But there was [nothing to see|no danger at all], and {h} [laughed and laughed|laughed at them|held {h.his} sides with laughter].",
    )
    s.say(
        '"[That was not funny|You must not lie]," said {k.intro}. "[One day nobody will believe you|If you lie, nobody will believe you when you tell the truth]."'
    )
    s.maybe(
        0.7,
        "But [a few days later|the next day|a week later] {h.he} did it again, and again everyone came [for nothing|running for nothing].",
    )
    s.paragraph()
    s.say(
        "Then, [one night|one evening|one dark night|one morning], {came}.",
        '"Help! ^help!" cried {h}. "It is true! This time it is really true!"',
    )
    s.say(
        '"[It is only a trick|That {h.noun} is lying again|We do not believe you]," [said the people|they said], and nobody came.'
    )
    s.say("So {loss}.", "{h} [cried bitterly|sat down and cried|was very sorry].")
    s.paragraph()
    s.say(
        '"[Why did nobody help me|Why did nobody come]?" asked {h}.',
        '"[Because you lied so often|Nobody believes a liar]," said {k}.',
    )
    s.say('"I [will never lie again|am sorry, and I will never lie again]," [said|promised] {h}.')
    moral(
        s,
        "[nobody believes a liar, even when the liar tells the truth|it is always better to tell the truth|lies bring sorrow in the end]",
        0.5,
    )
    s.one_of(
        "And {h.he} kept {h.his} word.", "From that day on, {h} always told the truth.",
        "It took a long time, but at last the people [trusted|believed] {h} again.",
    )  # fmt: skip
    s.fact("What did {h.name} shout?", '{h.He} shouted, "Look, {cry}!"')
    s.fact("What happened in the end?", "In the end {loss}, and {h.name} never lied again.")
    s.fact("Why did nobody come?", "Nobody came because {h.name} had lied too often.")
    s.about = [s.cast["h"].form("a"), "a lie", s.cast["k"].form("a")]


def winter(s: Story) -> None:
    """Tells how one character works and another plays until the snow falls."""
    s.character("h", role="animal")
    s.character("l", role="animal")
    s.let("play", "[sang|danced|lay in the sun|played the fiddle|slept in the grass]")
    s.let("store", "[seeds|nuts|corn|berries|roots]")
    opening(s, "[{h.He} worked hard from morning to night|All summer long {h.he} worked|{h.He} never wasted a day].")
    s.say("{h.His} neighbour was {l.intro}, who {play} all day.")
    s.paragraph()
    s.say(
        '"[Why do you work so hard|Why do you carry those heavy {store}]?" asked {l}. "[The sun is shining|It is summer]. ^come and play!"'
    )
    s.say(
        '"[Winter will come|The winter is long and cold]," said {h}. "I am [gathering|saving] {store}, and you should do the same."'
    )
    s.say(
        '"[Winter is far away|There is plenty of time]," laughed {l}, and {l.he} [went on as before|went back to the sun].'
    )
    s.say(
        "[The leaves turned red and fell|Autumn came and went|The days grew short], and {h} [filled {h.his} house with {store}|still worked every day]."
    )
    s.paragraph()
    s.say(
        "Then [winter came|the snow came|the first snow fell] and [covered everything|everything was white].",
        "{l} [had nothing to eat|was cold and hungry|found no food anywhere].",
    )
    s.say(
        "{l.He} [knocked at|came to] {h.s} door.",
        '"[Please give me something to eat|I am so hungry, please help me]," said {l}.',
    )
    if s.rng.random() < 0.75:
        s.say(
            '"[You would not listen|You laughed at me in summer]," said {h}, "but [I cannot let you starve|nobody should be hungry|come in and get warm]."'
        )
        s.say(
            "{h} gave {l} [half of the {store}|a bowl of warm soup|a place by the fire].",
            '"[Next summer I will work with you|I will never be lazy again]," said {l}.',
        )
        s.let("end", "{h.name} shared {h.his} food with {l.name}.")
        s.say("And [when spring came|the next year], {l} [kept {l.his} promise|worked beside {h} every day].")
    else:
        s.say(
            '"What did you do all summer?" asked {h}.',
            '"I {play}," said {l}.',
            '"Then [you must go hungry now|dance to keep warm]," said {h}, and [shut|closed] the door.',
        )
        s.say("{l} [was hungry all winter|had a hard winter] and [never forgot it|learned to think of tomorrow].")
        s.let("end", "{h.name} gave {l.name} nothing.")
    moral(
        s,
        "[we should work today for tomorrow|there is a time for work and a time for play|it is wise to think of tomorrow]",
        0.6,
    )
    s.maybe(0.3, "[The end.|And that is the end of the story.]")
    s.fact("What did {h.name} gather?", "{h.name} gathered {store}.")
    s.fact("What did {l.name} do all summer?", "{l.name} {play} all summer.")
    s.fact("What happened [in winter|when winter came]?", "{l.name} was hungry. {end}")
    s.about = [s.cast["h"].form("a"), s.cast["l"].form("a"), "winter"]


def magic(s: Story) -> None:
    """Tells how kindness is rewarded with a magic thing, and how a greedy character takes it and loses."""
    s.character("h")
    while s.character("g", role="adult").noun not in (
        "witch",
        "wizard",
        "fairy",
        "dwarf",
        "elf",
        "king",
        "queen",
        "grandmother",
    ):
        del s.cast["g"]
    s.character("t")
    kinds = {"pot": ("cook as much soup as you like", "soup", "Little pot, cook", "Little pot, stop"),
             "mill": ("grind as much flour as you like", "flour", "Little mill, grind", "Little mill, stop"),
             "purse": ("fill itself with coins", "coins", "Little purse, give", "Little purse, enough"),
             "jug": ("pour as much milk as you like", "milk", "Little jug, pour", "Little jug, rest")}  # fmt: skip
    noun = s.rng.choice(list(kinds))
    s.let("m", noun)
    for key, value in zip(("does", "stuff", "start", "stop"), kinds[noun], strict=True):
        s.let(key, value)
    s.let("start", kinds[noun][2].lower())
    s.let("stop", kinds[noun][3].lower())
    s.let(
        "deed",
        "[carried {g.his} heavy basket|shared {h.his} last piece of bread with {g.him}|gave {g.him} {h.his} warm coat|helped {g.him} over the stream]",
    )
    opening(s, "[{h.He} was poor but kind|{h.He} was often hungry, but {h.he} was kind to everyone].")
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(
        "{time}, {h} met {g.intro} [on the road|in the forest|by the river].",
        "[Because {h.he} was kind|Without being asked], {h.he} {deed}.",
    )
    s.say(
        "\"[You have a good heart|You were kind to me],\" said {g}. \"Take this {m}. ^it will {does} when you say, '^{start}.' ^but remember to say, '^{stop},' or it will never stop.\""
    )
    s.say(
        "{h} thanked {g} and went home.",
        "[From then on|Now] {h.he} had enough {stuff} [every day|for everyone], and {h.he} shared it with [the neighbours|the poor].",
    )
    s.paragraph()
    s.say(
        "But {t.intro} [saw it through the window|heard of it] and [was filled with envy|wanted the {m}].",
        "[In the night|One night] {t.he} [crept in|came] and stole it.",
    )
    s.say(
        'At home {t} said, "^{start}!" ^and the {m} began.',
        "[Soon there was|There was] {stuff} [everywhere|on the table, on the floor, and in the street].",
    )
    s.say(
        '"Stop! ^stop!" cried {t}, but {t.he} did not know the right words.',
        "The {stuff} came [up to {t.his} knees|out of the door and down the road].",
    )
    s.say('Then {h} came running and said, "^{stop}!" ^and the {m} stopped at once.')
    s.paragraph()
    s.say(
        '"[Forgive me|I am sorry]," said {t}. "[I will never steal again|Please take it back]."',
        "{h} [took the {m} home|forgave {t.him}|laughed and forgave {t.him}].",
    )
    moral(s, "[greed brings trouble|kindness is rewarded and greed is not|what is stolen brings no luck]", 0.5)
    happy_end(s, "And {h} had enough {stuff} for the rest of {h.his} days.")
    s.fact("Who gave {h.name} the {m}?", "{g.name} gave {h.him} the {m}.")
    s.fact("Who stole the {m}?", "{t.name} stole the {m}.")
    s.fact("What [could the {m} do|did the {m} make]?", "The {m} made {stuff}.")
    s.about = [s.cast["h"].form("a"), "a magic " + noun, s.cast["g"].form("a"), s.cast["t"].form("a")]
