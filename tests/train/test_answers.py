"""Final answers out of generated text, and which of them count as the same."""

from __future__ import annotations

import pytest

from llm_fp8.data.embedded.generate import make_rows
from llm_fp8.train.answers import answers_equal, extract_answer

EXTRACTED = [
    # the last box, with nested braces
    (r"The answer is \boxed{42}.", "42"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"First \boxed{1}, then \boxed{2}.", "2"),
    (r"\boxed{\left\{1, 2\right\}} done", r"\left\{1, 2\right\}"),
    (r"\boxed {x^{2^{3}}}", "x^{2^{3}}"),
    (r"\boxed{ 7 }", "7"),
    (r"\boxed{a \} b} c", r"a \} b"),
    # boxes come before ####, whatever stands where
    ("\\boxed{3}\n#### 4", "3"),
    # cut in the middle of the answer: no answer, also where an earlier one stood
    (r"so \boxed{48", None),
    (r"\boxed{1} and so \boxed{\frac{4}{", None),
    # GSM8K
    ("She has 3 + 4 = <<3+4=7>>7 apples.\n#### 7", "7"),
    ("#### 1,234\n", "1,234"),
    ("#### -5 \nmore 99", "-5"),
    ("#### 1\n#### 2", "2"),
    ("#### $18.00", "$18.00"),
    # the last number
    ("It is 3, then 5, so 8.", "8"),
    ("We get 1,234,567 in all", "1,234,567"),
    ("x = -3", "-3"),
    ("that is 10-5", "5"),
    ("so the result is 3/4.", "3/4"),
    (r"the result is $\frac{3}{4}$.", r"\frac{3}{4}"),
    (r"the result is $-\dfrac{3}{4}$", r"-\dfrac{3}{4}"),
    ("costs $12.50", "$12.50"),
    ("that is 25%", "25%"),
    ("about .5", ".5"),
    # nothing
    ("no idea", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "answer"), EXTRACTED)
