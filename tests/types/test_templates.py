"""The limits of a published prompt template in the agent's process."""
# ruff: noqa: E501 -- a template is one line

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from agentlightning.types import PromptTemplate
from agentlightning.types.templates.fstring import MOST_CHARACTERS

TOKEN = "a-token-of-this-process"


@dataclass
class Task:
    question: str = "q"


def filled(template: str, **values: Any) -> str:
    return PromptTemplate(template=template, engine="f-string").format(**values)


def rendered(template: str, **values: Any) -> str:
    return PromptTemplate(template=template, engine="jinja").format(**values)


# --- f-string ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("Classify: {ticket}", "Classify: T"),
        ("{{not a gap}} {ticket}", "{not a gap} T"),
        ("{ticket!r:>5}", "  'T'"),
        ("{price:,.2f}", "1,234.50"),
        ("{price:010.1f}", "00001234.5"),
        ("{task[question]} {task[tags][1]} {task[1]}", "why? b one"),
        ("", ""),
    ],
)
def test_gaps_are_names_entries_and_formats(template: str, prompt: str) -> None:
    task = {"question": "why?", "tags": ["a", "b"], 1: "one"}
    assert filled(template, ticket="T", price=1234.5, task=task) == prompt


@pytest.mark.parametrize(
    "template",
    [
        "{x.__init__.__globals__[TOKEN]}",
        "{x.question}",
        "{x[question].question}",
        "{x[__class__]}",
        "{x.__class__.__mro__!r}",
        "{deep[a].__class__}",
        "{deep[a][0].__class__.__init__.__globals__}",
        "{_hidden}",
        "{__builtins__}",
        "{0}",
        "{}",
        "{deep[a]b}",
        "{deep[a}",
        "{name!x}",
        "{name:{width}}",
        "{name:300000000}",
        "{name:>300000000}",
        "{number:.300000000f}",
        "{number:0300000000}",
        "{number:\N{ARABIC-INDIC DIGIT NINE}\N{ARABIC-INDIC DIGIT NINE}\N{ARABIC-INDIC DIGIT NINE}999}",
        "{name:" + "9" * 5000 + "}",
        "{day:" + "%c" * 4_000_000 + "}",
        "{day:" + "%c" * 128 + "%}",
        "{" + "a." * 100_000 + "b}",
        "{",
        "}",
    ],
)
def test_a_gap_that_walks_or_widens_is_refused_by_name(template: str) -> None:
    values: dict[str, Any] = {"deep": {"a": [Task()]}, "name": "n", "number": 1.5, "width": 3, "_hidden": TOKEN}
    values["day"] = datetime(2026, 1, 2)
    with pytest.raises(ValueError, match=r"[Pp]laceholder|format string|brace|'\{'|'\}'|expected '\}'") as refused:
        filled(template, x=Task(), **values)
    assert TOKEN not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_missing_gap_names_itself_and_what_was_given() -> None:
    with pytest.raises(KeyError, match="answer") as missing:
        filled("{answer}", question="q")
    assert "got: question" in missing.value.__notes__[0]


def test_a_template_of_poml_is_filled_by_poml_alone() -> None:
    with pytest.raises(NotImplementedError, match="poml"):
        PromptTemplate(template="x", engine="poml").format()


def test_a_filled_prompt_has_a_bound() -> None:
    with pytest.raises(ValueError, match=str(MOST_CHARACTERS)):
        filled("{x}" * 40, x="a" * 1_000_000)


