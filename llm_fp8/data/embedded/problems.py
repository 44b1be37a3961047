"""Twenty families of word problems and algebra of one to five steps, with worked solutions whose numbers are computed.

Every equality between numbers in a solution ("47 * 86 = 4042") is true as it stands, with `*`, `/` and the usual
precedence, so that a test can evaluate it. The answer stands once, at the end, in `\\boxed{...}`.

Only `randrange`, `randint` and `choice` are drawn from, whose sequences for a given seed are the same in every
supported version of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from random import Random

Row = dict[str, str]

NAMES = tuple(
    "Ada Ben Carla Deniz Emma Farid Grace Hugo Ines Jonas Kira Liam Mona Nils Olga Pedro Quinn Rosa Samir Tara "
    "Umberto Vera Walter Xenia Yusuf Zoe Amara Boris Chloe Dmitri Elif Fiona Gustav Hannah Ivan Julia Kenji Lucia "
    "Marek Nadia Omar Priya".split()
)
GOODS = tuple(
    "pens books apples candles stamps ropes bowls maps shirts bulbs cups tiles pencils brushes chairs blankets "
    "hammers lemons mirrors notebooks onions plates ribbons spoons tickets umbrellas vases whistles baskets cushions "
    "gloves jackets".split()
)
THINGS = tuple(
    "marbles stickers coins shells beads cards buttons pebbles acorns badges tokens magnets postcards figurines".split()
)
PLACES = tuple("town school club factory village camp hospital library theatre company orchestra district".split())
HABITS = tuple(
    "own a bicycle,wear glasses,play chess,drink tea,speak French,have a dog,like swimming,eat breakfast early".split(
        ","
    )
)
TRAVELLERS = tuple("train bus truck car boat cyclist motorbike helicopter".split())
GADGETS = tuple("coat lamp desk bike phone camera guitar printer sofa telescope".split())
JOBS = tuple(
    "paint a wall,mow a field,fill a pool,load a van,clean a kitchen,harvest an orchard,repair a roof".split(",")
)


def _problem(text: str, answer: int | Fraction, *steps: str) -> Row:
    """The row of a problem; its solution is the steps, one to a line, and the boxed answer in lowest terms."""
    value = Fraction(answer)
    boxed = str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    solution = "\n".join([*steps, f"The answer is \\boxed{{{boxed}}}."])
    return {"problem": text, "generated_solution": solution, "expected_answer": boxed}


def _two(rng: Random, items: tuple[str, ...]) -> tuple[str, str]:
    """Two different items."""
    first = rng.choice(items)
    second = rng.choice(items)
    while second == first:
        second = rng.choice(items)
    return first, second


def _term(coefficient: int, variable: str) -> str:
    """`3x`, or `x` for one."""
    return variable if coefficient == 1 else f"{coefficient}{variable}"


def sum_chain(rng: Random) -> Row:
    a, b = rng.randint(200, 9999), rng.randint(100, 9999)
    c = rng.randint(50, a + b - 1)
    return _problem(f"Compute {a} + {b} - {c}.", a + b - c, f"{a} + {b} = {a + b}", f"{a + b} - {c} = {a + b - c}")


def product(rng: Random) -> Row:
    a, tens, ones = rng.randint(12, 499), rng.randint(1, 9) * 10, rng.randint(1, 9)
    b = tens + ones
    return _problem(
        f"What is {a} * {b}?",
        a * b,
        f"{a} * {tens} = {a * tens}",
        f"{a} * {ones} = {a * ones}",
        f"{a * tens} + {a * ones} = {a * b}",
    )


def remainder(rng: Random) -> Row:
    divisor, quotient = rng.randint(7, 89), rng.randint(11, 199)
    rest = rng.randrange(divisor)
    number = divisor * quotient + rest
    return _problem(
        f"What is the remainder when {number} is divided by {divisor}?",
        rest,
        f"{divisor} * {quotient} = {divisor * quotient}",
        f"{number} - {divisor * quotient} = {rest}",
    )


def linear_equation(rng: Random) -> Row:
    a, x, b = rng.randint(2, 19), rng.randint(2, 60), rng.randint(1, 150)
    if rng.randrange(2):
        c = a * x + b
        return _problem(
            f"Solve for x: {a}x + {b} = {c}.",
            x,
            f"Subtract {b} from both sides: {a}x = {c} - {b} = {c - b}",
            f"Divide by {a}: x = {c - b} / {a} = {x}",
        )
    b = rng.randint(1, a * x - 1)
    c = a * x - b
    return _problem(
        f"Solve for x: {a}x - {b} = {c}.",
        x,
        f"Add {b} to both sides: {a}x = {c} + {b} = {c + b}",
        f"Divide by {a}: x = {c + b} / {a} = {x}",
    )


def equation_both_sides(rng: Random) -> Row:
    a, x = rng.randint(4, 20), rng.randint(2, 40)
    c = rng.randint(2, a - 2)
    b = rng.randint(1, 90)
    d = (a - c) * x + b
    return _problem(
        f"Find x if {a}x + {b} = {c}x + {d}.",
        x,
        f"Bring x to the left and the numbers to the right: {a}x - {c}x = {d} - {b}",
        f"{a} - {c} = {a - c}",
        f"{d} - {b} = {d - b}",
        f"x = {d - b} / {a - c} = {x}",
    )


def linear_system(rng: Random) -> Row:
    x, y = rng.randint(2, 30), rng.randint(2, 30)
    a, b, c = rng.randint(2, 9), rng.randint(1, 9), rng.randint(1, 9)
    total, other = a * x + b * y, x + c * y
    while a * c == b:  # the two equations must not be multiples of each other
        c += 1
        other = x + c * y
    left, right = a * c - b, a * other - total
    return _problem(
        f"If {a}x + {_term(b, 'y')} = {total} and x + {_term(c, 'y')} = {other}, what is x + y?",
        x + y,
        f"Multiply the second by {a}: {a}x + {a * c}y = {a * other}",
        f"Subtract the first: {_term(left, 'y')} = {a * other} - {total} = {right}",
        f"y = {right} / {left} = {y}",
        f"x = {other} - {c} * {y} = {x}",
        f"{x} + {y} = {x + y}",
    )


def discount(rng: Random) -> Row:
    price, percent, fee = rng.randint(2, 45) * 20, rng.randint(1, 15) * 5, rng.randint(2, 30)
    cut = price * percent // 100
    item = rng.choice(GADGETS)
    return _problem(
        f"A {item} costs ${price}. It is reduced by {percent}% and delivery costs ${fee}. What is paid in total?",
        price - cut + fee,
        f"The reduction is {price} * {percent} / 100 = {cut}",
        f"The {item} now costs {price} - {cut} = {price - cut}",
        f"With delivery that is {price - cut} + {fee} = {price - cut + fee}",
    )


def percent_of(rng: Random) -> Row:
    people, percent = rng.randint(3, 99) * 20, rng.randint(1, 18) * 5
    have = people * percent // 100
    place, habit = rng.choice(PLACES), rng.choice(HABITS)
    return _problem(
        f"Of the {people} people in a {place}, {percent}% {habit}. How many do not?",
        people - have,
        f"{people} * {percent} / 100 = {have} of them {habit}",
        f"{people} - {have} = {people - have} do not",
    )


def distance(rng: Random) -> Row:
    v, t, w, u = rng.randint(21, 119), rng.randint(2, 9), rng.randint(21, 119), rng.randint(2, 9)
    return _problem(
        f"A {rng.choice(TRAVELLERS)} goes {t} hours at {v} km/h and {u} hours at {w} km/h. How many km is that?",
        v * t + w * u,
        f"The first part is {v} * {t} = {v * t} km",
        f"The second part is {w} * {u} = {w * u} km",
        f"Together {v * t} + {w * u} = {v * t + w * u} km",
    )


def work_together(rng: Random) -> Row:
    a, b = rng.randint(2, 30), rng.randint(2, 30)
    first, second = _two(rng, NAMES)
    job = rng.choice(JOBS)
    common = math.gcd(a * b, a + b)
    return _problem(
        f"{first} can {job} in {a} hours and {second} in {b}. How many hours do they need together?",
        Fraction(a * b, a + b),
        f"In one hour they do 1/{a} + 1/{b} = {a + b}/{a * b} of it",
        f"So they need {a * b}/{a + b} hours",
        f"Divide both numbers by their common factor {common}: {a * b} / {common} = {a * b // common}",
        f"{a + b} / {common} = {(a + b) // common}",
    )


def ages(rng: Random) -> Row:
    first, second = _two(rng, NAMES)
    young, years, times = rng.randint(3, 25), rng.randint(2, 20), rng.randint(2, 5)
    later = young + years
    return _problem(
        f"{second} is {young}. In {years} years {first} will be {times} times as old as {second}. How old is {first} "
        "now?",
        times * later - years,
        f"In {years} years {second} is {young} + {years} = {later}",
        f"{first} is then {times} * {later} = {times * later}",
        f"Now {first} is {times * later} - {years} = {times * later - years}",
    )


def fraction_sum(rng: Random) -> Row:
    b, d = rng.randint(2, 20), rng.randint(2, 20)
    a, c = rng.randint(1, b), rng.randint(1, d)
    common = math.lcm(b, d)
    left, right = a * common // b, c * common // d
    factor = math.gcd(left + right, common)
    return _problem(
        f"Compute {a}/{b} + {c}/{d} in lowest terms.",
        Fraction(a, b) + Fraction(c, d),
        f"{a}/{b} = {left}/{common}",
        f"{c}/{d} = {right}/{common}",
        f"{left}/{common} + {right}/{common} = {left + right}/{common}",
        f"Divide both numbers by their common factor {factor}: {left + right} / {factor} = {(left + right) // factor}",
        f"{common} / {factor} = {common // factor}",
    )


def fraction_of_rest(rng: Random) -> Row:
    b, d = rng.randint(2, 6), rng.randint(2, 6)
    total = b * d * rng.randint(3, 40)
    first, second = total // b, (total - total // b) // d
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    left = total - first
    return _problem(
        f"{name} has {total} {thing}, loses 1/{b} of them and gives away 1/{d} of the rest. How many are left?",
        left - second,
        f"{name} loses {total} / {b} = {first}",
        f"The rest is {total} - {first} = {left}",
        f"{name} gives away {left} / {d} = {second}",
        f"{left} - {second} = {left - second} are left",
    )


def rectangle(rng: Random) -> Row:
    width, more = rng.randint(4, 60), rng.randint(1, 40)
    half = 2 * width + more
    return _problem(
        f"A rectangle is {more} cm longer than wide and its perimeter is {2 * half} cm. What is its area in cm^2?",
        width * (width + more),
        f"Length and width together are {2 * half} / 2 = {half}",
        f"Twice the width is {half} - {more} = {2 * width}",
        f"The width is {2 * width} / 2 = {width}",
        f"The length is {width} + {more} = {width + more}",
        f"The area is {width} * {width + more} = {width * (width + more)}",
    )


def average(rng: Random) -> Row:
    a, b, c, d = (rng.randint(10, 99) for _ in range(4))
    d += -(a + b + c + d) % 4
    known, mean = a + b + c, (a + b + c + d) // 4
    return _problem(
        f"The average of four numbers is {mean}. Three of them are {a}, {b} and {c}. What is the fourth?",
        d,
        f"All four add up to 4 * {mean} = {4 * mean}",
        f"The three add up to {a} + {b} + {c} = {known}",
        f"{4 * mean} - {known} = {d}",
    )


def ratio(rng: Random) -> Row:
    p, q, part = rng.randint(1, 12), rng.randint(1, 12), rng.randint(3, 60)
    while p == q:
        q = rng.randint(1, 12)
    first, second = _two(rng, NAMES)
    total, big = part * (p + q), part * max(p, q)
    return _problem(
        f"{first} and {second} share {total} {rng.choice(THINGS)} in the ratio {p}:{q}. How many does the larger "
        "share hold?",
        big,
        f"There are {p} + {q} = {p + q} parts",
        f"One part is {total} / {p + q} = {part}",
        f"{max(p, q)} * {part} = {big}",
    )


def interest(rng: Random) -> Row:
    amount, percent, years = rng.randint(2, 90) * 100, rng.randint(2, 12), rng.randint(2, 9)
    yearly = amount * percent // 100
    name = rng.choice(NAMES)
    return _problem(
        f"{name} lends ${amount} at {percent}% simple interest a year. How much is owed after {years} years?",
        amount + yearly * years,
        f"A year brings {amount} * {percent} / 100 = {yearly}",
        f"{years} years bring {yearly} * {years} = {yearly * years}",
        f"{amount} + {yearly * years} = {amount + yearly * years}",
    )


def quadratic(rng: Random) -> Row:
    small = rng.randint(1, 30)
    large = small + rng.randint(1, 30)
    return _problem(
        f"What is the larger root of x^2 - {small + large}x + {small * large} = 0?",
        large,
        f"Look for two numbers with sum {small + large} and product {small * large}",
        f"{small} + {large} = {small + large}",
        f"{small} * {large} = {small * large}",
        f"So x^2 - {small + large}x + {small * large} = (x - {small})(x - {large})",
    )


def sequence(rng: Random) -> Row:
    first, step, count = rng.randint(1, 60), rng.randint(2, 25), rng.randint(5, 40)
    last = first + (count - 1) * step
    return _problem(
        f"A sequence starts at {first} and grows by {step} each term. What is the sum of its first {count} terms?",
        count * (first + last) // 2,
        f"The last term is {first} + {count - 1} * {step} = {last}",
        f"First and last add up to {first} + {last} = {first + last}",
        f"The sum is {count} * {first + last} / 2 = {count * (first + last) // 2}",
    )


def shopping(rng: Random) -> Row:
    n, p, m, q = rng.randint(2, 12), rng.randint(2, 25), rng.randint(2, 12), rng.randint(2, 25)
    first, second = _two(rng, GOODS)
    cost = n * p + m * q
    paid = cost + rng.randint(1, 60)
    return _problem(
        f"{rng.choice(NAMES)} buys {n} {first} at ${p} and {m} {second} at ${q} and pays with ${paid}. What is the "
        "change?",
        paid - cost,
        f"The {first} cost {n} * {p} = {n * p}",
        f"The {second} cost {m} * {q} = {m * q}",
        f"Together that is {n * p} + {m * q} = {cost}",
        f"{paid} - {cost} = {paid - cost}",
    )


FAMILIES: dict[str, Callable[[Random], Row]] = {
    family.__name__: family
    for family in (
        sum_chain,
        product,
        remainder,
        linear_equation,
        equation_both_sides,
        linear_system,
        discount,
        percent_of,
        distance,
        work_together,
        ages,
        fraction_sum,
        fraction_of_rest,
        rectangle,
        average,
        ratio,
        interest,
        quadratic,
        sequence,
        shopping,
    )
}
