r"""The final answer of a worked solution, and whether two answers are equal: text and exact arithmetic, no tolerance.

`extract_answer` takes the first of these that a text has:

    \boxed{...}      the last one, braces nested; an unclosed one means that the text was truncated: no answer
    #### x           what follows the last one on its line (GSM8K)
    a number         the last one

`answers_equal` reads both sides as below, after removing LaTeX's formatting ($, \left, \text{}, spacing, \dfrac):

    numbers          integers, decimals, thousands commas, a/b, \frac{a}{b}, mixed numbers, a \times 10^b:
                     compared as fractions
    units            %, degrees, currency, \text{cm}, and the plain words of `_UNIT_WORDS`: equal, or absent on one side
    names            "x = 5": equal, or absent on one side
    (a, b) [a, b)    element by element, brackets alike
    \{a, b\}         as sets
    a, b             element by element
    anything else    the same characters, white space aside

Anything else is compared as text, so that doubt counts as a wrong answer: `2x+1` and `1+2x` differ, as do 50% and 0.5.

Why not math-verify: version 0.9.0 disagrees on 22 of the 123 pairs in tests/train/test_answers.py (it equates 5 cm with
5 m, (A) with a; it does not read `10 000` or `1 1/2`) and takes 13 ms a pair, against 0.1 ms here.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from fractions import Fraction

ANSWERS_FOLDER = "eval_answers"
"""In a run's folder: a file step-N.jsonl for each evaluation, a line for each problem."""

_BOX = re.compile(r"\\boxed\s*\{")
_GSM8K = re.compile(r"####[ \t]*(\S[^\n]*)")
_PLAIN_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_LAST_NUMBER = re.compile(
    # A minus behind a digit, letter or closing bracket is a subtraction.
    rf"(?:(?<![\w)\]}}])-)?(?:\\[dt]?frac\{{-?\d+\}}\{{\d+\}}|\$?(?:{_PLAIN_NUMBER})(?:/\d+)?(?:\\?%)?)"
)

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "π": r"\pi", "∞": r"\infty", "°": r"^\circ", "×": r"\times", "\u00a0": " "}
)
_LOOK_ALONE = re.compile(
    r"(?<!\\)\\(?:(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|limits|quad)(?![a-zA-Z])|[!,;:()\[\]])"
)
_TEXT = r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
_NAME = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?)\s*=(?!=)\s*(\S.*)", re.DOTALL)
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|degrees?)$")
_CURRENCY = re.compile(r"([-+]?)\s*(?:\\?\$|\\?€|\\?£)\s*(?=[-+.\d\\])")
_UNIT_TEXT = re.compile(rf"(?P<value>.*\S)\s*{_TEXT}(?P<power>\s*\^\s*\{{?\s*\d\s*\}}?)?", re.DOTALL)
_UNIT_WORDS = (
    "cm|mm|km|kg|mg|ml|inch|inches|foot|feet|yards?|miles?|meters?|metres?|centimeters?|kilometers?|grams?|kilograms?|liters?|litres?|"
    "pounds?|ounces?|gallons?|dollars?|cents?|euros?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|mph|units?|people|percent"
)
_UNIT_WORD = re.compile(
    rf"(?P<value>.*[\d}}])\s*(?P<unit>{_UNIT_WORDS})(?P<power>\s*\^\s*\{{?\s*\d\s*\}}?)?", re.DOTALL
)
_OF_PERCENT, _OF_DEGREE, _OF_DOLLAR = "%", "degree", "$"
_SYNONYMS = {"percent": _OF_PERCENT, "dollar": _OF_DOLLAR, "inche": "inch", "feet": "foot", "degree": _OF_DEGREE}

_DECIMAL = re.compile(rf"[-+]?(?:{_PLAIN_NUMBER}|\d+\.)")
_RATIO = re.compile(r"([-+]?\d+)/([-+]?\d+)")
_FRAC = re.compile(r"([-+]?)(\d+)?\\frac\{([-+]?[\d.,]+)\}\{([-+]?[\d.,]+)\}")
_MIXED = re.compile(r"([-+]?)(\d+)[ \t]+(\d+)/(\d+)")
_SCIENTIFIC = re.compile(
    r"(.+?)(?:\\times|\\cdot|\*)10\^(?:\{([-+]?\d{1,3})\}|([-+]?\d{1,3}))|([-+]?[\d.]+)[eE]([-+]?\d{1,3})"
)