# --- jinja -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{% for x in xs %}{{ loop.index }}:{{ x }};{% endfor %}", "1:a;2:b;"),
        ("{% for x in xs if x != 'a' %}{{ x }}{{ loop.length }}{% endfor %}", "b1"),
        ("{{ task.question }} {{ task['question'] }} {{ d.question }} {{ d.items()|length }}", "q q D 1"),
        ("{{ xs|join(', ') }} {{ ', '.join(xs) }}", "a, b a, b"),
        ("{{ text|upper|indent(2)|trim }} {{ text.split()|length }} {{ text[:3] }}", "ONE\n  TWO 2 one"),
        ("{{ '%05.1f'|format(2.5) }} {{ '%s-%s' % ('a', 1) }}", "002.5 a-1"),
        ("{{ 3 * 4 + 2 ** 3 }} {{ '=' * 10 }} {{ [1] * 3 }}", "20 ========== [1, 1, 1]"),
        ("{{ 'a' ~ 1 ~ none }} {{ d|tojson }}", 'a1None {"question": "D"}'),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{{ m('b') }}", "<1><b>"),
        ("{% set ns = namespace(n=0) %}{% for x in range(1000) %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "499500"),
        ("{{ 'x'|center(5) }}|{{ 'x'.rjust(3) }}|{{ xs|batch(1)|list }}", "  x  |  x|[['a'], ['b']]"),
        ("{{ 1 < n <= 3 }} {{ 'a' in xs }} {{ 'z' not in xs }} {{ 'question' in d }} {{ xs == ['a', 'b'] }}", "True True True True True"),
        ("{{ xs|select('in', ['b', 'c'])|list }} {{ [1, 2, 3]|reject('odd')|list }} {{ words|selectattr('n', 'gt', 1)|list }}", "['b'] [2] [{'n': 2}]"),
        ("{{ text is defined and none is none and n is divisibleby 3 }} {{ {n: 1, 'k': 2}[n] }} {{ xs[1:] }} {{ xs|unique|sort|max }}", "True 1 ['b'] b"),
        ("{% for w in range(20000) if w in big %}{% endfor %}{{ text.strip() }} {{ 'a b c'.rsplit(' ', 1) }}", "one\ntwo ['a b', 'c']"),
        ("{{ text|truncate(20000) }}{{ none|default(1000000) }}", "one\ntwoNone"),
        ("{{ xs|map('upper')|list }} {{ [1, 2]|sum }} {{ words|sort(attribute='n')|map(attribute='n')|join }}", "['A', 'B'] 3 12"),
    ],
)  # fmt: skip
def test_what_prompts_do_in_jinja(template: str, prompt: str) -> None:
    values: dict[str, Any] = {"xs": ["a", "b"], "task": Task(), "d": {"question": "D"}, "text": "one\ntwo"}
    assert rendered(template, words=[{"n": 2}, {"n": 1}], n=3, big=dict.fromkeys(range(30_000)), **values) == prompt


def test_a_name_that_jinja_was_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="missing"):
        rendered("{{ missing }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ x.__init__.__globals__ }}",
        "{{ x['__class__'] }}",
        "{{ x|attr('__class__') }}",
        "{{ [x]|map(attribute='__class__')|join }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ '{0:300000000}'.format(1) }}",
        "{{ '{a:300000000}'.format_map({'a': 1}) }}",
        "{{ ('{0:300000000}'|safe).format(1) }}",
        "{{ (5).to_bytes(300000000) }}",
        "{{ 'a\tb'.expandtabs(300000000) }}",
        "{{ dict.fromkeys(range(10)) }}",
        "{{ 'a'.translate({97: 'b' * 1000}) }}",
        "{{ lipsum(n=100000) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% for n in range(100001) %}{% endfor %}",
    ],
)
def test_a_jinja_template_stays_in_its_sandbox(template: str) -> None:
    with pytest.raises((SecurityError, TemplateError, TypeError, OverflowError)):
        rendered(template, x=Task())


