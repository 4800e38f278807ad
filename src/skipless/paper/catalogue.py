"""All items by name, in the paper's order."""

import difflib

from skipless.paper import extensions, mirrored, skipless, skips
from skipless.paper.experiments import Item

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        extensions.KERNELS,
        skipless.BASELINES,
        skipless.ACTIVATIONS,
        skips.SKIPS,
        skips.C4,
        skips.C4_SKIPS,
        extensions.C4_LONGER,
        extensions.LONGER,
        skipless.DEPTH,
        skipless.QUERY_KEY,
        skipless.ORTHOGONAL,
        skipless.POSITIONS,
        skipless.POSITIONS_LONGER,
        skips.STABLE,
        skips.SEPARATE,
        extensions.DOWNSTREAM,
        extensions.TRAINING_KERNELS,
        extensions.OPTIMISERS,
        extensions.CLOSING,
        extensions.KEPT_ORTHOGONAL,
        extensions.ROUNDING,
        extensions.DEPTH_STEADY,
        mirrored.FACTORS,
        mirrored.MIRRORED,
        mirrored.LONGER,
        mirrored.DEPTH,
        mirrored.OTHERS,
    )
}


def items_named(names: list[str]) -> list[Item]:
    """The items of these names, each once, in the order given; "all" is every one."""
    if not names:
        raise ValueError("name an item, such as baselines; `skipless reproduce --list` shows all")
    chosen: dict[str, Item] = {}
    for name in names:
        if name == "all":
            chosen |= {key: item for key, item in ITEMS.items() if key not in chosen}
        elif name in ITEMS:
            chosen[name] = ITEMS[name]
        else:
            near = difflib.get_close_matches(name, ITEMS, n=3, cutoff=0.4)
            raise ValueError(f"there is no item {name!r}; nearest: {', '.join(near) or ', '.join(ITEMS)}")
    return list(chosen.values())


def check_arms(items: list[Item], names: tuple[str, ...]) -> None:
    """Refuse a name that no chosen item has an arm of."""
    known = [arm.name for item in items for arm in item.arms]
    for name in names:
        if name != "all" and name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise ValueError(
                f"--arms names {name!r}, which no chosen item has; nearest: {', '.join(near or sorted(set(known)))}"
            )