_LONGEST_READ = 1000
"""Characters; a longer answer is compared as text. Repetition can produce more digits than Python converts."""

_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}
_WORDS = {"yes", "no", "true", "false"}
"""Words compared without case. Others are case-sensitive: A and a may be two points."""


def extract_answer(text: str) -> str | None:
    """The final answer in `text`, verbatim; None where there is none."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _braced(text, boxes[-1].end())
    marked = _GSM8K.findall(text)
    if marked:
        return str(marked[-1]).strip()
    numbers = _LAST_NUMBER.findall(text)
    return str(numbers[-1]) if numbers else None


def answers_equal(generated: str | None, expected: str) -> bool:
    """Whether two final answers (not whole solutions) are equal; None, no answer, equals nothing."""
    if generated is None or not generated.strip():
        return False
    if max(len(generated), len(expected)) > _LONGEST_READ:
        return _as_text(_without_look(generated)) == _as_text(_without_look(expected))
    return _same(_read(generated), _read(expected))


def _braced(text: str, start: int) -> str | None:
    """The content of the brace group opened just before `start`; None where it is not closed."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace opens and closes nothing
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position].strip()
        position += 1
    return None


@dataclass(frozen=True)
class _Answer:
    """An answer as read: a number, a bracketed or bare list, or a text."""

    number: Fraction | None = None
    elements: tuple[_Answer, ...] = ()
    brackets: str = ""
    """Of a list: its two brackets, empty for a bare one."""
    text: str = ""
    unit: str = ""
    name: str = ""


