"""Words that may not come, however tokens write them: " the" may be one token, two, or four of one character each."""

from collections.abc import Sequence as Seq

from nanovllm.text.tokenizer import Tokenizer

LONGEST_WORD = 200
"""Characters of a bad word. The time to find its spellings grows with the square."""


class BadWord:
    """Every spelling of a word, with a space before it and without, as paths from token to token through its places.

    Place 0 is before the space, and the last place is the end of the word.
    """

    def __init__(self, word: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        """ValueError if the word is too long, or cannot be tokenised."""
        if len(word) > LONGEST_WORD:
            raise ValueError(f"bad_words has a word of {len(word)} characters; it may have at most {LONGEST_WORD}")
        tokenizer.check(word)
        (token_ids,) = tokenizer.encode_batch([" " + word.lstrip()], add_special_tokens=False)
        text = tokenizer.join_tokens(token_ids)
        bare = text.lstrip("Ġ▁")  # signs of a space, of tokenizers for bytes and of SentencePiece
        text = text[: len(text) - len(bare)][-1:] + bare if bare else ""  # a tokenizer may drop every character
        self.length = len(text)
        self._starts = {0, len(text) - len(bare)}
        self._paths: dict[int, dict[int, int]] = {}
        """For each place, the tokens that may come there, and the places to which they lead."""
        reached = set(self._starts)
        for place in range(len(text)):
            if place in reached:
                ends = range(place + 1, len(text) + 1)
                found = ((tokenizer.find_token(text[place:end]), end) for end in ends)
                self._paths[place] = {i: end for i, end in found if i is not None and i < vocab_size}
                reached.update(self._paths[place].values())
        self._tokens = frozenset(token_id for path in self._paths.values() for token_id in path)
        self.single_tokens = self._find_last(self._starts)
        self.has_pairs = bool(self._find_last(reached - self._starts))

    def _find_last(self, places: set[int]) -> list[int]:
        """Return the tokens that lead from one of these places to the end of the word."""
        paths = (self._paths.get(place, {}) for place in places)
        return [token_id for path in paths for token_id, end in path.items() if end == self.length]

    def find_last_tokens(self, output: Seq[int]) -> list[int]:
        """Return the tokens that would end the word after an output, but for `single_tokens`."""
        first = len(output)
        while first > 0 and output[first - 1] in self._tokens:
            first -= 1
        places: set[int] = set()
        for token_id in output[first:]:
            before = places | self._starts
            places = {self._paths[place][token_id] for place in before if token_id in self._paths.get(place, {})}
        return self._find_last(places)
