"""The demo agent's tool: a calculator for the four basic operations."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

_ALLOWED: Final = re.compile(r"[\d\s.+*/()-]{1,200}")

TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an expression with + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for example 34 + 5"}},
                "required": ["expression"],
            },
        },
    }
]

_OPERATIONS: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Return the value of the expression as text (`"39"`, `"2.5"`), or `"error"` if it has none."""
    try:
        if not _ALLOWED.fullmatch(expression):
            return "error"
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("expected numbers, + - * / and parentheses")


def run_tool(name: str, arguments: str) -> str:
    """Run a tool call of the model with arguments as JSON text. Return `"error"` if it cannot be run."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error"
    return calculate(expression) if name == "calculator" and isinstance(expression, str) else "error"