def _same(a: _Answer, b: _Answer) -> bool:
    if (a.name and b.name and a.name != b.name) or (a.unit and b.unit and a.unit != b.unit):
        return False
    if a.number is not None or b.number is not None:
        return a.number == b.number
    if a.brackets != b.brackets or len(a.elements) != len(b.elements):
        return False
    if not a.elements:
        return a.text == b.text
    if a.brackets != r"\{\}":
        return all(_same(x, y) for x, y in zip(a.elements, b.elements, strict=True))
    left = list(b.elements)
    for element in a.elements:
        match = next((other for other in left if _same(element, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _read(text: str) -> _Answer:
    text = _without_look(text)
    named = _NAME.fullmatch(text)
    if named is not None:
        return dataclasses.replace(_read_value(named[2].strip()), name=named[1].replace(" ", ""))
    return _read_value(text)


def _read_value(text: str) -> _Answer:
    if (wrapped := re.fullmatch(_TEXT, text)) is not None:
        return _read(wrapped[1])
    number = _number(text)
    if number is not None:
        return _Answer(number)
    value, unit = _split_unit(text)
    if unit and (number := _number(value)) is not None:
        return _Answer(number, unit=unit)
    for opening in _BRACKETS:
        closing = next((mark for mark in _BRACKETS.values() if text.endswith(mark)), None)
        # (0, 1] is an interval; a set's braces close a set alone.
        if text.startswith(opening) and closing is not None and (opening == r"\{") == (closing == r"\}"):
            inner = _split_at_commas(text[len(opening) : -len(closing)])
            if inner is not None and len(inner) + (opening == r"\{") > 1:
                return _Answer(elements=tuple(_read(part) for part in inner), brackets=opening + closing)
    parts = _split_at_commas(text)
    if parts is not None and len(parts) > 1 and all(parts):
        return _Answer(elements=tuple(_read(part) for part in parts))
    return _Answer(text=_as_text(text))


def _without_look(text: str) -> str:
    """`text` without formatting."""
    text = text.translate(_CHARACTERS).strip()
    text = re.sub(r"(?<!\\)\\ ", " ", text.replace("{,}", ",").replace("~", " "))
    text = _LOOK_ALONE.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = text.strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text.strip("$").strip()
    elif text.count("$") == 1 and text.endswith("$") and not text.endswith(r"\$"):
        text = text[:-1].strip()
    while text.endswith(".") and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text


def _split_unit(text: str) -> tuple[str, str]:
    """A quantity's value and unit, in one spelling; the unit is empty where there is none."""
    if (value := re.sub(r"\s*\\?%$", "", text)) != text:
        return value, _OF_PERCENT
    if (value := _DEGREE.sub("", text)) != text:
        return value, _OF_DEGREE
    if (value := _CURRENCY.sub(r"\1", text, count=1)) != text and _CURRENCY.match(text):
        rest, unit = _split_unit(value)
        # "$5 dollars" is one unit; "$5 cm" is none.
        symbol = "€" if "€" in text else "£" if "£" in text else _OF_DOLLAR
        return (rest, symbol) if unit in ("", symbol) else (text, "")
    if text.endswith(("€", "£")):
        return text[:-1].removesuffix("\\").rstrip(), text[-1]
    found = _UNIT_TEXT.fullmatch(text)
    if found is not None:
        unit = found[2]
    else:
        found = _UNIT_WORD.fullmatch(text)
        if found is None:
            return text, ""
        unit = found["unit"]
    unit = re.sub(r"\s+", " ", unit.strip().rstrip(".").casefold())
    unit = unit[:-1] if len(unit) > 2 and unit.endswith("s") else unit
    power = re.sub(r"[\s{}]", "", found["power"] or "")
    return found["value"], _SYNONYMS.get(unit, unit) + power


def _number(text: str) -> Fraction | None:
    """The value of a number, exactly; None for anything else."""
    mixed = _MIXED.fullmatch(text)
    if mixed is not None:
        return _mixed(*mixed.groups())
    text = re.sub(r"(?<=\d)\s+(?=\d{3}(?:\D|$))(?!\d+/)", "", text)  # 10 000
    text = re.sub(r"\s*(\\times|\\cdot|\*|/|\^|[{}])\s*", r"\1", text)
    text = re.sub(r"^([-+])\s+", r"\1", text)
    text = re.sub(r"(?<=\d)\s+(?=\\frac)", "", text)
    if re.fullmatch(r"\{[^{}]*\}", text):
        text = text[1:-1]
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", "").rstrip("."))
    ratio = _RATIO.fullmatch(text)
    if ratio is not None:
        return _quotient(Fraction(ratio[1]), Fraction(ratio[2]))
    frac = _FRAC.fullmatch(text)
    if frac is not None:
        return _latex_fraction(*frac.groups())
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None:
        mantissa = _number(scientific[1] or scientific[4])
        exponent = int(scientific[2] or scientific[3] or scientific[5])
        return None if mantissa is None else mantissa * Fraction(10) ** exponent
    return None


def _quotient(numerator: Fraction, denominator: Fraction) -> Fraction | None:
    return None if denominator == 0 else numerator / denominator


def _mixed(sign: str, whole: str, numerator: str, denominator: str) -> Fraction | None:
    part = _quotient(Fraction(numerator), Fraction(denominator))
    if part is None:
        return None
    value = Fraction(whole) + part
    return -value if sign == "-" else value


def _latex_fraction(sign: str, whole: str | None, numerator: str, denominator: str) -> Fraction | None:
    r"""`\frac{a}{b}`, with a whole part in front (`1\frac{1}{2}`, for positive integers a and b) or without."""
    if whole is not None:
        return _mixed(sign, whole, numerator, denominator) if numerator.isdigit() and denominator.isdigit() else None
    if not _DECIMAL.fullmatch(numerator) or not _DECIMAL.fullmatch(denominator):
        return None
    above, below = (Fraction(part.replace(",", "").rstrip(".")) for part in (numerator, denominator))
    value = _quotient(above, below)
    return -value if value is not None and sign == "-" else value


def _split_at_commas(text: str) -> list[str] | None:
    """The parts between commas outside of brackets; None where the brackets do not match."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\" and text[position + 1 : position + 2] not in ("{", "}"):
            position += 1
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
        position += 1
    if depth != 0:
        return None
    return [*parts, text[start:].strip()]


def _as_text(text: str) -> str:
    """The normalised text of an answer that is neither a number nor a list."""
    text = re.sub(_TEXT, r"\1", text)
    text = re.sub(r"\^\{(\w)\}", r"^\1", text)
    text = re.sub(r"_\{(\w)\}", r"_\1", text)
    text = re.sub(r"\s+", "", text)
    return text.casefold() if text.casefold() in _WORDS else text
