"""Single sentences of the generated sample, with their nouns, names and genders.

A pattern draws its contents from a random generator and returns one (English, German) pair, which
can be translated without context. German verbs change their place: "leaves at nine" is "fährt um
neun ab", and in a subordinate clause "um neun abfährt".
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from reluformer.data.synthetic import phrases
from reluformer.data.synthetic.phrases import Pair

# German articles by gender; the constants are named after the masculine forms.
_DER = {"m": "der", "f": "die", "n": "das"}
_DEN = {"m": "den", "f": "die", "n": "das"}
_EINEN = {"m": "einen", "f": "eine", "n": "ein"}


class Noun(NamedTuple):
    """A noun in English and German, with its German gender (m, f or n) and German plural."""

    english: str
    german: str
    gender: str
    plural: str = ""

    def the(self, *, accusative: bool = False) -> str:
        """German noun with the definite article, in the nominative or accusative."""
        return f"{_DEN[self.gender] if accusative else _DER[self.gender]} {self.german}"

    def a(self) -> Pair:
        """Noun with the indefinite article in both languages, the German in the accusative."""
        english = "an" if self.english[0] in "aeiou" else "a"
        return f"{english} {self.english}", f"{_EINEN[self.gender]} {self.german}"


def _nouns(text: str) -> list[Noun]:
    return [Noun(*entry.split()) for entry in text.split(",")]


THINGS = _nouns(
    "hat Hut m Hüte, umbrella Schirm m Schirme, bag Tasche f Taschen, book Buch n Bücher, "
    "lamp Lampe f Lampen, chair Stuhl m Stühle, table Tisch m Tische, clock Uhr f Uhren, "
    "cup Tasse f Tassen, key Schlüssel m Schlüssel, picture Bild n Bilder, letter Brief m Briefe, "
    "shirt Hemd n Hemden, coat Mantel m Mäntel, bottle Flasche f Flaschen, knife Messer n Messer, "
    "glass Glas n Gläser, spoon Löffel m Löffel, fork Gabel f Gabeln, bicycle Fahrrad n Fahrräder, "
    "bed Bett n Betten, carpet Teppich m Teppiche, vase Vase f Vasen, basket Korb m Körbe, "
    "mirror Spiegel m Spiegel, chain Kette f Ketten, boat Boot n Boote"
)
VEHICLES = _nouns("train Zug m, ferry Fähre f, ship Schiff n, bus Bus m, tram Straßenbahn f")
EVENTS = _nouns(
    "meeting Sitzung f, concert Konzert n, course Kurs m, film Film m, lecture Vortrag m, "
    "party Feier f, match Spiel n, exhibition Ausstellung f"
)
BUILDINGS = _nouns(
    "bridge Brücke f, tower Turm m, house Haus n, church Kirche f, castle Schloss n, "
    "station Bahnhof m, school Schule f, palace Palast m, theatre Theater n"
)
# (gender, name).
PEOPLE = [
    *[("f", name) for name in ("Anna", "Maria", "Lena", "Clara", "Ida", "Greta", "Nora")],
    *[("m", name) for name in ("Paul", "Peter", "Jonas", "Felix", "Emil", "Oskar", "Anton")],
]
# (English, German for a man, German for a woman).
PROFESSIONS = [
    ("doctor", "Arzt", "Ärztin"),
    ("teacher", "Lehrer", "Lehrerin"),
    ("neighbour", "Nachbar", "Nachbarin"),
    ("student", "Student", "Studentin"),
    ("baker", "Bäcker", "Bäckerin"),
    ("painter", "Maler", "Malerin"),
    ("cook", "Koch", "Köchin"),
    ("gardener", "Gärtner", "Gärtnerin"),
    ("singer", "Sänger", "Sängerin"),
    ("pilot", "Pilot", "Pilotin"),
]


def clock(rng: Random) -> Pair:
    """A time of day after "at" / "um", spoken or written."""
    minutes = 5 * rng.randrange(288)
    form = rng.randrange(3)
    if form == 0:
        return phrases.clock_digits(minutes + rng.randrange(5))
    (english, german), (part, teil) = phrases.clock_words(minutes), phrases.day_part(minutes)
    return (english, german) if form == 1 else (f"{english} {part}", f"{german} {teil}")


def day(rng: Random) -> Pair:
    """A day after "on" / "am": a weekday, a date, or both."""
    weekday, tag = rng.choice(phrases.WEEKDAYS)
    form = rng.randrange(4)
    if form == 0:
        return weekday, tag
    if form == 1:
        english, german = phrases.date_digits(*_month_and_day(rng))
        return f"{weekday}, {english}", f"{tag}, dem {german}"
    return date(rng)


def date(rng: Random) -> Pair:
    """A date after "on" / "am", in words or digits."""
    form = phrases.date_words if rng.randrange(2) else phrases.date_digits
    return form(*_month_and_day(rng))


def _month_and_day(rng: Random) -> tuple[int, int]:
    month = rng.randrange(12)
    return month + 1, rng.randrange(phrases.MONTH_DAYS[month]) + 1


def price(rng: Random) -> Pair:
    """A price in words or digits."""
    if rng.randrange(2):
        return phrases.price_digits(rng.randrange(5000), rng.randrange(1, 100))
    return phrases.price_words(rng.randrange(2, 200), rng.choice([0, *range(5, 100, 5)]))


def year(rng: Random, first: int = 1100, last: int = 2099) -> Pair:
    """A year from `first` to `last` in words or digits."""
    number = rng.randint(first, last)
    return phrases.year(number) if rng.randrange(2) else (str(number), str(number))


def capitalised(text: str) -> str:
    """`text` with its first letter in upper case."""
    return text[0].upper() + text[1:]


def closing_comma(day: str) -> str:
    """The comma that ends a date in apposition: "am Montag, dem 3. Mai, beginnt"."""
    return "," if ", " in day else ""


def _phrase(rng: Random) -> Pair:
    form = rng.randrange(5)
    if form == 0:
        return phrases.cardinal(rng.randrange(10 ** rng.randrange(1, 7)))
    if form == 1:
        # "zweitausendzwölf" alone could be a number or a year.
        english, german = year(rng)
        return f"the year {english}", f"das Jahr {german}"
    if form == 2:
        at, um = clock(rng)
        return f"at {at}", f"um {um}"
    if form == 3:
        on, am = day(rng)
        return f"on {on}", f"am {am}"
    return price(rng)


def _comparison(rng: Random) -> Pair:
    numbers = rng.sample(range(10 ** rng.randrange(1, 6)), 2)
    (big, gross), (small, klein) = (phrases.cardinal(n) for n in sorted(numbers, reverse=True))
    return (
        f"{capitalised(big)} is more than {small}.",
        f"{capitalised(gross)} ist mehr als {klein}.",
    )


def _departure(rng: Random) -> Pair:
    vehicle, (on, am), (at, um) = rng.choice(VEHICLES), day(rng), clock(rng)
    german = f"{capitalised(vehicle.the())} fährt am {am}{closing_comma(am)} um {um} ab."
    return f"The {vehicle.english} leaves on {on}{closing_comma(on)} at {at}.", german


def _event(rng: Random) -> Pair:
    event, (on, am), (at, um) = rng.choice(EVENTS), day(rng), clock(rng)
    german = f"Am {am}{closing_comma(am)} beginnt {event.the()} um {um}."
    return f"On {on}, the {event.english} begins at {at}.", german


def _report(rng: Random) -> Pair:
    (_, name), vehicle, (at, um) = rng.choice(PEOPLE), rng.choice(VEHICLES), clock(rng)
    german = f"{name} sagt, dass {vehicle.the()} um {um} ankommt."
    return f"{name} says that the {vehicle.english} arrives at {at}.", german


def _reason(rng: Random) -> Pair:
    (_, name), vehicle = rng.choice(PEOPLE), rng.choice(VEHICLES)
    (first, zuerst), (second, danach) = clock(rng), clock(rng)
    return (
        f"Because the {vehicle.english} leaves at {first}, {name} gets up at {second}.",
        f"Weil {vehicle.the()} um {zuerst} abfährt, steht {name} um {danach} auf.",
    )


def _built(rng: Random) -> Pair:
    building, (when, wann) = rng.choice(BUILDINGS), year(rng)
    german = f"{capitalised(building.the())} wurde im Jahr {wann} gebaut."
    return f"The {building.english} was built in {when}.", german


def _ranked(rng: Random) -> Pair:
    thing, (english, german), (costs, kostet) = rng.choice(THINGS), _rank(rng), price(rng)
    article = thing.the().split()[0]
    return (
        f"The {english} {thing.english} costs {costs}.",
        f"{capitalised(article)} {german}e {thing.german} kostet {kostet}.",
    )


def _rank(rng: Random) -> Pair:
    return phrases.ordinal(rng.randrange(1, 200))


def _shopping(rng: Random) -> Pair:
    (_, name), things = rng.choice(PEOPLE), rng.sample(THINGS, rng.randrange(1, 5))
    items = [
        (f"{count} {_english_plural(thing.english)}", f"{zahl} {thing.plural}")
        for thing in things
        for count, zahl in [phrases.cardinal(rng.randrange(2, 100))]
    ]
    english, german = ([item[side] for item in items] for side in (0, 1))
    return (
        f"{name} has bought {_enumerate(english, 'and')}.",
        f"{name} hat {_enumerate(german, 'und')} gekauft.",
    )


def _english_plural(noun: str) -> str:
    if noun == "knife":
        return "knives"
    return noun + ("es" if noun.endswith("s") else "s")


def _enumerate(items: list[str], conjunction: str) -> str:
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {conjunction} {items[-1]}"


Pattern = Callable[[Random], Pair]
STANDALONE: list[Pattern] = [
    _phrase,
    _comparison,
    _departure,
    _event,
    _report,
    _reason,
    _built,
    _ranked,
    _shopping,
]
