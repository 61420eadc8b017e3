"""Problems of known depth: answers by brute force, the same ones every time, and none of the evaluation in training."""

from __future__ import annotations

import itertools
import random
import re
from random import Random

import pytest

from pretrain.errors import ConfigError
from pretrain.evaluation.depth import A_5, PROBLEMS, S_8, Problem, Walk

DEPTHS = (1, 2, 3, 5, 8, 16, 24)
OTHERS = ["hops", "add", "mano", "assign"]
EVERY = [*PROBLEMS.values(), Walk("walk", [(1, 2, 0), (1, 0, 2)])]


def solve_walk(context: str, generators: tuple[tuple[int, ...], ...]) -> tuple[str, int]:
    """By the product of all permutations, taken first."""
    cell, *moves = context.split()
    product = tuple(range(len(generators[0])))
    for move in moves:
        product = tuple(generators["abcdefghijklmnopqrstuvwxyz".index(move)][c] for c in product)
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[product["ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(cell)]], len(moves)


def solve_hops(context: str) -> tuple[str, int]:
    """By the definition of Sanford et al.: find(i) = max {j <= i : x_{j-1} = x_i}, k times; positions from 1."""
    letters, marks = context.replace(" ", "").split(">", 1)
    x = " " + letters
    at, hops = len(letters), len(marks) + 1
    for _ in range(hops):
        at = max(j for j in range(2, at + 1) if x[j - 1] == x[at])
    return x[at], hops


def solve_add(context: str) -> tuple[str, int]:
    numbers = [int(term.replace(" ", "")) for term in context.removesuffix(" =").split("+")]
    assert all(len(term.replace(" ", "")) == 2 for term in context.removesuffix(" =").split("+"))
    width = len(str(99 * len(numbers)))
    return " ".join(f"{sum(numbers):0{width}}"), len(numbers) - 1


def solve_mano(context: str) -> tuple[str, int]:
    """From the end, on a stack, with whole numbers: the remainder is taken once."""
    stack: list[int] = []
    operations = 0
    for word in reversed(context.removesuffix(" =").split()):
        if word.isdecimal():
            stack.append(int(word))
        else:
            a, b = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b}[word])
            operations += 1
    (value,) = stack
    return str(value % 23), operations


def solve_assign(context: str) -> tuple[str, int]:
    """By following the statements back from the person that is asked for; depth: statements on the way."""
    facts, asked = context.split(" So ")
    before = dict(re.findall(r"(\w+) is as old as (\w+)\.", facts))
    ages = dict(re.findall(r"(\w+) is (\d)\.", facts))
    assert len(before) + len(ages) == facts.count(".") and len(ages) == 3
    name, steps = asked.removesuffix(" is"), 1
    while name in before:
        name, steps = before[name], steps + 1
    return ages[name], steps


SOLVERS = {"hops": solve_hops, "add": solve_add, "mano": solve_mano, "assign": solve_assign}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("problems", EVERY, ids=lambda p: p.name + str(len(p.choices)))
def test_answers_by_brute_force(problems: Walk, depth: int) -> None:
    answers = set()
    for context, answer in problems.evaluation_problems(depth, 40):
        if problems.name.startswith("walk"):
            found = solve_walk(context, problems.generators)
        else:
            found = SOLVERS[problems.name](context)
        assert found == (answer, depth), context
        assert {*re.findall(r"\w+|[^\w\s]", context), *answer.split()} <= set(problems.words)
        assert set(answer.split()) <= set(problems.choices)
        answers.add(answer)
    assert len(answers) > 2, "answers vary"


def closure(generators: tuple[tuple[int, ...], ...]) -> set[tuple[int, ...]]:
    found = frontier = {tuple(range(len(generators[0])))}
    while frontier:
        frontier = {tuple(p[c] for c in g) for p in frontier for g in generators} - found
        found = found | frontier
    return found


def test_the_shipped_groups() -> None:
    assert len(closure(S_8)) == 40_320
    a_5 = closure(A_5)
    inversions = (sum(p[i] > p[j] for i, j in itertools.combinations(range(5), 2)) for p in a_5)
    assert len(a_5) == 60 and all(count % 2 == 0 for count in inversions)


