"""Problems of a known depth: the number of steps to the answer of which each needs the result of the one before.

A problem is text, words with blanks between: a context, and an answer made of the few choices of its task. It follows
from (seed, task, purpose, depth, index) alone, so the same problems come out on every machine and in every process. No
torch.

    walk, walk_a5   A d b a -> F    the cell that moves lead to: composition of permutations
    hops            D B C A B > > -> C    induction several times: go to the letter's place before, then one on
    add             4 7 + 0 9 + 1 2 = -> 0 6 8    the sum of several numbers of two digits
    mano            + * 3 17 5 = -> 10    an expression in prefix notation, modulo 23
    assign          Ann is 7. Tom is as old as Ann. ... So Tom is -> 7    chains of variables, in plain English

docs/evaluation.md names the sources.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import ClassVar, NamedTuple

from pretrain.errors import ConfigError

HELD_OUT_SHARE = 8
"""One problem in so many is for evaluation and never trained on ..."""
HELD_OUT_PROBLEMS = 4_096
"""... at depths that have at least so many. Where there are fewer, training and evaluation share all of them."""


class Problem(NamedTuple):
    """What is asked, and the answer that follows it after a blank."""

    context: str
    answer: str


class DepthProblems(ABC):
    """The problems of one task, at any depth from 1 to `max_depth`."""

    name: str
    choices: tuple[str, ...]
    """Each answer is one or several of them, with blanks between."""
    words: tuple[str, ...]
    """All words and marks that a text of the task may hold."""
    max_depth: int | None = None
    """None: any."""

    @abstractmethod
    def problem(self, rng: Random, depth: int) -> Problem:
        """A problem of this depth, all equally likely."""

    @abstractmethod
    def num_problems(self, depth: int) -> int:
        """How many different problems there are, at least."""

    def document(self, rng: Random, draw_depth: Callable[[], int], num_words: int) -> str:
        """A training text with its answers, none of them held out: one problem, or one text of `num_words` words."""
        problem = self.draw(rng, draw_depth(), held_out=False)
        return f"{problem.context} {problem.answer}"

    def draw(self, rng: Random, depth: int, *, held_out: bool) -> Problem:
        """A problem for evaluation (`held_out`) or for training."""
        while True:
            problem = self.problem(rng, depth)
            if not self.holds_out(depth) or self.is_held_out(problem) == held_out:
                return problem

    def holds_out(self, depth: int) -> bool:
        """Whether no problem of this depth is in both training and evaluation."""
        return self.num_problems(depth) >= HELD_OUT_PROBLEMS

    def is_held_out(self, problem: Problem) -> bool:
        """Whether the problem is one for evaluation, where its depth has such."""
        return hashlib.sha256(f"{self.name}:{problem.context}".encode()).digest()[0] % HELD_OUT_SHARE == 0

    def evaluation_problems(self, depth: int, count: int) -> list[Problem]:
        """The first `count` problems of the evaluation at this depth: always the same."""
        return [self.draw(self.rng("evaluation", depth, i), depth, held_out=True) for i in range(count)]

    def rng(self, *place: int | str) -> Random:
        """Random numbers that follow from the task and `place`, as seed, purpose, depth and index."""
        return Random("/".join(map(str, (self.name, *place))))


class Walk(DepthProblems):
    """The cell that k moves lead to from a given one; each move is a permutation of the cells.

    A document is one long walk, which names its cell after 1, 2, ... moves: every move may be the last one before the
    cell is asked for.
    """

    def __init__(self, name: str, generators: Sequence[Sequence[int]]) -> None:
        """Move g leads from cell c to generators[g][c]. ConfigError where that is no permutation."""
        self.name, self.generators = name, tuple(map(tuple, generators))
        size = len(self.generators[0])
        for generator in self.generators:
            if sorted(generator) != list(range(size)):
                raise ConfigError(
                    f"--generators {','.join(map(str, generator))}: expected a permutation of 0 .. {size - 1}, as many "
                    "as the first one has: where each cell goes, such as 1,2,0"
                )
        letters = string.ascii_uppercase
        if not 2 <= size <= len(letters) or len(self.generators) > len(letters):
            raise ConfigError(
                f"--generators: {len(self.generators)} permutations of {size} cells: expected 1 .. {len(letters)} of "
                f"2 .. {len(letters)} cells, which have letters for names"
            )
        if len(set(self.generators)) < len(self.generators):
            raise ConfigError("--generators: one of them comes twice, so that two moves would be the same")
        self.choices = tuple(letters[:size])
        self.moves = tuple(letters.lower()[: len(self.generators)])
        self.words = self.choices + self.moves

    def problem(self, rng: Random, depth: int) -> Problem:
        return self._walk(rng, depth, rng.randrange(len(self.choices)))

    def num_problems(self, depth: int) -> int:
        return len(self.choices) * len(self.moves) ** depth

    def document(self, rng: Random, draw_depth: Callable[[], int], num_words: int) -> str:
        words = [rng.choice(self.choices)]
        while len(words) < num_words:
            depth, cell = draw_depth(), self.choices.index(words[-1])
            problem = self._walk(rng, depth, cell)
            while self.holds_out(depth) and self.is_held_out(problem):
                problem = self._walk(rng, depth, cell)
            words += [*problem.context.split()[1:], problem.answer]
        return " ".join(words)

    def _walk(self, rng: Random, depth: int, cell: int) -> Problem:
        words = [self.choices[cell]]
        for _ in range(depth):
            move = rng.randrange(len(self.moves))
            words.append(self.moves[move])
            cell = self.generators[move][cell]
        return Problem(" ".join(words), self.choices[cell])


class Hops(DepthProblems):
    """Induction k times (k-hop induction, Sanford et al.): from the last letter, each `>` goes to the letter after the
    previous place of the letter that one stands on. The answer is the letter of the last place.

    No letter comes twice in a row, since a hop from the second would stay where it is. At depth k there are 4 k + 8
    letters: every hop goes back by three on average.
    """

    name = "hops"
    choices = ("A", "B", "C", "D")
    words = (*choices, ">")

    def problem(self, rng: Random, depth: int) -> Problem:
        while True:
            letters = [rng.choice(self.choices)]
            while len(letters) < 4 * depth + 8:
                letters.append(rng.choice([c for c in self.choices if c != letters[-1]]))
            place: int | None = len(letters) - 1
            for _ in range(depth):
                if place is not None:
                    place = _hop(letters, place)
            if place is not None:
                return Problem(" ".join([*letters, *[">"] * depth]), letters[place])

    def num_problems(self, depth: int) -> int:
        return 3 ** (4 * depth + 7)  # 4 first letters, 3 for each place after; more than a quarter have all hops


def _hop(letters: Sequence[str], place: int) -> int | None:
    """The place after the last one before `place` that has its letter; None where there is none."""
    return next((j + 1 for j in range(place - 1, -1, -1) if letters[j] == letters[place]), None)


class Add(DepthProblems):
    """The sum of k + 1 numbers of two digits. The sum has the digits of the largest possible one."""

    name = "add"
    choices = tuple(string.digits)
    words = (*choices, "+", "=")

    def problem(self, rng: Random, depth: int) -> Problem:
        numbers = [rng.randrange(100) for _ in range(depth + 1)]
        terms = " + ".join(" ".join(f"{number:02}") for number in numbers)
        total = str(sum(numbers)).zfill(len(str(99 * len(numbers))))
        return Problem(f"{terms} =", " ".join(total))

    def num_problems(self, depth: int) -> int:
        return 100 ** (depth + 1)


class Mano(DepthProblems):
    """An expression of k operations + - * modulo 23 in prefix notation, after Mano of Physics of Language Models 4.1.

    Depth counts operations, as there; the tree of an expression may be flatter.
    """

    name = "mano"
    MODULUS: ClassVar[int] = 23
    OPERATIONS: ClassVar[Mapping[str, Callable[[int, int], int]]] = {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    }  # fmt: skip
    choices = tuple(map(str, range(23)))
    words = (*choices, "+", "-", "*", "=")

    def problem(self, rng: Random, depth: int) -> Problem:
        words, value = self._expression(rng, depth)
        return Problem(" ".join([*words, "="]), str(value))

    def num_problems(self, depth: int) -> int:
        return 3**depth * self.MODULUS ** (depth + 1)  # of one shape of the tree

    def _expression(self, rng: Random, num_operations: int) -> tuple[list[str], int]:
        """(words, value): the first operation takes a random share of the others to its left."""
        if num_operations == 0:
            number = rng.randrange(self.MODULUS)
            return [str(number)], number
        operation = rng.choice(list(self.OPERATIONS))
        left_share = rng.randrange(num_operations)
        left, a = self._expression(rng, left_share)
        right, b = self._expression(rng, num_operations - 1 - left_share)
        return [operation, *left, *right], self.OPERATIONS[operation](a, b) % self.MODULUS


class Assign(DepthProblems):
    """The age of the last person in a chain of k statements, among three chains whose statements are shuffled.

    Someone who only sees the three ages is right one time in three.
    """

    name = "assign"
    CHAINS: ClassVar[int] = 3
    NAMES: ClassVar[tuple[str, ...]] = (
        "Adam", "Alex", "Alice", "Amy", "Andrew", "Anna", "Anne", "Ben", "Bill", "Bob", "Carl", "Carol", "Charles",
        "Chris", "Claire", "Dan", "David", "Diana", "Ed", "Emma", "Eric", "Eva", "Frank", "Fred", "George", "Grace",
        "Harry", "Helen", "Henry", "Ian", "Jack", "James", "Jane", "Jean", "Jim", "Joe", "John", "Julia", "Karen",
        "Kate", "Kevin", "Larry", "Laura", "Lee", "Linda", "Lisa", "Lucy", "Luke", "Mark", "Martin", "Mary", "Max",
        "Mike", "Nick", "Nora", "Paul", "Peter", "Ray", "Rob", "Rose", "Ruth", "Sam", "Sara", "Simon", "Steve", "Sue",
        "Tim", "Tom", "Tony", "Victor", "Walter", "Will",
    )  # fmt: skip
    choices = tuple("123456789")
    max_depth = len(NAMES) // CHAINS
    words = (*NAMES, *choices, "is", "as", "old", "So", ".")

    def problem(self, rng: Random, depth: int) -> Problem:
        names, ages = rng.sample(self.NAMES, self.CHAINS * depth), rng.sample(self.choices, self.CHAINS)
        chains = [names[i * depth : (i + 1) * depth] for i in range(self.CHAINS)]
        facts = [f"{chain[0]} is {age}." for chain, age in zip(chains, ages, strict=True)]
        facts += [
            f"{name} is as old as {before}."
            for chain in chains
            for before, name in itertools.pairwise(chain)
        ]
        rng.shuffle(facts)
        return Problem(f"{' '.join(facts)} So {chains[0][-1]} is", ages[0])

    def num_problems(self, depth: int) -> int:
        return math.perm(len(self.NAMES), self.CHAINS * depth)  # times ages and orders


S_8 = (
    (7, 3, 6, 5, 1, 4, 0, 2), (3, 6, 0, 2, 7, 1, 4, 5), (2, 5, 3, 4, 0, 7, 1, 6), (4, 7, 5, 0, 6, 2, 3, 1),
    (5, 0, 7, 1, 3, 6, 2, 4),
)  # fmt: skip
"""Five permutations of 8 cells that generate all 40,320; from each cell they lead to five different ones."""
A_5 = ((1, 2, 3, 4, 0), (1, 2, 0, 3, 4), (0, 1, 3, 4, 2))
"""A cycle of five and two of three: the 60 even permutations of 5 cells, the smallest group that is not solvable."""
PROBLEMS: Mapping[str, DepthProblems] = {
    problems.name: problems for problems in (Walk("walk", S_8), Walk("walk_a5", A_5), Hops(), Add(), Mano(), Assign())
}