GROWING = [
    "{{ 'a' * 300000000 }}",
    "{{ 300000000 * 'a' }}",
    "{{ ('a'|safe) * 300000000 }}",
    "{{ [1] * 300000000 }}",
    "{{ [1] * 3000000 * 300 }}",
    "{{ 'a'|center(300000000) }}",
    "{{ 'a'.center(300000000) }}",
    "{{ 'a'.ljust(width) }}",
    "{{ 'a'.zfill(300000000) }}",
    "{{ 'a'|indent(300000000, true) }}",
    "{{ ('a\n' * 100000)|indent(10000) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x' * 10000000) }}",
    "{{ [1]|batch(300000000, 'x')|list }}",
    "{{ [1]|slice(300000000)|list }}",
    "{{ 1.5|round(300000000, 'ceil') }}",
    "{{ {'a': 1}|tojson(indent=300000000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ range(100000)|join('x' * 100000) }}",
    "{{ ('x' * 100000).join(range(100000)|map('string')) }}",
    "{{ range(100000)|map('string')|join('x' * 100000) }}",
    "{{ '%300000000d' % 1 }}",
    "{{ '%*d' % (300000000, 1) }}",
    "{{ '%(a)300000000d' % {'a': 1} }}",
    "{{ '%.300000000f'|format(1.5) }}",
    "{{ 2 ** 300000000 }}",
    "{% set ns = namespace(n=3) %}{% for i in range(100) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% set ns = namespace(s=['lol']) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=['lol']) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|string }}",
    "{% set ns = namespace(s=['lol']) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}",
    "{% set ns = namespace(s=['lol']) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ '%s' % ns.s }}",
    "{% set ns = namespace(s=['lol']) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ 'a' ~ ns.s }}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000)|select('odd')|list %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 4 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "{{ " + "[" * 400 + "1" + "]" * 400 + " }}" + "{{ 'a' * 300000000 }}",
    "{{ x }}" * 100_000,
    "a" * 2_000_000,
]


@pytest.mark.parametrize(
    "template",  # the later ones take seconds each
    [pytest.param(each, id=f"{n}", marks=[pytest.mark.heavy] if n >= 30 else []) for n, each in enumerate(GROWING)],
)
def test_a_jinja_template_that_grows_or_goes_on_is_refused(template: str) -> None:
    with pytest.raises((ValueError, UndefinedError)) as refused:
        rendered(template, x=Task(), width=300_000_000, n={"x": 1})
    assert len(str(refused.value)) < 500


NESTED = "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
COMPARING = [
    "{{ range(90000)|CHOOSE('in', range(90000)|list)|list|length }}",
    "{{ range(90000)|map('string')|CHOOSE('in', 'a' * 900000)|list|length }}",
    "{{ ([range(9000)|list] * 100)|CHOOSE('OP', range(9000)|list)|list|length }}",
    "{{ (['a' * 900000] * 40)|map('string')|CHOOSE('OP', 'a' * 900000)|list|length }}",
    "{% set x = range(9000)|list %}{% for i in range(9000) %}{{ 'a' if [i] OP x }}{% endfor %}",
    "{% set x, y = range(9000)|list, range(9000)|list %}{% for i in range(9000) %}{{ 'a' if x OP y }}{% endfor %}",
    "{% set x = range(9000)|list %}{% for i in range(9000) %}{{ 'a' if i is in x }}{% endfor %}",
    "{% set x = range(9000)|list %}{% for i in range(9000) if i in x %}{% endfor %}",
    "{% set x = 'a' * 900000 %}{% for i in range(9000) if i|string not in x %}{% endfor %}",
    "{% set x = 'a' * 900000 %}{% for i in range(9000) %}{% if x is lower and x is upper %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 900000 %}{% for i in range(9000) %}{% set y = x[1:] %}{% endfor %}",
    NESTED + "{{ ns.a OP ns.b }}",
    NESTED + "{{ 1 < 2 OP ns.a }}",
    NESTED + "{{ ns.a is eq ns.b }}",
    NESTED + "{{ [ns.a]|CHOOSE('ne', ns.b)|list }}",
    NESTED + "{{ [ns.a, ns.b]|ORDER|string|length }}",
    NESTED + "{{ {'a': ns.a, 'b': ns.b}.values()|ORDER|string|length }}",
    NESTED + "{{ [{'k': ns.a}, {'k': ns.b}]|map(attribute='k')|ORDER|string|length }}",
    NESTED + "{{ [{'k': ns.a}, {'k': ns.b}]|groupby('k')|length }}",
    NESTED + "{{ {}[ns.a] }}",
    NESTED + "{{ {ns.a: 1}|length }}",
    NESTED + "{{ dict([(ns.a, 1)])|length }}",
    NESTED + "{{ ns.a in {} }}",
    NESTED + "{% for i in range(2) %}{{ loop.changed(ns.a if i else ns.b) }}{% endfor %}",
    NESTED + "{{ ns }}",
    NESTED + "{{ [ns]|string }}",
    "{% set x = range(90000)|list %}{% for i in range(9) %}{{ x|sort|length }}{% endfor %}",
    "{{ range(0, 90000 * (2 ** 61 - 1), 2 ** 61 - 1)|unique|list|length }}",
    "{{ dict(range(0, 90000 * (2 ** 61 - 1), 2 ** 61 - 1)|batch(2))|length }}",
    "{{ ('a' * 1000000).rfind('b' ~ 'a' * 500000) }}",
    "{{ ('a' * 1000000).rsplit('b' ~ 'a' * 500000)|length }}",
    "{{ ('a' * 1000000)|trim('b' * 500000 ~ 'a')|length }}",
    "{{ '%300000000d' is odd }}",
    "{{ '%300000000d' is divisibleby 7 }}",
    "{{ ['%300000000d']|CHOOSE('even')|list }}",
    "{{ 'a'|round(9, 'ceil') }}",
    "{{ ([[1]] * 100000)|map('list')|sum(start=[], attribute=none)|length }}",
]
"""Templates whose time is spent in comparisons; `CHOOSE`, `OP` and `ORDER` stand for each of a kind."""


