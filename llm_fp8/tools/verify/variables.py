"""Environment variables that do nothing or harm, by the table of llm_fp8/tools/verify/environment_rules.py."""

from __future__ import annotations

from collections.abc import Mapping

from llm_fp8.tools.verify import environment_rules as environment
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup


def judge(environ: Mapping[str, str]) -> Result:
    """What harms fails, what slows or does nothing is a warning."""
    problems = Problems()
    findings = environment.judge(environ)
    for found in findings:
        sentence = f"{found.name}={found.value} {found.says}"
        if found.level == "harmful":
            problems.fail(sentence, found.mend)
        else:
            problems.warn(sentence, found.mend)
    facts = {found.name: {"value": found.value, "level": found.level} for found in findings}
    return problems.result("" if findings else "none that does nothing or harms", facts=facts)


def check(setup: Setup) -> Result:
    """The environment as the user set it."""
    return judge(setup.environ)
