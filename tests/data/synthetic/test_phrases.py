"""Wordings against hand-written examples and against an independent reader of number words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.data.synthetic import phrases


def numbered(words: str, start: int = 0, step: int = 1) -> dict[str, int]:
    return {word: start + step * index for index, word in enumerate(words.split())}


GERMAN = numbered(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
) | {"ein": 1}
GERMAN_TENS = numbered("zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig", 20, 10)
ENGLISH = numbered(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
) | numbered("twenty thirty forty fifty sixty seventy eighty ninety", 20, 10)


def read_german(word: str) -> int:
    for unit, size in (("tausend", 1000), ("hundert", 100)):
        if unit in word:
            count, rest = word.split(unit, 1)
            return read_german(count) * size + (read_german(rest) if rest else 0)
    if word in GERMAN:
        return GERMAN[word]
    ones, _, tens = word.rpartition("und")
    return GERMAN_TENS[tens] + (GERMAN[ones] if ones else 0)


def read_english(words: str) -> int:
    total = current = 0
    for word in words.replace("-", " ").split():
        if word == "thousand":
            total, current = total + 1000 * current, 0
        elif word == "hundred":
            current *= 100
        elif word != "and":
            current += ENGLISH[word]
    return total + current


@given(st.integers(0, 999_999))
def test_number_words_read_back(number: int) -> None:
    english, german = phrases.cardinal(number)
    assert (read_english(english), read_german(german)) == (number, number)


@given(st.integers(1100, 1999))
def test_year_words_read_back(number: int) -> None:
    english, german = phrases.year(number)
    century, _, rest = english.partition(" ")
    rest = rest.removeprefix("oh ").removeprefix("hundred")
    assert 100 * read_english(century) + read_english(rest) == number
    assert read_german(german) == number


@pytest.mark.parametrize(
    ("wording", "english", "german"),
    [
        (phrases.cardinal(101), "one hundred and one", "einhunderteins"),
        (phrases.cardinal(21_000), "twenty-one thousand", "einundzwanzigtausend"),
        (phrases.cardinal(2_016), "two thousand and sixteen", "zweitausendsechzehn"),
        (phrases.cardinal(1_300), "one thousand three hundred", "eintausenddreihundert"),
        (phrases.ordinal(1), "first", "erst"),
        (phrases.ordinal(12), "twelfth", "zwölft"),
        (phrases.ordinal(20), "twentieth", "zwanzigst"),
        (phrases.ordinal(37), "thirty-seventh", "siebenunddreißigst"),
        (phrases.ordinal(103), "one hundred and third", "einhundertdritt"),
        (phrases.ordinal(200), "two hundredth", "zweihundertst"),
        (phrases.year(1998), "nineteen ninety-eight", "neunzehnhundertachtundneunzig"),
        (phrases.year(1905), "nineteen oh five", "neunzehnhundertfünf"),
        (phrases.year(1900), "nineteen hundred", "neunzehnhundert"),
        (phrases.year(2007), "two thousand and seven", "zweitausendsieben"),
        (phrases.year(2023), "twenty twenty-three", "zweitausenddreiundzwanzig"),
        (phrases.date_words(5, 3), "the third of May", "dritten Mai"),
        (phrases.date_digits(5, 3), "May 3", "3. Mai"),
        (phrases.clock_words(60), "one o'clock", "ein Uhr"),
        (phrases.clock_words(7 * 60 + 30), "half past seven", "halb acht"),
        (phrases.clock_words(12 * 60 + 30), "half past twelve", "halb eins"),
        (phrases.clock_words(7 * 60 + 25), "twenty-five past seven", "fünf vor halb acht"),
        (phrases.clock_words(7 * 60 + 35), "twenty-five to eight", "fünf nach halb acht"),
        (phrases.clock_words(23 * 60 + 45), "quarter to twelve", "Viertel vor zwölf"),
        (phrases.clock_words(23 * 60 + 50), "ten to twelve", "zehn vor zwölf"),
        (phrases.clock_digits(19 * 60 + 45), "7:45 pm", "19:45 Uhr"),
        (phrases.clock_digits(5), "12:05 am", "0:05 Uhr"),
        (phrases.clock_digits(12 * 60), "12:00 pm", "12:00 Uhr"),
        (phrases.price_words(3, 20), "three euros and twenty cents", "drei Euro und zwanzig Cent"),
        (phrases.price_words(0, 50), "fifty cents", "fünfzig Cent"),
        (phrases.price_digits(1234, 5), "€1,234.05", "1.234,05 €"),
    ],
)
def test_examples(wording: phrases.Pair, english: str, german: str) -> None:
    assert wording == (english, german)


def test_clock_words_differ_within_half_a_day() -> None:
    for side in (0, 1):
        assert len({phrases.clock_words(minutes)[side] for minutes in range(0, 720, 5)}) == 144