def _written_out(template: str) -> list[str]:
    if "CHOOSE" in template:
        return [part for name in ("select", "reject") for part in _written_out(template.replace("CHOOSE", name))]
    if "'OP'" in template:
        return [template.replace("OP", name) for name in ("==", "ne", "lessthan", ">=")]
    if "OP" in template:
        return [template.replace("OP", sign) for sign in ("==", "!=", "<", ">=", "in", "not in")]
    return (
        [template.replace("ORDER", name) for name in ("sort", "unique|list", "min", "max")]
        if "ORDER" in template
        else [template]
    )


COMPARISONS = list(dict.fromkeys(part for template in COMPARING for part in _written_out(template)))


@pytest.mark.heavy
@pytest.mark.parametrize("template", COMPARISONS, ids=[f"{number}" for number in range(len(COMPARISONS))])
def test_a_jinja_template_that_compares_without_end_is_refused_before_it_does(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.types.templates.counting.MOST_SECONDS", 1e9)  # the counts alone
    monkeypatch.setattr("agentlightning.types.templates.counting.MOST_WORK", 8_000_000)  # a test is quick
    with pytest.raises(ValueError, match=r"needs more work|accepts (only )?numbers"):
        rendered(template)


@pytest.mark.parametrize(
    "template", ["{{ 1 in [1] }}", "{{ [1]|select('odd')|list }}", "{{ 1 is odd }}", "{{ xs|map('upper')|list }}"]
)
def test_every_comparison_test_and_filter_looks_at_the_time(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.types.templates.counting.MOST_SECONDS", -1.0)
    with pytest.raises(ValueError, match="processor time"):
        rendered(template, xs=["a"])


ATTACK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from agentlightning.types import PromptTemplate
from tests.types.test_templates import GROWING
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for engine, templates in (("jinja", [each for each in GROWING if "range(" not in each]), ("f-string", ["{x:300000000}", "{x:.300000000}", "{x}" * 40])):
    for template in templates:
        try:
            PromptTemplate(template=template, engine=engine).format(x="a" * 1000000, width=300000000, n={"x": 1})
        except Exception:
            pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)  # KiB on Linux
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is that of Linux")
def test_no_template_makes_a_process_large(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-c", ATTACK, str(pytestconfig.rootpath)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=pytestconfig.rootpath, timeout=110)
    assert int(run.stdout) < 500
