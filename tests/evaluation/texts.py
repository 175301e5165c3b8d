"""A reference of two documents, and a good and a bad translation."""

REFERENCE = [
    ["The cat sat on the mat today.", "It was a big grey cat."],
    ["A dog barked at the moon all night.", "Nobody slept at all.", "The moon did not mind."],
]
GOOD = [
    ["The cat sat on the mat yesterday.", "It was a big grey cat."],
    ["A dog barked at the moon all night.", "Nobody slept at all.", "the Moon did not mind it."],
]
BAD = [
    ["The cat on mat.", "It a big dog."],
    ["A dog at the night.", "Nobody.", "Moon the mind did not."],
]


def flat(texts: list[list[str]]) -> list[str]:
    """Sentences of all documents."""
    return [sentence for document in texts for sentence in document]