def test_the_final_answer_of_a_text(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


EQUAL = [
    ("482", "482"),
    (" 482 ", "482"),
    ("482.", "482"),
    ("+3", "3"),
    ("007", "7"),
    ("-0", "0"),
    # decimals and fractions, exactly
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.5"),
    ("2.50", "2.5"),
    ("3.0", "3"),
    ("3.", "3"),
    ("1/2", r"\dfrac{1}{2}"),
    ("2/4", "1/2"),
    (r"\tfrac{3}{6}", "0.5"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\frac1{2}", "0.5"),
    (r"\frac{1}2", "0.5"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", "-1/2"),
    (r"\frac{1}{-2}", "-1/2"),
    (r"\frac{1.5}{3}", "1/2"),
    ("-1/2", r"-\frac{1}{2}"),
    (r"1\frac{1}{2}", "1.5"),
    (r"-1\frac{1}{2}", "-1.5"),
    ("1 1/2", "3/2"),
    ("8/4", "2"),
    # thousands
    ("1,234", "1234"),
    ("1,234,567.50", "1234567.5"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("10 000", "10000"),
    # powers of ten
    (r"1.5 \times 10^3", "1500"),
    (r"2 \cdot 10^{-3}", "0.002"),
    ("1e3", "1000"),
    # what LaTeX adds
    ("$42$", "42"),
    ("$$42$$", "42"),
    (r"\(42\)", "42"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    (r"\text{east}", "east"),
    (r"\textbf{5}", "5"),
    (r"\text{5 cm}", "5"),
    ("5 €", "€5"),
    (r"\text{ (A) }", "(A)"),
    (r"\mathrm{No}", "no"),
    ("Yes", "yes"),
    ("−3", "-3"),
    ("π", r"\pi"),
    (r"\dfrac{\pi}{2}", r"\frac{\pi}{2}"),
    (r"2\sqrt3", r"2\sqrt{3}"),
    (r"x^{2}", "x^2"),
    ("2x + 1", "2x+1"),
    (r"3 \, \text{cm}", r"3\text{ cm}"),
    # units: the same, or absent on one side
    ("5%", "5"),
    (r"5\%", "5%"),
    ("5 percent", "5%"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90°"),
    ("90 degrees", "90"),
    ("$5", "5"),
    (r"\$5.00", "5"),
    ("-$5", "-5"),
    ("5 dollars", "$5"),
    (r"5 \text{ cm}", "5"),
    (r"5 \text{ cm}^2", "5"),
    ("5 cm", r"5\text{ cm}"),
    (r"\frac{1}{2} \text{ hours}", "0.5 hour"),
    (r"12\text{ square units}", "12"),
    ("18 days", "18"),
    # names
    ("x = 5", "5"),
    ("x=5", "x = 5"),
    ("5", "x=5"),
    (r"\theta", r"\theta"),
    # lists
    ("(1, 2)", "(1,2)"),
    ("(0.5, 3)", r"\left(\frac{1}{2}, 3\right)"),
    ("[0, 1)", "[0,1)"),
    (r"(-\infty, 2]", r"(-\infty,2]"),
    (r"\{1, 2\}", r"\{2,1\}"),
    (r"\{1/2, 3\}", r"\{3, 0.5\}"),
    ("1, 2", "1,2"),
    ("x = 1, y = 2", "x=1,y=2"),
    ("((1, 2), 3)", "((1,2),3)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]


@pytest.mark.parametrize(("generated", "expected"), EQUAL)
def test_the_same_answer_in_another_spelling(generated: str, expected: str) -> None:
    assert answers_equal(generated, expected)
    assert answers_equal(expected, generated)


DIFFERENT = [
    ("482", "483"),
    ("0.333", "1/3"),
    ("0.3333333333333333", r"\frac{1}{3}"),
    ("1/3", "3"),
    ("1/0", "1"),
    ("1/0", "2/0"),
    ("-3", "3"),
    ("1,2", "12"),
    ("1,23", "123"),
    ("12,34", "1234"),
    ("1, 234", "1234"),
    ("1.000", "1000"),
    ("10^2", "102"),
    # units
    ("50%", "0.5"),
    ("5 cm", "5 m"),
    (r"5 \text{ cm}", r"5 \text{ m}"),
    (r"5 \text{ cm}", r"5 \text{ cm}^2"),
    ("$5", "5%"),
    ("$5", "€5"),
    ("5x", "5"),
    ("5 x", "5"),
    # names
    ("x=5", "y=5"),
    ("x=5", "x=6"),
    # lists
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "[1, 2]"),
    ("[0, 1)", "[0, 1]"),
    ("(1, 2)", "(1, 2, 3)"),
    ("1, 2", "2, 1"),
    (r"\{1, 2\}", "(1, 2)"),
    (r"\{1, 1\}", r"\{1, 2\}"),
    ("(1", "1"),
    ("1", "(1)"),
    # text
    ("2x+1", "1+2x"),
    ("A", "a"),
    ("A", "(A)"),
    ("east", "west"),
    (r"\sqrt{2}", "1.414"),
    ("abc", "5"),
    ("", "5"),
    ("", ""),
    (" ", "5"),
]


@pytest.mark.parametrize(("generated", "expected"), DIFFERENT)
def test_different_answers_differ(generated: str, expected: str) -> None:
    assert not answers_equal(generated, expected)
    assert not answers_equal(expected, generated)


def test_no_answer_equals_nothing() -> None:
    assert not answers_equal(None, "5")


def test_an_exponent_that_would_fill_the_memory_is_text() -> None:
    assert answers_equal("1e999999999", "1e999999999")
    assert not answers_equal("10^{999999999}", "1e999999999")


def test_what_a_model_that_repeats_itself_writes() -> None:
    for piece in ("1", "(", r"\{", "1,", r"\frac{", r"1\times10^9", "{", "$", "x=", "1 "):
        assert not answers_equal(piece * 6000, "5")
        assert not answers_equal(piece * (990 // len(piece)), "5")
        extract_answer(piece * 6000)
    assert answers_equal("1" * 6000, "1" * 6000)


def test_every_solution_of_the_embedded_problems_holds_its_answer() -> None:
    rows = make_rows(400)
    answers = [extract_answer(row["generated_solution"]) for row in rows]
    assert all(answers_equal(answer, row["expected_answer"]) for answer, row in zip(answers, rows, strict=True))
    # and nearly none of another family's, with which it is out of step
    shifted = [
        answers_equal(answer, row["expected_answer"]) for answer, row in zip(answers, rows[1:] + rows[:1], strict=True)
    ]
    assert sum(shifted) < 20