def test_problems_follow_from_their_place_alone() -> None:
    """Pinned: published accuracies are of these problems."""
    first = {name: problems.evaluation_problems(2, 1)[0] for name, problems in PROBLEMS.items()}
    random.seed(7)
    state = random.getstate()
    again = {name: problems.evaluation_problems(2, 3)[0] for name, problems in PROBLEMS.items()}
    assert again == first and random.getstate() == state
    assert first["walk"] == Problem("E e d", "A")
    assert first["add"] == Problem("1 9 + 6 8 + 9 5 =", "1 8 2")
    assert first["mano"] == Problem("+ + 21 7 1 =", "6")
    assert first["hops"] == Problem("A C A C B A D A D C D B C D C A > >", "A")
    assert first["assign"].context.startswith("Mark is as old as Joe. Tom is as old as Frank.")
    for problems in PROBLEMS.values():
        assert len(set(problems.evaluation_problems(8, 50))) == 50
        seeds = [problems.rng("train", seed, 0).random() for seed in range(3)]
        assert len({*seeds, problems.rng("validation", 0, 0).random()}) == 4


def trained_on(problems: Walk, documents: int) -> dict[int, set[str]]:
    """Contexts of the problems in training documents, by depth."""
    rng, found = Random(3), {}
    for _ in range(documents):
        document = problems.document(rng, lambda: rng.choice((1, 2, 3, 4, 6)), 120)
        if problems.name.startswith("walk"):
            walks = re.findall(r"(?=\b([A-Z](?: [a-z])+) [A-Z])", document)
            contexts = [(len(walk.split()) - 1, walk) for walk in walks]
        else:
            size = len(problems.evaluation_problems(1, 1)[0].answer.split())
            words = document.split(" ")
            cut = next(
                n for n in range(size, 6) if SOLVERS[problems.name](" ".join(words[:-n]))[0] == " ".join(words[-n:])
            )
            context = " ".join(words[:-cut])
            contexts = [(SOLVERS[problems.name](context)[1], context)]
        for depth, context in contexts:
            found.setdefault(depth, set()).add(context)
    return found


@pytest.mark.parametrize("problems", EVERY, ids=lambda p: p.name + str(len(p.choices)))
def test_no_problem_of_the_evaluation_is_trained_on_unless_there_are_few(problems: Walk) -> None:
    found = trained_on(problems, 400)
    assert set(found) == {1, 2, 3, 4, 6}
    for depth, contexts in found.items():
        evaluated = {p.context for p in problems.evaluation_problems(depth, 300)}
        held_out = {context for context in contexts if problems.is_held_out(Problem(context, ""))}
        if problems.holds_out(depth):
            assert not held_out and not contexts & evaluated
            assert all(problems.is_held_out(Problem(context, "")) for context in evaluated)
        else:
            assert held_out, "a depth with few problems trains on all"
    if problems.name == "walk" and len(problems.choices) == 8:
        assert [problems.num_problems(k) for k in (1, 2, 3, 4)] == [40, 200, 1_000, 5_000]
        assert {p.context for p in problems.evaluation_problems(1, 300)} == found[1], "all 40 on both sides"


def test_a_walk_names_its_cell_at_every_stop() -> None:
    problems = PROBLEMS["walk"]
    rng = Random(0)
    words = problems.document(rng, lambda: rng.randint(1, 4), 200).split()
    assert len(words) >= 200
    stops = [i for i, word in enumerate(words) if word.isupper()]
    assert stops[0] == 0 and stops[-1] == len(words) - 1
    for start, stop in itertools.pairwise(stops):
        assert 1 <= stop - start - 1 <= 4
        assert solve_walk(" ".join(words[start:stop]), S_8)[0] == words[stop]


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        ([(0, 1, 1)], r"--generators 0,1,1: expected a permutation of 0 .. 2"),
        ([(1, 0), (1, 0, 2)], r"--generators 1,0,2: expected a permutation of 0 .. 1"),
        ([(0,)], r"1 permutations of 1 cells: expected 1 .. 26 of 2 .. 26 cells"),
        ([tuple(range(27))], r"of 27 cells: expected"),
        ([(1, 0), (1, 0)], "comes twice"),
    ],
)
def test_groups_that_are_none(generators: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Walk("walk", generators)
