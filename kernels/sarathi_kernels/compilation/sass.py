"""The loop in which a kernel spends its time, read from its machine code: instructions by class.

A loop is a branch backwards. Of those that do the work (matrix products or, where the kernel has
none, floating-point arithmetic) and contain no other, the hot one does most of it and, where
several do as much, is the shortest: the loop without masks. Code without a loop counts as a whole.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod

import triton

# By the name before the first dot, as in NVIDIA's list of instructions ("CUDA Binary Utilities").
# Arithmetic is of floating-point numbers; what is not named is of integers: addresses, predicates,
# moves, uniform registers.
CLASSES = {
    "matrix": r"[HIQDB]?G?MMA|UTC\w*MMA",
    "conversion": r"F2FP?|F2I|I2FP?|FRND|PRMT",
    "arithmetic": r"[FDH](ADD|MUL|FMA|MNMX|SET|SETP|SEL|CHK)[23]?(_\w+)?|FSWZADD|HMNMX2",
    "special": r"MUFU",
    "memory": r"LD\w*|ST\w*|UBLK\w*|UTMA\w*|ATOM\w*|RED\w*|U?LDC\w*|CCTL\w*",
    "wait": r"BAR|\w*DEPBAR|SYNCS|UTCBAR|WARP\w*|FENCE|MEMBAR|ERRBAR|BSYNC|BSSY|NANOSLEEP|ACQ\w*",
    "other": r"SHFL|VOTE|REDUX|BRA|JMP|EXIT|NOP|ELECT|UCGA\w*",
}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]+)\*/ +(@!?\w+ +)?([A-Z][\w.]*)([^;]*);")
_HALF_TO_FLOAT = re.compile(r"HADD2\.F32")  # with zero: how float16 is widened


@cache  # a kernel has thousands of instructions of some dozens of names
def _kind(name: str) -> str:
    if _HALF_TO_FLOAT.match(name):
        return "conversion"
    base = name.split(".")[0]
    return next((kind for kind, names in CLASSES.items() if re.fullmatch(names, base)), "integer")


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    name: str  # with what is appended by dots
    operands: str
    is_predicated: bool

    @property
    def kind(self) -> str:
        """Its class, a name of CLASSES or "integer"."""
        return _kind(self.name)

    @property
    def products(self) -> int:
        """Multiplications of a matrix instruction, by the sizes in its name; those of tcgen05 are
        in a descriptor, and count as more than any other's.
        """
        if self.kind != "matrix":
            return 0
        sizes = re.search(r"\.(\d+)x(\d+)x(\d+)|\.(16)(8)(16|8|32)\b", self.name)
        return prod(int(size) for size in sizes.groups() if size) if sizes else 2**20

    @property
    def target(self) -> int | None:
        """The address that it branches to."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands) if self._branches else None
        return int(found.group(1), 16) if found else None

    @property
    def _branches(self) -> bool:
        return self.name.split(".")[0] == "BRA"


def disassembled(cubin: str) -> list[Instruction]:
    """The machine code of a file with one kernel. Raises ValueError if there is none."""
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    code = instructions_of(text)
    if not code:
        raise ValueError(f"{tool} printed no machine code for {cubin}: {text[:200]!r}")
    return code


def instructions_of(text: str) -> list[Instruction]:
    """The instructions of a listing by cuobjdump."""
    return [
        Instruction(int(address, 16), name, operands.strip(), bool(predicate))
        for address, predicate, name, operands in _INSTRUCTION.findall(text)
    ]


def hot_loop(code: list[Instruction]) -> list[Instruction]:
    """The instructions of one pass through the loop that does most of the work; all if there is
    no loop.
    """
    is_product = any(each.products for each in code)
    loops = [
        (loop, sum(each.products if is_product else each.kind == "arithmetic" for each in loop))
        for loop in map(set, _loops(code))
    ]
    working = [(loop, amount) for loop, amount in loops if amount]
    inner = [one for one in working if not any(other < one[0] for other, _ in working)]
    if not inner:
        return [each for each in code if each.name != "NOP"]
    hot = max(inner, key=lambda one: (one[1], -len(one[0])))[0]
    return [each for each in code if each in hot]


def by_class(code: list[Instruction]) -> dict[str, int]:
    """How many instructions of each class there are."""
    counts = Counter(each.kind for each in code)
    return {kind: counts[kind] for kind in (*CLASSES, "integer")}


def _loops(code: list[Instruction]) -> list[list[Instruction]]:
    """What lies between a branch backwards and its target; not where the program ends between
    them, since that is code moved out of the way that jumps back.
    """
    loops = []
    for last in code:
        target = last.target
        if target is None or target >= last.address:
            continue
        body = [each for each in code if target <= each.address <= last.address]
        if not any(each.name == "EXIT" and not each.is_predicated for each in body):
            loops.append(body)
    return loops
