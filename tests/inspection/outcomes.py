"""What an inspection says of the faults of the six catalogues, and of sound networks.

python -m tests.inspection.outcomes mistakes     # a table: found, with the right block, with the right cause
"""

import argparse
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from types import ModuleType
from zlib import crc32

import transformers
from tests.inspection import bugs, catalogue, held_out, mistakes, oversights, slips
from tests.inspection.catalogue import Case, Size, build

from skipless.inspection.inspect import inspect
from skipless.inspection.inspection import Inspection

SETS: dict[str, ModuleType] = {
    "catalogue": catalogue,
    "held_out": held_out,
    "mistakes": mistakes,
    "slips": slips,
    "oversights": oversights,
    "bugs": bugs,
}


@dataclass(frozen=True)
class Outcome:
    """Whether a fault was found, with its block, with its cause; and what was said."""

    found: bool
    block: bool
    cause: bool
    said: str


def set_of(fault: str) -> ModuleType:
    """The catalogue that has the fault."""
    return next(each for each in SETS.values() if fault in each.FAULTS)


def said(found: Inspection) -> str:
    return " ".join([found.verdict.text, found.advice, *found.notes])


def outcome(
    fault: str, architecture: str, place: int, beyond: Container[tuple] = (), depth: int = Size.depth
) -> Outcome | None:
    """Of a fault in the first (0), a middle (1) or the last block (2); None where it has no place, and where `beyond`
    holds (fault,), (fault, architecture) or (fault, architecture, block). A refusal counts where it names the cause.
    """
    known = set_of(fault)
    case, planted = build(known.ARCHITECTURES[architecture], Size(depth, seed=place)), known.FAULTS[fault]
    stack = case.stacks[crc32(f"{architecture}{fault}{place}".encode()) % len(case.stacks)]
    blocks = case.blocks(stack)
    at = planted.fixed if planted.fixed is not None else (0, len(blocks) // 2, len(blocks) - 1)[place]
    if any(each in beyond for each in ((fault,), (fault, architecture), (fault, architecture, at + 1))):
        return None
    words = planted.plant(case, stack, at)
    if words is None:
        return None
    try:
        found = inspect(case.model, case.batch, keep_kernels=False)
    except ValueError as error:
        refused = any(word in str(error) for word in words)
        return Outcome(refused, refused, refused, f"{type(error).__name__}: {error}")
    noted = [note for note in found.notes if planted.noted and any(word in note for word in words)]
    lost, name = found.verdict.lost or bool(noted), blocks[at][0]
    where = found.blocks[found.verdict.block or 0].name
    named = where == name or any(name in note for note in noted)
    cause = lost and any(word in said(found) for word in words)
    return Outcome(lost, lost and (planted.whole or named), cause, said(found))


def accused(case: Case) -> str:
    """What is said against a sound network; nothing where nothing is."""
    found = inspect(case.model, case.batch, keep_kernels=False)
    return "" if found.healthy and not found.doubts else said(found)


def main() -> None:
    """Print the table of one catalogue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("catalogue", choices=SETS)
    parser.add_argument("--said", action="store_true", help="and what was said where a fault was not named")
    parser.add_argument("--fault", help="only faults whose name holds this")
    parser.add_argument("--depth", type=int, default=Size.depth, help="blocks of a stack; of one, one place is tried")
    parser.add_argument("--only", nargs="+", help="only these architectures")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known, total = SETS[arguments.catalogue], Counter[str]()
    names, places = arguments.only or [*known.ARCHITECTURES], range(min(arguments.depth, 3))
    print(f"{'mistake':45s} of  found  block  cause")
    for fault in known.FAULTS:
        if arguments.fault not in fault if arguments.fault else False:
            continue
        tried = [(n, place, outcome(fault, n, place, depth=arguments.depth)) for n in names for place in places]
        every = [(name, place, each) for name, place, each in tried if each is not None]
        count = Counter(of=len(every))
        for name, place, each in every:
            count += Counter(found=each.found, block=each.block, cause=each.cause)
            if arguments.said and not (each.found and each.block and each.cause):
                print(f"  {name} {place}: {each.said}")
        total += count
        print(
            f"{fault:45s} {count['of']:2d}  {count['found']:5d}  {count['block']:5d}  {count['cause']:5d}", flush=True
        )
    shares = ", ".join(f"{word} {total[word] / max(total['of'], 1):.1%}" for word in ("found", "block", "cause"))
    print(f"of {total['of']}: {shares}")
    if not arguments.fault and arguments.depth == Size.depth:
        _sound(known, names)


def _sound(known: ModuleType, names: Sequence[str]) -> None:
    sizes = [Size(depth, width, seed) for depth in (1, 2, 3, 6, 12) for width in (32, 64) for seed in (0, 1)]
    wrong = 0
    for name in names:
        for size in sizes:
            case = build(known.ARCHITECTURES[name], size)
            words = accused(case)
            if words:
                wrong += 1
                print(f"  {name} {size}: {words}")
    print(f"of {len(sizes) * len(names)} sound networks {wrong} accused or noted")


if __name__ == "__main__":
    main()
