"""Plots about quests: a character sets out to find a lost thing, to heal, to get home, or to win a reward.

Each plot fills a `Story` with a complete story, and adds questions about it with their answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..grammar import Story
from ..lexicon import TIMES, Ability
from ..scenes import FEELINGS, happy_end, meet, moral, opening, thanks


@dataclass(frozen=True, slots=True)
class Spot:
    """A place where an object gets lost: how it gets there, where it is, why the hero cannot reach it, and who can
    reach it and how.
    """

    lost: str
    at: str
    why: str
    ability: Ability
    act: str


SPOTS = (
    Spot("it rolled down the bank and fell into the river", "at the bottom of the river",
         "the water was [deep and cold|too deep]", "swim", "jumped into the water and swam down to the bottom"),
    Spot("it slipped and fell into the pond", "at the bottom of the pond",
         "the pond was [dark and deep|too deep]", "swim", "dived into the pond without a sound"),
    Spot("a strong wind carried it up into a tall tree", "at the top of a tall tree",
         "the tree was too [high|tall]", "fly", "flew up to the very top of the tree"),
    Spot("the wind blew it up onto a high roof", "on a high roof",
         "the roof was much too high", "fly", "flew up to the roof in a moment"),
    Spot("it got caught high up in the branches of an oak", "in the branches of an old oak",
         "the branches were too [high|thin]", "climb", "climbed up the oak from branch to branch"),
    Spot("it fell into a deep hole in the ground", "in a deep hole in the ground",
         "the hole was [deep and dark|too narrow]", "dig", "dug and dug until the hole was wide enough"),
    Spot("it fell under the roots of a big tree", "under the roots of a big tree",
         "the ground was [hard as stone|too hard]", "dig", "dug under the roots with quick paws"),
    Spot("a big stone rolled on top of it", "under a big stone",
         "the stone was [too heavy|as heavy as a house]", "strong", "pushed the stone with all {k.his} strength until it rolled away"),
    Spot("it got tangled in an old net", "in an old net",
         "the ropes of the net were too [thick|strong]", "gnaw", "bit through the ropes one by one"),
    Spot("a cart drove off with it down the road", "in a cart on the road",
         "the cart was [too fast|already far away]", "run", "ran after the cart as fast as the wind"),
)  # fmt: skip


def lost_thing(s: Story) -> None:
    """Tells how a thing is lost out of reach. The hero asks in vain, and then finds a helper who can reach it."""
    s.character("h", role=s.rng.choice(("animal", "child", "child", "any")))
    o, spot = s.thing("o"), s.rng.choice(SPOTS)
    role = "adult" if spot.ability == "strong" and s.rng.random() < 0.2 else "animal"
    s.character("k", role=role, ability=spot.ability)
    s.character("x", role="animal")
    s.place("p")
    s.let("at", spot.at)
    s.let("giver", "[mother|father|grandmother|grandfather|best friend]")
    s.let("why", spot.why)
    opening(s, "[{h.He} had|{h.He} loved {h.his} toys, but best of all {h.he} loved|More than anything {h.he} loved] {o.a} "
               "[that {h.his} {giver} had given {h.him}|from {h.his} {giver}].")  # fmt: skip
    s.maybe(
        0.5,
        "[{h.He} took it everywhere|Every day {h.he} played with it|At night {h.he} kept it beside {h.his} bed|It was the most precious thing {h.he} had].",
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(f"{{time}}, {{h}} was [playing|walking|running] {{in_p}} with the {{o}} when {spot.lost}.")
    s.one_of(
        '"Oh no!" cried {h}. "My {o}!"', '"My {o} is gone!" {h.he} cried.', "{h} was " + FEELINGS + ".",
        '"What shall I do now?" said {h}.',
    )  # fmt: skip
    s.say(
        "{h.He} [tried|tried again and again|did all {h.he} could] to [get it|reach it], but {why}.",
    )
    s.paragraph()
    meet(s, "x")
    s.say('"[Please, can|Can|Will] you help me?" asked {h}. "My {o} is {at}."')
    s.say(
        '"[I am sorry|I would like to help]," said {x}, "but [I have no time today|I am afraid|I cannot do that|that is too hard for me]."'
    )
    s.maybe(0.3, "{h} [sat down and cried|walked on|did not give up].")
    meet(s, "k")
    s.say(
        '"Why are you [so sad|crying]?" asked {k}.', '"My {o} is {at} and I cannot [reach it|get it back]," said {h}.'
    )
    s.say(
        '"[Do not worry|Do not cry|Dry your tears|Leave it to me]," said {k}. "[I can help you|I know what to do|I will get it for you]."'
    )
    s.say("{k} " + spot.act + ".", "[Soon|A moment later|In no time] {k.he} came back with the {o}.")
    s.paragraph()
    s.say("{h} was so [happy|glad] that {h.he} [danced|jumped for joy|laughed out loud].")
    thanks(s)
    moral(
        s,
        "[a friend in need is a friend indeed|it is good to ask for help|kind hearts are everywhere|true friends help each other]",
        0.35,
    )
    happy_end(
        s,
        "From then on {h} and {k} were [best friends|the best of friends], and {h} [never lost the {o} again|took good care of the {o}].",
        "{h} and {k} played together until the sun went down, and the {o} was safe.",
    )
    s.fact("[What did {h} lose|What was lost]?", "{h.name} lost {o.a}.")
    s.fact("[Where was the {o.full}|Where did the {o.full} go]?", "The {o.full} was {at}.")
    s.fact(
        "Who [helped {h.name}|found the {o.full}|got the {o.full} back]?",
        "{k.name} [helped {h.name}|got the {o.full} back].",
    )
    s.fact("Who [did not help|could not help]?", "{x.name} did not help.")
    s.fact("Who gave {h.name} the {o.full}?", "{h.His} {giver} gave {h.him} the {o.full}.")
    s.about = [s.cast["h"].form("a"), s.cast["k"].form("a"), o.form("a"), s.words["p"].form(None)]


RIDDLES = (
    '"What has [teeth but cannot bite|many teeth and never eats]?"',
    '"What runs all day and never gets tired?"',
    '"What gets bigger the more you take away?"',
    '"What follows you all day and leaves you at night?"',
    '"What can fill a room and weighs nothing?"',
)


_RIDDLE_ANSWERS = (
    ("teeth", "a comb"),
    ("runs", "the river"),
    ("bigger", "a hole"),
    ("follows", "my shadow"),
    ("fill", "light"),
)


def cure(s: Story) -> None:
    """Tells how the hero gets a cure for a loved one from a guardian who asks for something in return."""
    s.character("h", role=s.rng.choice(("child", "child", "animal")))
    guard_role = s.rng.choice(("adult", "animal"))
    g = s.character("g", role=guard_role)
    s.let("ill", "[mother|father|grandmother|grandfather|little brother|little sister]")
    she = s.words["ill"].form(None) in ("mother", "grandmother", "little sister")
    s.let("ill_he", "she" if she else "he")
    s.let("ill_him", "her" if she else "him")
    s.let("ill_his", "her" if she else "his")
    s.let(
        "cure",
        "[a blue flower|a golden apple|water from the magic spring|a leaf from the silver tree|honey from the white bees|a red berry]",
    )
    s.place("p")
    opening(s, "[{h.He} lived with {h.his} {ill}|{h.He} loved {h.his} {ill} very much].")
    s.paragraph()
    s.say(
        "[But one|One] [winter|spring|day|autumn], {h.his} {ill} fell [very ill|ill] and [could not get up|lay in bed day and night]."
    )
    s.say(
        '"[Only {cure} can help {ill_him}|There is one thing that can help, and that is {cure}]," said [the doctor|an old neighbour|the wise owl]. "[You will find it|It is|Look for it] {in_p}."'
    )
    s.say(
        '"[I will go and get it|Then I will find it|I am not afraid, I will go]," said {h}.',
        "{h.He} [walked for three days|walked over hills and through valleys|took some bread and set out].",
    )
    s.paragraph()
    s.say("{in_p} {h.he} [met|found|saw] {g.intro}, who [guarded|watched over] {cure}.")
    s.say(
        '"[Who are you|What do you want here|Who comes here]?" asked {g}.',
        '"[My {ill} is ill|Please, my {ill} is very ill]," said {h}. "Please give me {cure}."',
    )
    way = s.rng.random()
    if way < 0.4:
        s.say('"[First|Then] you must answer my riddle," said {g}. ' + s.rng.choice(RIDDLES))
        s.say("{h} thought [hard|for a long time].", '"[I know|I have it]," {h.he} said. "It is @answer@."')
        s.let("deed", "answered a riddle")
        _answer_riddle(s)
        s.say('"[That is right|You are clever]," said {g}. "[Take it|It is yours]."')
    elif way < 0.7:
        s.let("deed", "shared {h.his} bread")
        s.say(
            '"I am [so hungry|hungry and alone]," said {g}. "[Nobody ever brings me food|I have not eaten for days]."'
        )
        s.say("{h} had only one piece of bread left, but {h.he} [gave half of it|gave it] to {g}.")
        s.say('"[You have a good heart|You are kind]," said {g}. "[Take it|Take it and go home quickly]."')
    else:
        s.let("deed", "pulled a thorn out of {g.s} foot")
        s.say(
            "{h} saw that {g} had a thorn in {g.his} foot.",
            '"[That must hurt|Let me help you]," {h.he} said, and [carefully|gently] {h.he} pulled it out.',
        )
        s.say(
            '"[The pain is gone|Nobody ever helped me before]!" said {g}. "[Take what you need|You may have {cure}]."'
        )
    s.paragraph()
    s.say("{h} [ran|hurried] home [without stopping|as fast as {h.he} could] and gave it to {h.his} {ill}.")
    s.say(
        "[The next morning|In the morning|Before the sun went down], {ill_he} [opened {ill_his} eyes and smiled|was well again|sat up and asked for soup]."
    )
    moral(s, "[a kind heart opens every door|love gives us strength|those who do not give up find a way]", 0.35)
    happy_end(
        s,
        "{h} and {h.his} {ill} [were happy together|lived happily together for many years].",
        "And every year {h} went back to visit {g}.",
    )
    s.fact("Who was ill?", "{h.His} {ill} was ill.")
    s.fact("What did {h.name} [need|look for|bring home]?", "{h.name} looked for {cure}.")
    s.fact("Who guarded it?", "{g.name} guarded it.")
    s.fact("How did {h.name} get it?", "{h.name} {deed}.")
    s.fact("Where was it?", "It was {in_p}.")
    s.about = [s.cast["h"].form("a"), g.form("a"), s.words["cure"].form(None)]


def _answer_riddle(s: Story) -> None:
    """Inserts the right answer, which is identified by a word of the riddle."""
    sentences = s.paragraphs[-1]
    riddle = next(text for text in reversed(sentences) if "riddle" in text)
    answer = next(answer for word, answer in _RIDDLE_ANSWERS if word in riddle.split("riddle", 1)[1])
    sentences[:] = [text.replace("@answer@", answer) for text in sentences]
    s.fact("What was the answer to the riddle?", f"The answer was {answer}.")


def way_home(s: Story) -> None:
    """Tells how a young character is lost and finds the way home with help."""
    s.character("h", role=s.rng.choice(("animal", "animal", "child")))
    s.character("x", role="animal")
    s.character("k")
    s.place("p")
    s.let("lure", "[a bright butterfly|a red balloon|a strange song|a shining light|a leaf that danced in the wind]")
    s.let(
        "sign",
        "[the smoke of the chimney|the old oak|the sound of the bells|the light in the window|the little bridge]",
    )
    opening(
        s,
        '[{h.His} mother always said, "Do not go too far from home"|{h.He} loved to explore|{h.He} had never been far from home].',
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(
        "{time}, {h} saw {lure} and followed it [far away|all the way to {p}|further and further].",
        "When {h.he} looked around, {h.he} did not know where {h.he} was.",
    )
    s.say(
        '"[I am lost|I want to go home]," [said {h} in a small voice|cried {h}].',
        "[It was getting dark|The sun was going down|A cold wind began to blow].",
    )
    meet(s, "x")
    s.say(
        '"Do you know the way to my home?" asked {h}.',
        '"[No|I do not know]," said {x}. "[Ask somebody else|I have never been there]."',
    )
    s.say("{h} [walked on|went on and on], and {h.his} [feet|legs] [hurt|were tired].")
    meet(s, "k")
    s.say(
        '"[Little one, why are you out so late|Why are you crying|Are you lost]?" asked {k}.',
        '"I [cannot find|have lost] my way home," said {h}.',
    )
    s.say('"What can you see from your home?" asked {k}.', '"[I can see|There is] {sign}," said {h}.')
    s.say('"[I know where that is|Then it is not far]," said {k}. "[Come with me|Hold on to me|Follow me]."')
    s.say(
        "[They went|Together they walked] [over the hill|through the trees|along the stream] until {h} saw [the house|{h.his} home] [in the distance|at last]."
    )
    s.paragraph()
    s.say(
        "{h.His} mother [ran out|was waiting at the door] and [took {h.him} in her arms|hugged {h.him} tight].",
        '"[Thank you for bringing my child home|Thank you with all my heart]," she said to {k}.',
    )
    s.maybe(0.5, "{k} stayed for supper, and they ate hot soup together.")
    moral(
        s,
        "[we should not go too far from home alone|there is no place like home|there is always someone who will help]",
        0.4,
    )
    happy_end(s, "That night {h} slept in {h.his} own warm bed.", "After that, {h} never went so far alone again.")
    s.fact("What did {h.name} follow?", "{h.name} followed {lure}.")
    s.fact(
        "Who [brought {h.name} home|showed {h.name} the way|helped {h.name}]?",
        "{k.name} [brought {h.him} home|showed {h.him} the way].",
    )
    s.fact("Who did not know the way?", "{x.name} did not know the way.")
    s.about = [s.cast["h"].form("a"), s.cast["k"].form("a"), s.words["p"].form(None)]


def contest(s: Story) -> None:
    """Tells how a humble character ends a ruler's sorrow by a small thing, after proud characters have failed."""
    s.character("h", role=s.rng.choice(("child", "animal", "adult", "child")))
    while s.character("r", role="adult").noun not in ("king", "queen", "prince", "princess"):
        del s.cast["r"]
    sorrow = s.rng.choice((
        ("could not laugh any more", "make {r.him} laugh", "slipped on an apple and fell into a tub of soup", "laughed until the tears ran down"),
        ("could not sleep", "bring {r.him} sleep", "sat by the bed and sang an old, soft song", "fell asleep like a child"),
        ("had lost {r.his} crown", "find the crown", "looked in the one place where nobody had looked, under the throne itself", "put it on and danced"),
        ("would not eat", "make {r.him} eat", "brought plain bread and sat down to eat it with {r.him}", "took a bite, and then another"),
        ("was always sad", "make {r.him} happy", "took {r.him} by the hand and led {r.him} out into the sunny garden", "smiled for the first time in years"),
    ))  # fmt: skip
    s.let("woe", sorrow[0])
    s.let("task", sorrow[1])
    s.let("deed", sorrow[2])
    s.let("joy", sorrow[3])
    s.let(
        "reward",
        "[a bag of gold|a white horse|a house with a garden|half of the kingdom|a golden chain|a place at {r.his} table]",
    )
    unknown = "" if "r" in s.leads else "In that land there was {r.intro} who {woe}|"
    opening(s, f"[{unknown}Now {{r.intro}} ruled that land, and {{r.he}} {{woe}}].")
    s.say('"Whoever can {task} shall have {reward}," {r} [said|promised].')
    s.paragraph()
    s.say(
        "[Many came to try|People came from near and far].",
        "[A rich merchant|A clever doctor|A famous singer] [tried first|tried], but [it was no use|nothing helped].",
    )
    s.say("[A wise man|A strong knight|A magician] [tried next|tried too], but [it was no use either|he failed too].")
    s.say(
        "Then {h} [came to the gate|came to the castle].",
        '"Go home!" laughed the guards. "[You are only {h.a}|Wiser ones than you have failed]."',
    )
    s.say('"Let {h.him} in," said {r}. "[I have tried everything else|Everyone may try]."')
    s.paragraph()
    s.say("{h} bowed.", "Then {h.he} {deed}.", "{r} {joy}.")
    s.say("[The whole castle cheered|Everyone was amazed|The bells rang all over the land].")
    s.say('"[You did what nobody could do]," said {r}. "Here is your reward." ^and {r.he} gave {h} {reward}.')
    moral(
        s,
        "[simple things are often the best|a good heart is worth more than fine clothes|even the smallest can do great things]",
        0.45,
    )
    happy_end(
        s,
        "And {h} [visited|often visited] {r}, and they were friends.",
        "The people of the land talked about {h} for many years.",
    )
    s.fact("What was wrong with {r.name}?", "{r.name} {woe}.")
    s.fact("What did {h.name} do?", "{h.name} {deed}.")
    s.fact("What [did {h.name} get|was the reward]?", "{h.name} got {reward}.")
    s.about = [s.cast["r"].form("a"), s.cast["h"].form("a"), s.words["reward"].form(None)]
