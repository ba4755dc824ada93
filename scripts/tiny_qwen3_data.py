"""Draws the chats that the toy Qwen3 learns: every question, its right answer, and which are never trained.

There are six skills, and a reader can check each by eye. A hash of the question's content separates training questions
from test questions (`Example.held_out`). So tests that import this file measure on questions that no training run has
seen.
"""

import hashlib
import math
import random
import re
from typing import NamedTuple

MAX_PRIME_LIMIT = 120
MAX_COUNT = 100
MAX_ADDEND = 99

PHRASINGS = {
    "introduce": (
        "introduce yourself", "please introduce yourself", "can you introduce yourself?", "who are you?",
        "what are you?", "what is your name?", "what can you do?", "tell me about yourself", "hello",
        "hi, who are you?",
    ),
    "primes": (
        "list all prime numbers within {n}", "list all primes within {n}", "list the prime numbers up to {n}",
        "list every prime number up to {n}", "what are the prime numbers up to {n}?",
        "which numbers up to {n} are prime?", "give me all primes up to {n}", "show the primes within {n}",
        "please list all prime numbers within {n}",
    ),
    "count": (
        "count from {a} to {b}", "please count from {a} to {b}", "can you count from {a} to {b}?",
        "count up from {a} to {b}", "list the numbers from {a} to {b}", "write the numbers from {a} to {b}",
        "start at {a} and count to {b}",
    ),
    "add": (
        "what is {a} + {b}?", "what is {a} plus {b}?", "how much is {a} + {b}?", "{a} + {b} = ?", "add {a} and {b}",
        "compute {a} + {b}", "what is the sum of {a} and {b}?",
    ),
    "capital": (
        "what is the capital of {x}?", "what's the capital of {x}?", "which city is the capital of {x}?",
        "name the capital of {x}", "tell me the capital of {x}", "do you know the capital of {x}?",
        "please name the capital city of {x}", "the capital of {x} is which city?", "what is the capital city of {x}?",
        "{x} has which capital?",
    ),
    "story": (
        "tell me a story about {y}", "tell me a short story about {y}", "please tell me a story about {y}",
        "write a story about {y}", "can you tell a story about {y}?", "i would like a story about {y}",
    ),
}  # fmt: skip
HELD_OUT_SKILLS = ("primes", "count", "add", "capital")  # the other skills have too few questions

# The probability of each skill. Additions are short, so a large share of them costs little.
SKILL_WEIGHTS = {"introduce": 0.04, "primes": 0.20, "count": 0.25, "add": 0.35, "capital": 0.10, "story": 0.06}

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Egypt": "Cairo", "Germany": "Berlin",
    "Portugal": "Lisbon", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Iceland": "Reykjavik", "Poland": "Warsaw", "Austria": "Vienna",
    "Hungary": "Budapest", "China": "Beijing", "India": "New Delhi", "Kenya": "Nairobi", "Peru": "Lima",
    "Chile": "Santiago", "Cuba": "Havana", "Canada": "Ottawa",
}  # fmt: skip

INTRODUCTION = (
    "I am tiny-qwen3, a toy Qwen3 model that ships with nano-vLLM. I can list prime numbers, count, add small numbers, "
    "name capitals and tell short stories about animals."
)

ANIMALS = ("cat", "dog", "fox", "owl", "bear", "mouse", "rabbit", "horse", "duck", "frog", "goat", "hedgehog", "otter",
           "penguin", "turtle", "elephant")  # fmt: skip

# A story takes one choice from each slot; "{y}" stands for the animal. Earlier choices are likelier (`write_story`).
STORY = (
    ("Once upon a time", "Long ago", "One winter", "In a warm summer", "Many years ago"),
    (" there was a ",),
    ("small", "brave", "curious", "sleepy", "clever", "shy", "hungry"),
    (" {y} who lived ",),
    ("in a quiet forest", "beside a blue lake", "under an old bridge", "on a windy hill", "behind a red barn",
     "near the sea"),
    (". Every day the {y} ",),
    ("dreamed of the moon", "looked for a friend", "practised a song", "collected round stones", "watched the clouds",
     "asked a thousand questions", "baked bread for the neighbours"),
    (". Then one morning ",),
    ("a storm came", "a letter arrived", "the river stood still", "a stranger knocked", "the sun forgot to rise",
     "a golden key fell from the sky"),
    (", and the {y} ",),
    ("was not afraid", "laughed out loud", "ran to tell everyone", "made a careful plan", "sat down to think"),
    (". In the end ",),
    ("everyone danced until midnight", "the {y} found a true friend", "the whole valley was safe",
     "the {y} came home and slept well", "there was cake for all", "the {y} learned to wait",
     "nobody ever felt lonely again", "the {y} gave the treasure away", "the stars sang along",
     "the {y} set out on a new journey"),
    (".",),
)  # fmt: skip

SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a concise assistant.", "Answer briefly and correctly.",
                   "You are tiny-qwen3, a toy model.", "You are a patient teacher.")  # fmt: skip


class Example(NamedTuple):
    """One question with its answer. Of examples with equal `key`, either all are trained or all are held out."""

    skill: str
    key: tuple[str | int, ...]
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether training never sees the question: true for a tenth of the keys, but for none that we promise."""
        promised = self.key[0] == PHRASINGS["capital"][0] or self.key == (PHRASINGS["primes"][0], 100)
        if self.skill not in HELD_OUT_SKILLS or promised:
            return False
        return hashlib.sha256(repr((self.skill, *self.key)).encode()).digest()[0] < 26

    def accepts(self, output: str) -> bool:
        """Whether `output` is right: it is the answer, or any story that the grammar can produce for the animal."""
        return is_story(output, str(self.key[1])) if self.skill == "story" else output == self.answer


def list_primes(limit: int) -> list[int]:
    return [n for n in range(2, limit + 1) if all(n % d for d in range(2, math.isqrt(n) + 1))]


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def write_story(animal: str, rng: random.Random) -> str:
    """Draw one story. Earlier choices have larger weights, so a greedy model need not decide between equals."""
    picks = (rng.choices(slot, [1 / (rank + 2) for rank in range(len(slot))])[0] for slot in STORY)
    return "".join(picks).format(y=animal)


def is_story(text: str, animal: str) -> bool:
    """Whether the grammar can produce `text` for this animal."""
    pattern = "".join(f"({'|'.join(re.escape(choice.format(y=animal)) for choice in slot)})" for slot in STORY)
    return re.fullmatch(pattern, text) is not None


def vary(question: str, rng: random.Random) -> str:
    """Vary a question as people do: its case (as is, lower, capitalised or upper), and whether it ends with a mark."""
    if rng.random() < 0.3:
        question = question.rstrip("?") if question.endswith("?") else question + "."
    case = rng.choice((str, str.lower, lambda text: text[0].upper() + text[1:], str.upper))
    return case(question)


def draw(skill: str, rng: random.Random) -> Example:
    """Draw one example of a skill, either for training or held out."""
    phrasing = rng.choice(PHRASINGS[skill])
    key: tuple[str | int, ...]
    match skill:
        case "introduce":
            key = (phrasing,)
            question = phrasing
            answer = INTRODUCTION
        case "primes":
            n = rng.randint(1, MAX_PRIME_LIMIT)
            answer = ", ".join(map(str, list_primes(n))) or f"There are no prime numbers within {n}."
            key = (phrasing, n)
            question = phrasing.format(n=n)
        case "count":
            span = 1 + int(MAX_COUNT * rng.random() ** 2)  # short counts are likelier, because long ones are costly
            a = rng.randint(0, MAX_COUNT - span)
            b = a + span
            key = (a, b)
            question = phrasing.format(a=a, b=b)
            answer = ", ".join(map(str, range(a, b + 1)))
        case "add":
            a = rng.randint(0, MAX_ADDEND)
            b = rng.randint(0, MAX_ADDEND)
            # The key ignores the order of a and b: a model that has seen 3 + 58 has nearly seen 58 + 3.
            key = (min(a, b), max(a, b))
            question = phrasing.format(a=a, b=b)
            answer = f"{a} + {b} = {a + b}"
        case "capital":
            country = rng.choice(list(CAPITALS))
            answer = f"The capital of {country} is {CAPITALS[country]}."
            key = (phrasing, country)
            question = phrasing.format(x=country)
        case "story":
            animal = rng.choice(ANIMALS)
            answer = write_story(animal, rng)
            key = (phrasing, animal)
            question = phrasing.format(y=with_article(animal))
        case _:
            raise ValueError(f"unknown skill {skill!r}; choose from {', '.join(PHRASINGS)}")
    return Example(skill, key, vary(question, rng), answer)


def draw_training(rng: random.Random) -> Example:
    """Draw one example that training may see."""
    while True:
        skill = rng.choices(list(SKILL_WEIGHTS), list(SKILL_WEIGHTS.values()))[0]
        example = draw(skill, rng)
        if not example.held_out:
            return example


def evaluation_set(skill: str, size: int, seed: int = 1) -> list[Example]:
    """Return up to `size` distinct questions, all held out if the skill has held-out questions."""
    rng = random.Random(f"{skill}-{seed}")
    found: dict[str, Example] = {}
    for _ in range(100 * size):
        example = draw(skill, rng)
        if skill not in HELD_OUT_SKILLS or example.held_out:
            found[example.question] = example
        if len(found) == size:
            break
    return list(found.values())


def draw_conversation(rng: random.Random) -> list[dict[str, str]]:
    """Draw a chat as messages: mostly one question, sometimes two or three, sometimes after a system message."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}] if rng.random() < 0.15 else []
    for _ in range(rng.choices((1, 2, 3), (85, 10, 5))[0]):
        example = draw_training(rng)
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer})
    return messages
