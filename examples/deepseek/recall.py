"""The recall task: remember many numbers, then say which number belongs to a name.

A text is `<s>` and then items of two tokens each, a name and a number: `kale=41`. The first
`num_pairs` items have different names and random numbers. Each later item repeats one of these
names, as a question, and its number is the answer. An answer is right or wrong, a guess is right
once in 100 times, and the answer stands in one place, often hundreds of tokens back.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

NAMES = """
acorn adder agave alder algae almond anchovy ant ape apple apricot ash asp aspen aster avocado
badger bamboo banana barley basil bass bat bean bear beaver bee beech beet beetle birch bison
boar bream bulrush cabbage camel carp carrot cashew cat cedar celery chard cherry chervil chestnut
chicory chive cicada clam clove clover cobra coconut cod condor coral corn cow crab crane cress
cricket crocus crow cumin currant cypress dace daisy date deer dill dingo dog dove duck eagle eel
egret elder elk elm emu endive falcon fennel fern ferret fig finch flax flea fox frog garlic gecko
ginger goat goose gorse grape grouse guava gull haddock hake hare hawk hazel heath hemp hen heron
hop hornet horse hyena ibex ibis iris ivy jackal jasmine jay juniper kale kelp kite kiwi koala krill
lark larch laurel leek lemon lemur lentil lettuce lichen lily lime linden ling lion lizard llama
lobster loach lotus lupin lynx magpie maize mallow mango maple marten medlar melon millet mink mint
mole moose moss moth mouse mule mullet mussel myrtle newt nettle nutmeg oak oat ocelot okra olive
""".split()
SPECIAL = ["<s>", "</s>"]
BOS, EOS = 0, 1
NUMBERS = 100
FIRST_NUMBER = len(SPECIAL)
FIRST_NAME = FIRST_NUMBER + NUMBERS
ITEM_TOKENS = 2


def vocabulary() -> list[str]:
    """Return the text of every token: special tokens, two-digit numbers, then ` name=`."""
    return [*SPECIAL, *(f"{n:02}" for n in range(NUMBERS)), *(f" {name}=" for name in NAMES)]


class Vocabulary:
    """The tokenizer of the task. Spaces before names are optional.

    Attributes:
      texts: text of every token id.
    """

    def __init__(self, texts: list[str]):
        """Prepare to encode and decode.

        Args:
          texts: text of every token id.

        Raises:
          ValueError: `texts` is not a list of strings.
        """
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("not a list of strings")
        self.texts = texts
        self._ids = {text.strip(): i for i, text in enumerate(texts)}
        ordered = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._pattern = re.compile(rf"\s*({'|'.join(ordered)})|(\s+$)")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, `<s>` first.

        Args:
          text: names and numbers such as `kale=41 fig=`.

        Returns:
          Token ids.

        Raises:
          ValueError: a part of the text is not in the vocabulary. The message quotes it.
        """
        ids, at = [BOS], 0
        while at < len(text):
            match = self._pattern.match(text, at)
            if match is None:
                raise ValueError(f"not in this checkpoint's vocabulary: {text[at : at + 20]!r}")
            if match[1] is not None:
                ids.append(self._ids[match[1]])
            at = match.end()
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        return "".join(self.texts[i] for i in ids)


def sample_texts(
    key: jax.Array, batch: int, num_items: int, num_pairs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Make training or test texts on the device.

    Args:
      key: random key.
      batch: number of texts.
      num_items: pairs and questions in each text.
      num_pairs: [batch] int32, pairs in each text: 1 <= n <= min(num_items, number of names).

    Returns:
      Tokens [batch, 1 + 2 * num_items] int32, and a mask of the same shape that is True at the
      answers.
    """
    name_key, value_key, question_key = jax.random.split(key, 3)
    order = jnp.argsort(jax.random.uniform(name_key, (batch, len(NAMES))), axis=-1)
    values = jax.random.randint(value_key, (batch, len(NAMES)), 0, NUMBERS)
    item = jnp.arange(num_items)
    asked = jax.random.randint(question_key, (batch, num_items), 0, num_pairs[:, None])
    is_question = item >= num_pairs[:, None]
    pair = jnp.where(is_question, asked, item)
    names = jnp.take_along_axis(order, pair, axis=-1) + FIRST_NAME
    numbers = jnp.take_along_axis(values, pair, axis=-1) + FIRST_NUMBER
    items = jnp.stack([names, numbers], axis=-1).reshape(batch, -1)
    is_answer = jnp.stack([jnp.zeros_like(is_question), is_question], axis=-1).reshape(batch, -1)
    tokens = jnp.pad(items, ((0, 0), (1, 0)), constant_values=BOS)
    return tokens.astype(jnp.int32), jnp.pad(is_answer, ((0, 0), (1, 0)))


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A prompt and the questions that follow it.

    Attributes:
      prompt: token ids.
      questions: token ids, the name in each question.
      answers: token ids, the right answer to each question.
      distances: tokens between each question and the pair that answers it.
    """

    prompt: list[int]
    questions: list[int]
    answers: list[int]
    distances: list[int]


def sample_dialogue(rng: np.random.Generator, num_pairs: int, num_questions: int) -> Dialogue:
    """Make a prompt and questions about it.

    Args:
      rng: source of names, numbers and questions.
      num_pairs: pairs in the prompt.
      num_questions: number of questions, at most `num_pairs`. The first is about the first pair.

    Returns:
      The dialogue.
    """
    names = rng.permutation(len(NAMES))[:num_pairs] + FIRST_NAME
    numbers = rng.integers(0, NUMBERS, num_pairs) + FIRST_NUMBER
    prompt = [BOS, *np.stack([names, numbers], axis=-1).ravel().tolist()]
    asked = [0, *(1 + rng.permutation(num_pairs - 1)[: num_questions - 1]).tolist()]
    return Dialogue(
        prompt=prompt,
        questions=names[asked].tolist(),
        answers=numbers[asked].tolist(),
        distances=[ITEM_TOKENS * (num_pairs + n - i) - 1 for n, i in enumerate(asked)],
    )
