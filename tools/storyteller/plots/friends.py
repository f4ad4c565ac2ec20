"""Plots about kindness between strangers and friends.

Each plot fills a `Story` with a complete story, and adds questions about it with their answers.
"""

from __future__ import annotations

from ..grammar import Story
from ..lexicon import FOODS, TIMES
from ..scenes import FEELINGS, happy_end, meet, moral, opening


def small_saves_big(s: Story) -> None:
    """Tells how a big animal spares a small animal, is caught, and is saved by the small animal."""
    while s.character("b", role="animal").kind.size != "big":
        s.cast.clear()
    while s.character("h", role="animal").kind.size != "small":
        del s.cast["h"]
    s.let("trap", "[a net|a deep pit|a trap made of ropes]")
    s.let("how", "[gnawed through the ropes|untied the knots one by one|pulled the ropes apart]" if s.words["trap"].form(None) != "a deep pit"
          else "[brought a long rope|rolled stones into the pit to make steps]")  # fmt: skip
    opening(
        s,
        "[{h.He} was the smallest of all the animals|{h.He} was small, but {h.his} heart was big|Everyone laughed because {h.he} was so small].",
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say("{time}, {h} [ran over the paw of|woke up|walked right into] {b.intro}[| who was sleeping in the shade].")
    s.say(
        "{b} [was angry|opened one eye|roared].",
        '"[How dare you wake me|I will eat you for this|Now I have you]!" said {b}.',
    )
    s.say(
        '"Please let me go," [begged|said|cried] {h}. "[One day I will help you|If you are kind to me, I will help you one day|I will never forget it]."'
    )
    s.say(
        '{b} laughed. "[How can someone so small help me|You are far too small to help me]? ^but [go|run along|I will let you go]," {b.he} said.'
    )
    s.paragraph()
    s.say(
        "[Some days later|Not long after|The next week|A few days later], {b} [was caught in|fell into|walked into] {trap}."
    )
    s.say("{b.He} [pulled and pulled|roared with fear|tried to get out], but {b.he} could not get free.")
    s.say(
        '{h} heard {b.him} [and came running|and came as fast as {h.he} could]. "[Do not be afraid|Hold still|Do not move]," said {h}. "[Now it is my turn to help|I will help you]."'
    )
    s.say("{h} worked [all night|for a long time|without rest].", "{h.He} {how}, and at last {b} was free.")
    s.paragraph()
    s.say(
        '"[I laughed at you|I was wrong|I thought you were too small to help]," said {b}, "[and you saved my life|but you are the bravest friend I have|but you have a big heart]."'
    )
    moral(
        s,
        "[even the smallest friend can be a great help|no act of kindness is ever wasted|you do not have to be big to help]",
        0.6,
    )
    happy_end(
        s,
        "From that day on, {b} and {h} were [friends|the best of friends].",
        "After that, nobody laughed at {h} any more.",
        "And {b} carried {h} home on {b.his} back.",
    )
    s.fact("[Who was caught|What happened to {b.name}]?", "{b.name} was caught in {trap}.")
    s.fact("Who [saved|helped|freed] {b.name}?", "{h.name} [saved|helped|freed] {b.name}.")
    s.fact("How did {h.name} [save|help|free] {b.name}?", "{h.He} {how}.")
    s.about = [s.cast["b"].form("a"), s.cast["h"].form("a")]


def lonely(s: Story) -> None:
    """Tells how the hero wants a friend, is turned away, and then finds a friend in an unexpected place."""
    s.character("h", role=s.rng.choice(("animal", "animal", "any")))
    s.character("x", role="animal")
    s.character("y", role="animal")
    s.character("k")
    s.let("game", "[hide and seek|ball|catch|a singing game|a guessing game]")
    s.place("p")
    opening(
        s,
        "[{h.He} was lonely because {h.he} had no friends|{h.He} had everything but a friend|{h.He} wished for a friend more than anything|Nobody ever came to visit {h.him}].",
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(
        '"[Today I will find a friend|I will go out and look for a friend|I want somebody to play with]," said {h} {time}.'
    )
    meet(s, "x")
    s.say(
        '"Will you be my friend?" asked {h}.',
        '"[No|Go away|I am sorry]," said {x}. "[I am too busy|You are too different|I already have friends|I like to be alone]."',
    )
    s.say(
        "{h} went on[| to {p}] and met {y.intro}.",
        '"[Will you play with me|Would you like to play|Do you want to be my friend]?" asked {h}.',
    )
    s.say(
        '"[Not today|I do not play with strangers like you|Maybe another day]," said {y}, and [went away|turned around].'
    )
    s.say(
        "{h} was " + FEELINGS + ".",
        "{h.He} sat down {in_p} [all alone|with {h.his} head in {h.his} arms|and looked at the ground].",
    )
    s.paragraph()
    s.say(
        "[Then|Suddenly|After a while] {h.he} heard [a small voice|somebody crying|a soft sound].", "It was {k.intro}."
    )
    s.say(
        '"Why are you [crying|sad|here all alone]?" asked {h}.',
        '"[I have no one to play with|Nobody wants to be my friend|I am new here and I know nobody]," said {k}.',
    )
    s.say(
        '"[Then we are two|So we are the same|I have no friends either]," said {h}. "[Let us be friends|Come and play with me|Let us play {game}]!"'
    )
    s.say(
        "[So they|They] played {game} [until the stars came out|all day long|until it was dark][| and laughed and laughed]."
    )
    s.paragraph()
    s.maybe(
        0.5,
        '"[This was the best day of my life|I am so glad I met you]," said {k}.',
        '"[Me too|I feel the same]," said {h}.',
    )
    moral(
        s,
        "[a friend can be found where you do not look|the best way to find a friend is to be one|nobody has to be alone for ever]",
        0.4,
    )
    happy_end(
        s,
        "From that day on, {h} and {k} [met every day|were best friends|were never lonely again].",
        "And {h} was never lonely again.",
    )
    s.fact("What did {h.name} want?", "{h.name} wanted a friend.")
    s.fact("Who became {h.s} friend?", "{k.name} became {h.his} friend.")
    s.fact("What did they play?", "They played {game}.")
    s.about = [s.cast["h"].form("a"), s.cast["k"].form("a")]


def sharing(s: Story) -> None:
    """Tells how a hungry stranger asks a greedy and a generous character for food, and repays the generous one."""
    s.character("h")
    s.character("g")
    s.character("k", role=s.rng.choice(("animal", "adult")))
    s.let("food", s.rng.choice(FOODS))
    s.let(
        "reward",
        "[a bag of gold|a warm coat|a magic pot that was never empty|a basket full of good things|a little golden bell]",
    )
    s.let(
        "need",
        "[lost {h.his} way in the snow|fell into the river|had nothing left to eat|lost {h.his} house in a storm]",
    )
    opening(
        s,
        "[{h.He} did not have much, but {h.he} was always ready to share|{h.He} was poor, but {h.his} heart was good].",
    )
    s.say(
        "{g.intro} lived [next door|nearby|close by], and {g.he} [never shared anything|kept everything for {g.himself}|was rich and greedy]."
    )
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say("{time}, {k.intro} came [to the door|down the road|by], [cold and hungry|tired and wet|thin and weak].")
    s.say('"[Can you give me something to eat|Can you spare a little food]?" {k} asked {g}.')
    s.say('"[I have nothing for you|Go away|No, it is all mine]!" said {g}[|, and {g.he} shut the door].')
    s.say(
        "Then {k} asked {h}.",
        '"[I have only {food}|All I have is {food}]," said {h}, "but [half of it is yours|you may have half|come in and eat with me]."',
    )
    s.say(
        "[They ate together|So they shared it] and [talked until late|laughed together|were warm and happy].",
        '"[I will not forget this|One day I will repay you]," said {k}.',
    )
    s.paragraph()
    s.say("[Winter came|Some time passed|A year went by|The days grew cold], and {h} {need}.")
    s.say(
        "[Then there was a knock|Just then somebody came|But {h} was not alone].",
        "It was {k}, who had [heard of it|come back|not forgotten].",
    )
    s.say(
        '"[You shared with me, now I share with you|You helped me when I was hungry|A good heart should be rewarded]," said {k}, and {k.he} gave {h} {reward}.'
    )
    s.paragraph()
    s.one_of(
        "When {g} saw it, {g.he} was [ashamed|sorry]. From then on {g.he} [shared too|learned to share].",
        "{g} [looked on with empty hands|was green with envy|got nothing at all].",
    )
    moral(
        s,
        "[those who share will never be poor|what you give comes back to you|a kind deed is never lost|greed leaves you with empty hands]",
        0.6,
    )
    happy_end(
        s, "And {h} [always had enough to eat|never went hungry again], and always [shared it|had something to share]."
    )
    s.fact("What did {h.name} share?", "{h.name} shared {food}.")
    s.fact("Who [did not share|was greedy]?", "{g.name} [did not share|was greedy].")
    s.fact("What did {k.name} give {h.name}?", "{k.name} gave {h.him} {reward}.")
    s.about = [s.cast["h"].form("a"), s.cast["g"].form("a"), s.words["food"].form(None)]


def quarrel(s: Story) -> None:
    """Tells how two friends fight over a thing, lose or break it, and learn what matters."""
    s.character("h", role=s.rng.choice(("animal", "child")))
    s.character("f", role=s.rng.choice(("animal", "child")))
    o = s.thing("o")
    s.character("t", role="animal")
    s.place("p")
    opening(s, "{h.He} had a good friend, {f.intro}.")
    s.say("[They did everything together|They played together every day|Nobody ever saw the one without the other].")
    s.paragraph()
    s.let("time", s.rng.choice(TIMES))
    s.say(
        "{time}, they found {o.a} {in_p}.",
        '"[It is mine|I saw it first]!" [said|cried] {h}.',
        '"[No, it is mine|No, I saw it first]!" [said|cried] {f}.',
    )
    s.say("They [pulled and pushed|shouted at each other|argued for a long time][| and would not let go].")
    if s.rng.random() < 0.5:
        s.say(
            "While they were [fighting|shouting], {t.intro} came by, [picked up the {o}|took the {o}] and [ran away|was gone]."
        )
        s.let("lost", "{t.name} took it")
        s.fact("Who took the {o.full}?", "{t.name} took the {o.full}.")
    else:
        s.say(
            "[They pulled so hard that|Then there was a loud crack, and] the {o} [broke in two|fell to the ground and broke]."
        )
        s.let("lost", "it broke")
    s.say("Now [nobody had it|neither of them had it].", "{h} went home alone, and {f} went home alone, too.")
    s.paragraph()
    s.say(
        "That night {h} could not sleep.",
        '"[What is {o.a} without a friend|What good is {o.a} if I have nobody to play with]?" {h.he} thought.',
    )
    s.say(
        "[Early in the morning|When the sun came up|The next day] {h} went to {f}.",
        '"[I am sorry|Please forgive me]," said {h}. "[You are more important than any {o}|I do not want to fight with you]."',
    )
    s.say(
        '"[I am sorry too|I wanted to say the same]," said {f}.',
        "They [hugged|shook hands|laughed] and [went out to play|ate breakfast together].",
    )
    moral(
        s,
        "[a friend is worth more than any treasure|those who fight may lose everything|it is better to share than to fight]",
        0.6,
    )
    happy_end(
        s,
        "From that day on, they [shared everything|never fought again].",
        "And whatever they found after that, they shared.",
    )
    s.fact("What did they find?", "They found {o.a}.")
    s.fact("What happened to the {o.full}?", "They fought over it, and {lost}.")
    s.fact("Who said sorry first?", "{h.name} said sorry first.")
    s.about = [s.cast["h"].form("a"), s.cast["f"].form("a"), o.form("a")]
