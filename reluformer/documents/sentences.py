"""Sentences of running text."""

import re

import sentencex

_SPACE = re.compile(r"\s")
# Numbers of list items and of sections, which the splitter cuts off.
_NUMBER = re.compile(r"\(?(?:\d{1,4}|[a-zA-Z]|[ivxIVX]{1,5})[.)]\s*")


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Split running text; the sentences, each with the white space after it, concatenate to it.

    Args:
        text: Running text.
        language: ISO 639 code; an unknown language is split by general rules.
    """
    # Version 1.0.32 of the library panics after white space of several bytes. Every white space
    # character has a replacement of the same length, so that lengths are preserved.
    parts = sentencex.segment(language, _SPACE.sub(" ", text))
    sentences: list[str] = []
    start, held = 0, 0
    for part in parts:
        end = start + held + len(part)
        if _NUMBER.fullmatch(part) and end < len(text):
            held += len(part)
            continue
        sentences.append(text[start:end])
        start, held = end, 0
    if start < len(text):
        sentences.append(text[start:])
    return sentences
