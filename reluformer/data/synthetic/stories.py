"""Documents of the generated sample, whose sentences depend on earlier ones.

The first sentence introduces a person by name and profession, later ones introduce things. They
then refer to "the doctor" and "it". German needs the gender of both, which only an earlier
sentence determines.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from reluformer.data.synthetic import phrases
from reluformer.data.synthetic.phrases import Pair
from reluformer.data.synthetic.sentences import (
    BUILDINGS,
    PEOPLE,
    PROFESSIONS,
    THINGS,
    VEHICLES,
    Noun,
    capitalised,
    clock,
    closing_comma,
    date,
    day,
    price,
    year,
)

_HE = {"m": "er", "f": "sie", "n": "es"}
_HIM = {"m": "ihn", "f": "sie", "n": "es"}


class Story(NamedTuple):
    """State of a document: the referents of later sentences."""

    person: Noun
    it: Noun | None = None
    """The noun that "it" refers to."""
    remarks: "tuple[Remark, ...]" = ()
    """Sentences about "it" that have not occurred yet."""


Remark = Callable[[Story, Random], Pair]


def opening(rng: Random) -> tuple[Pair, Story]:
    """First sentence, which determines the person and the gender of the profession."""
    gender, name = rng.choice(PEOPLE)
    english, man, woman = rng.choice(PROFESSIONS)
    person = Noun(english, woman if gender == "f" else man, gender)
    (on, am), (born, geboren) = date(rng), year(rng, 1900, 2020)
    pair = (
        f"{name} is a {english}, born on {on} in {born}.",
        f"{name} ist {person.german}, geboren im Jahr {geboren} am {am}.",
    )
    return pair, Story(person)


def continuation(story: Story, rng: Random) -> tuple[Pair, Story]:
    """Next sentence: a remark about "it", or a new thing that "it" then refers to."""
    if story.it is None or not story.remarks or rng.randrange(4) == 0:
        introduce = rng.choice([_buys, _travels, _visits])
        pair, it, remarks = introduce(story.person, rng)
        return pair, story._replace(it=it, remarks=remarks)
    remark = rng.choice(story.remarks)
    left = tuple(other for other in story.remarks if other is not remark)
    return remark(story, rng), story._replace(remarks=left)


Introduction = tuple[Pair, Noun, tuple[Remark, ...]]


def _buys(person: Noun, rng: Random) -> Introduction:
    thing, (on, am), (at, um) = rng.choice(THINGS), day(rng), clock(rng)
    (english, german), comma = thing.a(), closing_comma(am)
    pair = (
        f"On {on}, the {person.english} buys {english} at {at}.",
        f"Am {am}{comma} kauft {person.the()} um {um} {german}.",
    )
    return pair, thing, (_costs, _other, _made, _sold)


def _travels(person: Noun, rng: Random) -> Introduction:
    vehicle, (on, am) = rng.choice(VEHICLES), day(rng)
    pair = (
        f"On {on}, the {person.english} takes the {vehicle.english}.",
        f"Am {am}{closing_comma(am)} nimmt {person.the()} {vehicle.the(accusative=True)}.",
    )
    return pair, vehicle, (_leaves, _arrives, _seats, _made)


def _visits(person: Noun, rng: Random) -> Introduction:
    building, (at, um) = rng.choice(BUILDINGS), clock(rng)
    english, german = building.a()
    pair = (
        f"At {at}, the {person.english} visits {english}.",
        f"Um {um} besucht {person.the()} {german}.",
    )
    return pair, building, (_built, _steps, _opens)


def _pronoun(story: Story) -> str:
    assert story.it is not None
    return capitalised(_HE[story.it.gender])


def _costs(story: Story, rng: Random) -> Pair:
    english, german = price(rng)
    return f"It costs {english}.", f"{_pronoun(story)} kostet {german}."


def _other(story: Story, rng: Random) -> Pair:
    assert story.it is not None
    article, (english, german) = story.it.the().split()[0], price(rng)
    return f"The other one costs {english}.", f"{capitalised(article)} andere kostet {german}."


def _made(story: Story, rng: Random) -> Pair:
    (english, german), pronoun = year(rng, 1800, 2020), _pronoun(story)
    return f"It was made in {english}.", f"{pronoun} wurde im Jahr {german} hergestellt."


def _sold(story: Story, rng: Random) -> Pair:
    assert story.it is not None
    (on, am), (costs, kostet) = day(rng), price(rng)
    person, comma = story.person, closing_comma(am)
    return (
        f"On {on}, the {person.english} sells it for {costs}.",
        f"Am {am}{comma} verkauft {person.the()} {_HIM[story.it.gender]} für {kostet}.",
    )


def _leaves(story: Story, rng: Random) -> Pair:
    english, german = clock(rng)
    return f"It leaves at {english}.", f"{_pronoun(story)} fährt um {german} ab."


def _arrives(story: Story, rng: Random) -> Pair:
    english, german = clock(rng)
    return f"It arrives at {english}.", f"{_pronoun(story)} kommt um {german} an."


def _seats(story: Story, rng: Random) -> Pair:
    english, german = phrases.cardinal(rng.randrange(2, 800))
    return f"It has {english} seats.", f"{_pronoun(story)} hat {german} Plätze."


def _built(story: Story, rng: Random) -> Pair:
    english, german = year(rng)
    return f"It was built in {english}.", f"{_pronoun(story)} wurde im Jahr {german} gebaut."


def _steps(story: Story, rng: Random) -> Pair:
    english, german = phrases.cardinal(rng.randrange(2, 800))
    return f"It has {english} steps.", f"{_pronoun(story)} hat {german} Stufen."


def _opens(story: Story, rng: Random) -> Pair:
    english, german = clock(rng)
    return f"It opens at {english}.", f"{_pronoun(story)} öffnet um {german}."
