"""The story grammar and the training rows from it: well-formed text, agreement, determinism, variety."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from tools.storyteller import chat, data, pairs
from tools.storyteller.grammar import KINDS, Character, Story, with_article
from tools.storyteller.model import Llama, Shape
from tools.storyteller.optim import Optimizer, orthogonalise
from tools.storyteller.plots import PAIRS, PLOTS, castings


def tell(plot: str, seed: int) -> Story:
    story = Story(random.Random(seed), plot)
    PLOTS[plot][0](story)
    return story


@pytest.mark.parametrize("plot", PLOTS)
def test_text_is_well_formed(plot: str) -> None:
    for seed in range(40):
        story = tell(plot, seed)
        text = story.text(" ")
        assert not re.search(r"[\[\]{}|^@]|  | [,.]", text), text
        assert text.count('"') % 2 == 0, text
        assert all(sentence[0].isupper() or sentence[0] == '"' for part in story.paragraphs for sentence in part), text
        assert 60 < len(text.split()) < 300
        assert story.about and all(q.endswith("?") and a[-1] in '."' for q, a in story.facts)


@pytest.mark.parametrize("plot", PLOTS)
def test_nobody_is_named_before_being_introduced(plot: str) -> None:
    for seed in range(40):
        story = tell(plot, seed)
        text = story.text(" ")
        for who in story.cast.values():
            # the "Will" in "Will you ..." is not a name
            if named := re.search(rf"\b{who.name}\b(?! (you|nobody|it))", text):
                first = text[: named.start()]
                introduced = re.search(rf"{re.escape(who.noun)} (named|called) $", first)
                assert introduced or text.startswith(f"{who.name} was"), (who.name, text)


def test_the_two_asked_for_come_first_in_order_and_carry_the_story() -> None:
    plots = set()
    for seed in range(300):
        story = data.make_story(random.Random(seed), num_leads=2)
        first, second = story.leads.values()
        begun, text = story.paragraphs[0][0], story.text(" ")
        assert 0 <= begun.lower().find(first.noun) < begun.rfind(second.noun), text
        for lead in (first, second):
            assert len(re.findall(rf"\b({lead.noun}|{lead.name})\b", text, re.IGNORECASE)) >= pairs.LEAST + 1, text
        plots.add(story.plot)
    assert plots == set(PAIRS)


def test_a_request_names_who_the_story_is_about_in_that_order() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        for num_leads in (1, 2):
            story = data.make_story(rng, num_leads)
            topic = chat.topic(rng, story)
            places = [topic.find(lead.noun) for lead in story.leads.values()]
            assert -1 not in places and places == sorted(places), topic


@pytest.mark.parametrize(
    "pair, plot",
    [(("mouse", "lion"), "small_saves_big"), (("fox", "king"), "contest"), (("boy", "giant"), "dragon")],
)
def test_plots_suit_the_two(pair: tuple[str, str], plot: str) -> None:
    def castings_of(*nouns: str) -> list[str]:
        kinds = {kind.noun: kind for kinds in KINDS.values() for kind in kinds}
        leads = [Character(random.Random(0), kinds[noun], "he", "old") for noun in nouns]
        return [name for name, _, _ in castings(leads)]

    assert plot in castings_of(*pair) and plot not in castings_of(*reversed(pair))
    assert plot not in castings_of("hen", "duck")


def test_verdict_on_a_story_of_two() -> None:
    both = "A fox met a crow. The fox bowed. The crow's eyes shone."
    assert pairs.tells_of(both, ("fox", "crow"))
    assert not pairs.tells_of(both.replace("The crow's", "Her"), ("fox", "crow"))
    assert not pairs.tells_of(both.replace("fox", "foxglove"), ("fox", "crow"))


def test_same_seed_same_story_and_no_two_alike() -> None:
    texts = [data.make_story(random.Random(seed)).text(" ") for seed in range(400)]
    assert texts[7] == data.make_story(random.Random(7)).text(" ")
    assert len(set(texts)) == len(texts)


def test_capitals_and_articles() -> None:
    story = Story(random.Random(0), "none")
    told = story.expand('the fox ran. "no!" he said, "but wait." ^then he slept')
    assert told == 'The fox ran. "No!" he said, "but wait." Then he slept'
    assert [with_article(word) for word in ("owl", "fox", "unicorn")] == ["an owl", "a fox", "a unicorn"]


def test_chat_is_written_as_the_template_does() -> None:
    import jinja2

    turns = [chat.Turn("Hello", "Hi!"), chat.Turn("A story?", "No.")]
    messages = [{"role": r, "content": c} for t in turns for r, c in (("user", t.user), ("assistant", t.assistant))]
    template = jinja2.Environment(autoescape=False).from_string(chat.CHAT_TEMPLATE)
    rendered = template.render(bos_token="<s>", messages=messages)
    assert chat.render(turns) == rendered


def test_rows_begin_with_documents_and_a_cut_one_comes_again() -> None:
    docs = [np.full(200, i, np.int32) for i in range(50)]
    batches = data.Batches(docs, 1024, 0, 300, data.CURRICULUM)
    heads = [batches.next()[:, 0] for _ in range(6)]
    assert heads[0][0] == 0
    flat = np.concatenate(heads)
    assert (np.diff(flat) >= 1).all()
    again = data.Batches(docs, 1024, 0, 300, data.CURRICULUM)
    assert all((again.next()[:, 0] == head).all() for head in heads)


def test_drills_repeat_one_sequence() -> None:
    row = data.drill_row(np.random.default_rng(0), 256, 300)
    assert row[0] == data.BOS_ID and row.shape == (257,) and row[1:].min() >= len(data.SPECIAL_TOKENS)
    periods = [p for p in range(4, 65) if (row[1 + p :] == row[1:-p]).all()]
    assert periods


def test_orthogonalise_brings_singular_values_near_one() -> None:
    stack = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(stack).float())
    assert float(values.min()) > 0.4 and float(values.max()) < 1.4


def test_a_tiny_model_learns_and_its_optimizer_resumes() -> None:
    shape = Shape(vocab_size=32, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, max_len=32)
    torch.manual_seed(0)
    model = Llama(shape)
    optimizer = Optimizer(model, lr=1e-2, weight_decay=0.0)
    rows = torch.arange(33).remainder(7).repeat(4, 1)

    def step(model: Llama, optimizer: Optimizer) -> float:
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step(1.0)
        return float(loss.detach())

    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
    twin = Llama(shape)
    twin.load_state_dict(model.state_dict())
    other = Optimizer(twin, lr=1e-2, weight_decay=0.0)
    other.resume({name: value.clone() for name, value in optimizer.state.items()}, 20)
    for _ in range(3):
        assert step(model, optimizer) == step(twin, other)
