"""Numbers, dates, clock times and prices in English and German words.

Every function takes a meaning as integers and returns its wording in both languages, an (English,
German) pair. Word order and word boundaries differ on purpose: "twenty-three" is
"dreiundzwanzig", "May 3" is "3. Mai", "half past seven" is "halb acht", "7:45 pm" is "19:45 Uhr".
"""

Pair = tuple[str, str]


def _words(text: str) -> list[str]:
    return text.split()


_ENGLISH_ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = _words("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
_ENGLISH_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_GERMAN_ONES = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_GERMAN_TENS = _words("_ _ zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_GERMAN_ORDINALS = {1: "erst", 3: "dritt", 7: "siebt", 8: "acht"}

WEEKDAYS: list[Pair] = [
    ("Monday", "Montag"),
    ("Tuesday", "Dienstag"),
    ("Wednesday", "Mittwoch"),
    ("Thursday", "Donnerstag"),
    ("Friday", "Freitag"),
    ("Saturday", "Samstag"),
    ("Sunday", "Sonntag"),
]
MONTHS: list[Pair] = [
    ("January", "Januar"),
    ("February", "Februar"),
    ("March", "März"),
    ("April", "April"),
    ("May", "Mai"),
    ("June", "Juni"),
    ("July", "Juli"),
    ("August", "August"),
    ("September", "September"),
    ("October", "Oktober"),
    ("November", "November"),
    ("December", "Dezember"),
]
# February has 28 days, so that every date exists in every year.
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def cardinal(number: int) -> Pair:
    """Wording of 0 to 999,999: 123 is "one hundred and twenty-three", "einhundertdreiund…"."""
    assert 0 <= number < 1_000_000, number
    return _english(number), _german(number)


def ordinal(number: int) -> Pair:
    """Wording of 1st to 999th without the German ending: 3 is "third", "dritt"."""
    assert 1 <= number < 1000, number
    return _english_ordinal(number), _german_ordinal(number)


def year(number: int) -> Pair:
    """Wording of the years 1100 to 2099: 1998 is "nineteen ninety-eight"."""
    assert 1100 <= number < 2100, number
    century, rest = divmod(number, 100)
    if century == 20:
        english = _english(number) if rest < 10 else f"twenty {_english(rest)}"
        return english, _german(number)
    if rest == 0:
        english = f"{_english(century)} hundred"
    elif rest < 10:
        english = f"{_english(century)} oh {_english(rest)}"
    else:
        english = f"{_english(century)} {_english(rest)}"
    return english, f"{_german_stem(century)}hundert{_german(rest) if rest else ''}"


def date_words(month: int, day: int) -> Pair:
    """Date after "on" / "am", in words: (5, 3) is "the third of May", "dritten Mai"."""
    english, german = MONTHS[month - 1]
    return f"the {_english_ordinal(day)} of {english}", f"{_german_ordinal(day)}en {german}"


def date_digits(month: int, day: int) -> Pair:
    """Date after "on" / "am", in digits: (5, 3) is "May 3", "3. Mai"."""
    english, german = MONTHS[month - 1]
    return f"{english} {day}", f"{day}. {german}"


def clock_words(minutes: int) -> Pair:
    """Spoken time of day, `minutes` past midnight in steps of five: 450 is "half past seven".

    Hours count to twelve. A German half hour names the next hour: "halb acht" is half past seven.
    """
    assert minutes % 5 == 0, minutes
    hour, minute = divmod(minutes, 60)
    this, following = ((hour + shift - 1) % 12 + 1 for shift in (0, 1))
    if minute == 0:
        return f"{_english(this)} o'clock", f"{_german_stem(this)} Uhr"
    past, to = _english(this), _english(following)
    nach, vor = _german(this), _german(following)
    if minute == 15:
        return f"quarter past {past}", f"Viertel nach {nach}"
    if minute == 30:
        return f"half past {past}", f"halb {vor}"
    if minute == 45:
        return f"quarter to {to}", f"Viertel vor {vor}"
    if minute < 30:
        # German names the five minutes before and after a half hour relative to it.
        german = f"fünf vor halb {vor}" if minute == 25 else f"{_german(minute)} nach {nach}"
        return f"{_english(minute)} past {past}", german
    german = f"fünf nach halb {vor}" if minute == 35 else f"{_german(60 - minute)} vor {vor}"
    return f"{_english(60 - minute)} to {to}", german


def day_part(minutes: int) -> Pair:
    """Part of the day a time of day lies in: 450 is "in the morning", "morgens"."""
    hour = minutes // 60 % 24
    if 5 <= hour < 12:
        return "in the morning", "morgens"
    if 12 <= hour < 18:
        return "in the afternoon", "nachmittags"
    if 18 <= hour < 22:
        return "in the evening", "abends"
    return "at night", "nachts"


def clock_digits(minutes: int) -> Pair:
    """Written time of day: 1185 is "7:45 pm", "19:45 Uhr"."""
    hour, minute = divmod(minutes, 60)
    half = "am" if hour < 12 else "pm"
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {half}", f"{hour}:{minute:02d} Uhr"


def price_words(euros: int, cents: int) -> Pair:
    """Price in words, without zero parts; a part is never one, because German inflects it."""
    assert euros != 1 and cents != 1 and (euros or cents), (euros, cents)
    parts = [(euros, "euros", "Euro"), (cents, "cents", "Cent")]
    english = " and ".join(f"{_english(n)} {unit}" for n, unit, _ in parts if n)
    german = " und ".join(f"{_german(n)} {unit}" for n, _, unit in parts if n)
    return english, german


def price_digits(euros: int, cents: int) -> Pair:
    """Price in digits: (1234, 50) is "€1,234.50", "1.234,50 €"."""
    grouped = f"{euros:,}"
    return f"€{grouped}.{cents:02d}", f"{grouped.replace(',', '.')},{cents:02d} €"


def _english(number: int) -> str:
    if number < 20:
        return _ENGLISH_ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _ENGLISH_TENS[tens] + (f"-{_ENGLISH_ONES[ones]}" if ones else "")
    size, unit = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, size)
    words = f"{_english(count)} {unit}"
    if not rest:
        return words
    return f"{words} {'and ' if rest < 100 else ''}{_english(rest)}"


def _english_ordinal(number: int) -> str:
    words = _english(number)
    cut = max(words.rfind(" "), words.rfind("-")) + 1
    head, last = words[:cut], words[cut:]
    if last in _ENGLISH_ORDINALS:
        return head + _ENGLISH_ORDINALS[last]
    return head + (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")


def _german(number: int) -> str:
    if number < 20:
        return _GERMAN_ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return (f"{_german_stem(ones)}und" if ones else "") + _GERMAN_TENS[tens]
    size, unit = (100, "hundert") if number < 1000 else (1000, "tausend")
    count, rest = divmod(number, size)
    return f"{_german_stem(count)}{unit}{_german(rest) if rest else ''}"


def _german_stem(number: int) -> str:
    # "eins" loses its s before another word: einundzwanzig, einhundert, ein Uhr.
    words = _german(number)
    return words[:-1] if words.endswith("eins") else words


def _german_ordinal(number: int) -> str:
    rest = number % 100
    if 0 < rest < 20:
        head = _german(number - rest) if number > rest else ""
        return head + _GERMAN_ORDINALS.get(rest, f"{_german(rest)}t")
    return f"{_german(number)}st"
