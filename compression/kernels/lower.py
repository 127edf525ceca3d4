"""Functions of whole numbers, written in Python, as LLVM IR: what runs step by step can also be compiled.

A function takes ``int`` and ``list[int]``, the address of its numbers, and returns ``int``. It may use names,
items, ``+ - *``, comparisons, ``and or not``, ``min``, ``max``, ``if``, ``while``, ``for`` over a ``range``,
``break``, ``continue``, ``return``, and call itself or one lowered with it. Numbers have 64 bits: who calls
sees to it that none grows longer, and that no index is negative.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable
from typing import Any

_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
_COMPARED = {ast.Lt: "slt", ast.LtE: "sle", ast.Gt: "sgt", ast.GtE: "sge", ast.Eq: "eq", ast.NotEq: "ne"}
_SHARED = """declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)"""


_PARSING = threading.Lock()
"""Two threads that parse at once break each other in Python 3.11 (gh-106905)."""


def lowered(*functions: Callable[..., int]) -> str:
    """The text of a module of these functions, each under its name."""
    with _PARSING:
        return "\n".join([_SHARED, *(_Lowering(function).text() for function in functions)])


class _Lowering:
    """One function: variables live in memory of their own, which LLVM makes registers."""

    def __init__(self, function: Callable[..., int]) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self._tree, self._lines, self._count = tree, list[str](), 0
        self._ends: list[tuple[str, str]] = []  # where ``continue`` and ``break`` go
        self._kinds = {
            a.arg: "ptr" if ast.unparse(a.annotation or a).startswith("list") else "i64"
            for a in tree.args.args
        }

    def text(self) -> str:
        """The function as LLVM IR."""
        stored = {
            node.id
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        arguments = ", ".join(f"{kind} %arg.{name}" for name, kind in self._kinds.items())
        head = [f"define i64 @{self._tree.name}({arguments}) {{", "entry:"]
        variables = sorted(stored | set(self._kinds))
        head += [f"  %{name} = alloca {self._kinds.get(name, 'i64')}" for name in variables]
        head += [f"  store {kind} %arg.{name}, ptr %{name}" for name, kind in self._kinds.items()]
        self._body(self._tree.body)
        return "\n".join([*head, *self._lines, "  unreachable", "}"])

    def _new(self, code: str) -> str:
        self._count += 1
        self._lines.append(f"  %.{self._count} = {code}")
        return f"%.{self._count}"

    def _labels(self, *names: str) -> list[str]:
        self._count += 1
        return [f"{name}.{self._count}" for name in names]

    def _begin(self, label: str) -> None:
        self._lines += [f"  br label %{label}", f"{label}:"]

    def _leave(self, code: str) -> None:
        """End the block; what follows, if anything, is never reached."""
        self._lines += [f"  {code}", f"{self._labels('after')[0]}:"]

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            getattr(self, f"_{type(statement).__name__.lower()}")(statement)

    def _expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        self._store(target, self._value(node.value))

    def _augassign(self, node: ast.AugAssign) -> None:
        at = self._place(node.target)
        old = self._new(f"load i64, ptr {at}")
        new = self._new(f"{_OPERATORS[type(node.op)]} i64 {old}, {self._value(node.value)}")
        self._lines.append(f"  store i64 {new}, ptr {at}")

    def _store(self, target: ast.expr, value: str) -> None:
        self._lines.append(f"  store i64 {value}, ptr {self._place(target)}")

    def _place(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return f"%{node.id}"
        assert isinstance(node, ast.Subscript)
        base = self._new(f"load ptr, ptr {self._place(node.value)}")
        return self._new(f"getelementptr i64, ptr {base}, i64 {self._value(node.slice)}")

    def _if(self, node: ast.If) -> None:
        yes, no, end = self._labels("yes", "no", "end")
        self._branch(node.test, yes, no)
        self._lines.append(f"{yes}:")
        self._body(node.body)
        self._lines += [f"  br label %{end}", f"{no}:"]
        self._body(node.orelse)
        self._begin(end)

    def _while(self, node: ast.While) -> None:
        test, run, end = self._labels("test", "run", "end")
        self._begin(test)
        self._branch(node.test, run, end)
        self._lines.append(f"{run}:")
        self._ends.append((test, end))
        self._body(node.body)
        self._ends.pop()
        self._lines += [f"  br label %{test}", f"{end}:"]

    def _for(self, node: ast.For) -> None:
        assert isinstance(node.iter, ast.Call)
        assert isinstance(node.target, ast.Name)
        bounds = [self._value(bound) for bound in node.iter.args]
        low, high = bounds if len(bounds) == 2 else ["0", *bounds]
        test, run, more, end = self._labels("test", "run", "more", "end")
        index = f"%{node.target.id}"
        self._lines.append(f"  store i64 {low}, ptr {index}")
        self._begin(test)
        now = self._new(f"load i64, ptr {index}")
        self._lines.append(f"  br i1 {self._new(f'icmp slt i64 {now}, {high}')}, label %{run}, label %{end}")
        self._lines.append(f"{run}:")
        self._ends.append((more, end))
        self._body(node.body)
        self._ends.pop()
        self._begin(more)
        done = self._new(f"load i64, ptr {index}")
        self._lines.append(f"  store i64 {self._new(f'add i64 {done}, 1')}, ptr {index}")
        self._lines += [f"  br label %{test}", f"{end}:"]

    def _break(self, _: ast.Break) -> None:
        self._leave(f"br label %{self._ends[-1][1]}")

    def _continue(self, _: ast.Continue) -> None:
        self._leave(f"br label %{self._ends[-1][0]}")

    def _return(self, node: ast.Return) -> None:
        assert node.value is not None
        self._leave(f"ret i64 {self._value(node.value)}")

    def _branch(self, node: ast.expr, yes: str, no: str) -> None:
        """End the block by going to ``yes`` or ``no``; of ``and`` and ``or`` runs what must."""
        if isinstance(node, ast.BoolOp):
            for operand in node.values[:-1]:
                (more,) = self._labels("more")
                both = isinstance(node.op, ast.And)
                self._branch(operand, *((more, no) if both else (yes, more)))
                self._lines.append(f"{more}:")
            self._branch(node.values[-1], yes, no)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._branch(node.operand, no, yes)
        else:
            assert isinstance(node, ast.Compare), ast.unparse(node)
            left, right = self._value(node.left), self._value(node.comparators[0])
            test = self._new(f"icmp {_COMPARED[type(node.ops[0])]} i64 {left}, {right}")
            self._lines.append(f"  br i1 {test}, label %{yes}, label %{no}")

    def _value(self, node: Any) -> str:
        if isinstance(node, ast.Constant):
            constant: Any = node.value
            return str(int(constant))
        if isinstance(node, ast.Name):
            return self._new(f"load {self._kinds.get(node.id, 'i64')}, ptr %{node.id}")
        if isinstance(node, ast.Subscript):
            return self._new(f"load i64, ptr {self._place(node)}")
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left), self._value(node.right)
            return self._new(f"{_OPERATORS[type(node.op)]} i64 {left}, {right}")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._new(f"sub i64 0, {self._value(node.operand)}")
        assert isinstance(node, ast.Call), ast.unparse(node)
        assert isinstance(node.func, ast.Name), ast.unparse(node)
        values = [self._value(argument) for argument in node.args]
        if node.func.id in ("min", "max"):
            return self._new(f"call i64 @llvm.s{node.func.id}.i64(i64 {values[0]}, i64 {values[1]})")
        given = ", ".join(
            f"{self._kinds.get(getattr(argument, 'id', ''), 'i64')} {value}"
            for argument, value in zip(node.args, values, strict=True)
        )
        return self._new(f"call i64 @{node.func.id}({given})")
