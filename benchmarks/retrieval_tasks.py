"""Long-context retrieval tasks in token ids, to train the retrieval models and to measure accuracy.

A needle is `NEEDLE name name value value value`; `ASK name name` asks for its value, and the model answers with the
three value tokens. Names, values and filler use separate ranges of ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BOS, NEEDLE, ASK, FOLLOWS = 0, 1, 2, 3
NAMES = range(16, 80)  # two tokens: 4096 names
VALUES = range(80, 144)  # three tokens
FILLER = range(144, 256)
VOCAB_SIZE = 256
NAME_TOKENS, VALUE_TOKENS = 2, 3
NEEDLE_TOKENS, QUESTION_TOKENS = 1 + NAME_TOKENS + VALUE_TOKENS, 1 + NAME_TOKENS
PASSKEY_NAME = (NAMES[0], NAMES[0])
NUM_NEEDLES = 4  # of the multi-needle task
NUM_DISTRACTORS = 12  # fewer if the context is short


@dataclass(frozen=True)
class Example:
    """A prompt and its correct greedy continuation."""

    prompt: list[int]
    answer: list[int]


def draw_names(rng: np.random.Generator, num: int) -> np.ndarray:
    """Distinct names: [num, 2]."""
    flat = rng.choice(len(NAMES) ** NAME_TOKENS, num, replace=False)
    return NAMES[0] + np.stack((flat // len(NAMES), flat % len(NAMES)), 1)


def draw_values(rng: np.random.Generator, num: int) -> np.ndarray:
    """Values: [num, 3]."""
    return rng.integers(VALUES[0], VALUES[-1] + 1, (num, VALUE_TOKENS))


def scatter_needles(rng: np.random.Generator, needles: np.ndarray, num_tokens: int) -> np.ndarray:
    """Filler with whole needles at random places, in random order: [num_tokens].

    Args:
        rng: random numbers.
        needles: [num_needles, needle tokens].
        num_tokens: total number of tokens, at least those of the needles.
    """
    num_needles, width = needles.shape
    num_filler = num_tokens - needles.size
    gaps = np.sort(rng.integers(0, num_filler + 1, num_needles))  # filler before each needle
    context = rng.integers(FILLER[0], FILLER[-1] + 1, num_tokens)
    for order, (index, gap) in enumerate(zip(rng.permutation(num_needles), gaps, strict=True)):
        start = gap + order * width
        context[start : start + width] = needles[index]
    return context


def make_needles(names: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Needles: [num, needle tokens]."""
    return np.concatenate((np.full((len(names), 1), NEEDLE), names, values), 1)


def passkey(rng: np.random.Generator, context: int) -> Example:
    """One needle with a fixed name in filler."""
    value = draw_values(rng, 1)
    needles = make_needles(np.array([PASSKEY_NAME]), value)
    body = scatter_needles(rng, needles, context - 1 - QUESTION_TOKENS)
    return Example([BOS, *body.tolist(), ASK, *PASSKEY_NAME], value[0].tolist())


def kv_recall(rng: np.random.Generator, context: int) -> Example:
    """A context of needles only; one of them is asked for."""
    num_tokens = context - 1 - QUESTION_TOKENS
    num_pairs = min(num_tokens // NEEDLE_TOKENS, len(NAMES) ** NAME_TOKENS)
    names, values = draw_names(rng, num_pairs), draw_values(rng, num_pairs)
    body = scatter_needles(rng, make_needles(names, values), num_tokens)
    asked = rng.integers(num_pairs)
    return Example([BOS, *body.tolist(), ASK, *names[asked].tolist()], values[asked].tolist())


def multi_needle(rng: np.random.Generator, context: int) -> Example:
    """Several needles among distractors in filler. All must be found; each question after the first follows an answer.

    `FOLLOWS name name` after the context gives the order of the names, so that the model asks the next question itself.
    """
    num_tokens = context - 1 - NUM_NEEDLES * QUESTION_TOKENS - QUESTION_TOKENS
    num_needles = min(NUM_NEEDLES + NUM_DISTRACTORS, num_tokens // NEEDLE_TOKENS)
    names, values = draw_names(rng, num_needles), draw_values(rng, num_needles)
    plan = np.concatenate([np.array([FOLLOWS, *name]) for name in names[:NUM_NEEDLES]])
    body = scatter_needles(rng, make_needles(names, values), num_tokens)
    turns = [(*values[i].tolist(), ASK, *names[i + 1].tolist()) for i in range(NUM_NEEDLES - 1)]
    answer = [token for turn in turns for token in turn] + values[NUM_NEEDLES - 1].tolist()
    return Example([BOS, *body.tolist(), *plan.tolist(), ASK, *names[0].tolist()], answer)


TASKS: dict[str, Callable[[np.random.Generator, int], Example]] = {
    "passkey": passkey,
    "kv_recall": kv_recall,
    "multi_needle": multi_needle,
}


ANSWER_TOKENS = {
    "passkey": VALUE_TOKENS,
    "kv_recall": VALUE_TOKENS,
    "multi_needle": NUM_NEEDLES * VALUE_TOKENS + (NUM_NEEDLES - 1) * QUESTION_TOKENS,
}


def examples(task: str, context: int, num: int, seed: int) -> list[Example]:
    """Examples, deterministic in the arguments; a prompt and its answer have `context` tokens together."""
    rng = np.random.default_rng([seed, list(TASKS).index(task), context])
    return [TASKS[task](rng, context - ANSWER_TOKENS[task]) for _ in range(num)]


def training_sequence(rng: np.random.Generator, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and loss mask, [num_tokens] each: the context of one task, then many questions with their answers.

    There are more questions than in the task, so that one sequence teaches more.
    """
    kind = rng.choice(list(TASKS))
    num_questions = max(min(num_tokens // 4 // (QUESTION_TOKENS + VALUE_TOKENS), 64), 1)
    if kind == "multi_needle":
        example = multi_needle(rng, num_tokens - NUM_NEEDLES * NEEDLE_TOKENS + QUESTION_TOKENS)
        tokens = np.array(example.prompt + example.answer)
        mask = np.zeros(num_tokens, bool)
        mask[len(example.prompt) : len(tokens)] = True
        return pad(tokens, num_tokens), mask
    questions = num_questions * (QUESTION_TOKENS + VALUE_TOKENS)
    body_tokens = num_tokens - 1 - questions
    most = min(body_tokens // NEEDLE_TOKENS, len(NAMES) ** NAME_TOKENS)
    num_pairs = most if kind == "kv_recall" else rng.integers(1, max(most // 8, 2))
    names, values = draw_names(rng, num_pairs), draw_values(rng, num_pairs)
    if kind == "passkey" and not (names == PASSKEY_NAME).all(1).any():
        names[0] = PASSKEY_NAME
    body = scatter_needles(rng, make_needles(names, values), body_tokens)
    asked = rng.integers(num_pairs, size=num_questions)
    asks = np.concatenate((np.full((num_questions, 1), ASK), names[asked], values[asked]), 1)
    answers = np.tile(np.arange(asks.shape[1]) >= QUESTION_TOKENS, num_questions)
    mask = np.concatenate((np.zeros(1 + body_tokens, bool), answers))
    return np.concatenate(([BOS], body, asks.ravel())), mask


def pad(tokens: np.ndarray, num_tokens: int) -> np.ndarray:
    """Append filler."""
    return np.concatenate((tokens, np.full(num_tokens - len(tokens), FILLER[0])))
