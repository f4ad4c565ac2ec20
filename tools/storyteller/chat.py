"""Generates chats about stories as text: requests for a story, questions about it, small talk."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .grammar import Character, Story

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ASKING = (
    "Tell me a story about {}.", "Tell me a story about {}", "Can you tell me a story about {}?", "Please tell me a story about {}.",
    "Tell me a tale about {}.", "Can you tell me a tale about {}?", "I would like to hear a story about {}.",
    "Write a story about {}.", "Write a short story about {}.", "Make up a story about {}.", "A story about {}, please.",
    "Tell me a short story about {}.", "Do you know a story about {}?", "I want a story about {}!", "tell me a story about {}",
    "Tell me a bedtime story about {}.", "Story about {}", "Could you write a fable about {}?", "Tell us about {}.",
    "Give me a story with {}.", "Please write me a little story about {}.", "write a story about {}",
)  # fmt: skip
_ASKING_ANY = (
    "Tell me a story.", "Tell me a story", "Can you tell me a story?", "Please tell me a tale.", "I want to hear a story.",
    "Tell me a bedtime story.", "Write a story.", "Do you know a story?", "tell me a story", "A story, please!", "Make up a story.",
)  # fmt: skip
_AGAIN = (
    "Tell me another story about {}.",
    "Now tell me one about {}.",
    "Another one, about {}, please.",
    "And a story about {}?",
)
_JOINTS = (
    "{} and {}",
    "two friends, {} and {}",
    "{} who meets {}",
    "{} with {}",
    "{} & {}",
    "{}, and {}",
    "{} and also {}",
)
_JOINT_SHARES = (84, 4, 4, 2, 1, 2, 1)
_SYSTEM = ("You are a helpful assistant.", "You tell stories.", "You are a kind storyteller.", "Answer briefly.")

_GREETING = (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning.", "Hello there!", "hi"),
             ("Hello! Would you like to hear a story?", "Hello! What shall I tell you a story about?",
              "Good day! I know many stories. Who shall be in yours?"))  # fmt: skip
_WHO = (("Who are you?", "What are you?", "What is your name?", "What can you do?", "who are you", "What do you do?", "Are you a robot?"),
        ("I am a little storyteller. Ask me for a story about a fox, a king, or anyone you like.",
         "I am a small model that tells stories. Who shall my next story be about?"))  # fmt: skip
_HOW = (("How are you?", "How are you today?", "how are you"),
        ("I am well, thank you. Would you like to hear a story?",))  # fmt: skip
_THANKS = (("Thank you!", "Thanks.", "Thank you.", "That was nice.", "I like it.", "What a nice story!", "Thanks!"),
           ("You are welcome! Would you like another story?", "I am glad you liked it.", "You are welcome!"))  # fmt: skip
_BYE = (
    ("Goodbye.", "Bye!", "Good night."),
    ("Goodbye! Come back when you want another story.", "Good night! Sleep well."),
)
_OTHER = (
    ("What is the capital of {}?", "What is two plus two?", "Write a program in Python.", "How tall is {}?", "What is the weather today?",
     "Who is the president of {}?", "Explain {} to me.", "How do I cook {}?", "Translate this into {}.", "What is {}?", "Solve this: 12 + 30",
     "Why is the sky blue?", "What time is it?", "Can you help me with {}?", "Where is {}?", "How many days are in a year?",
     "Write a poem about {}.", "What is the best {}?", "Do you like {}?", "Count to ten."),
    ("I am only a little storyteller, and I do not know that. Shall I tell you a story?",
     "That I do not know. But I can tell you a story!", "I know nothing about that, but I know many stories. Would you like one?"),
)  # fmt: skip
_TOPICS = """France|Germany|Spain|the moon|music|rice|English|German|a computer|football|the sun|Paris|London|history|mathematics|physics
|money|chocolate|a car|gravity|the internet|my homework|China|America
|electricity|a phone|Redis|Python|science|machine learning""".replace("\n", "").split("|")


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    assistant: str


def render(turns: list[Turn], system: str | None = None) -> str:
    """Returns the chat as `CHAT_TEMPLATE` formats it, with special tokens as text."""
    messages = [("system", system)] if system else []
    for turn in turns:
        messages += [("user", turn.user), ("assistant", turn.assistant)]
    return "<s>" + "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def conversation(rng: random.Random, tell: list[Story], separator: str) -> str:
    """Returns a chat that asks for the stories `tell`, and may ask questions about them."""
    turns: list[Turn] = []
    if rng.random() < 0.12:
        turns.append(_small_talk(rng, rng.choice((_GREETING, _WHO, _HOW))))
    for number, story in enumerate(tell):
        turns.append(Turn(_request(rng, story, again=number > 0), story.text(separator)))
        facts = rng.sample(story.facts, min(len(story.facts), rng.choice((0, 1, 1, 2, 3))))
        turns += [Turn(*fact) for fact in facts]
    if rng.random() < 0.15:
        turns.append(_small_talk(rng, rng.choice((_THANKS, _THANKS, _BYE, _OTHER))))
    return render(turns, rng.choice(_SYSTEM) if rng.random() < 0.12 else None)


def chatter(rng: random.Random) -> str:
    """Returns a chat without a story, such as a greeting or a question that a storyteller cannot answer."""
    kinds = rng.choices((_GREETING, _WHO, _HOW, _OTHER, _BYE), (3, 3, 1, 8, 1), k=rng.choice((1, 1, 2)))
    return render([_small_talk(rng, kind) for kind in kinds])


def _small_talk(rng: random.Random, kind: tuple[tuple[str, ...], tuple[str, ...]]) -> Turn:
    return Turn(rng.choice(kind[0]).format(rng.choice(_TOPICS)), rng.choice(kind[1]))


def _request(rng: random.Random, story: Story, *, again: bool) -> str:
    if not story.leads:
        return "Another story, please." if again else rng.choice(_ASKING_ANY)
    return rng.choice(_AGAIN if again else _ASKING).format(topic(rng, story))


def topic(rng: random.Random, story: Story) -> str:
    """Returns the words with which a request names the story's leads, in the order in which the story introduces
    them.
    """
    leads = list(story.leads.values())
    if len(leads) == 1:
        return _one(rng, story, leads[0])
    if rng.random() < 0.12 and not any(lead.name for lead in leads):
        return f"{leads[0].form('the')} and {leads[1].form('the')}"
    joint = rng.choices(_JOINTS, _JOINT_SHARES)[0]
    return joint.format(*(_named(rng, lead) for lead in leads))


def _one(rng: random.Random, story: Story, hero: Character) -> str:
    """Returns words for the hero, alone or with a thing in the story."""
    persons = {who.form("a") for who in story.cast.values()}
    things = [words for words in story.about if words not in persons]
    asked = _named(rng, hero)
    return f"{asked} and {rng.choice(things)}" if things and rng.random() < 0.35 else asked


def _named(rng: random.Random, who: Character) -> str:
    """Returns words for a character. Its proper name, if it has one, may be missing unless `who.introduced` is set."""
    words = who.form("a_adj") if who.adjective and rng.random() < 0.12 else who.form("a")
    if who.name is None or (not who.introduced and rng.random() < 0.4):
        return words
    return f"{words} {rng.choice(('named', 'called'))} {who.name}"
