"""All items by name, in the paper's order."""

import difflib

from skipless.recipes.reproduce import items_closing, items_mirrored, items_more, items_skipless, items_skips
from skipless.recipes.reproduce.item import Item

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        items_more.KERNELS,
        items_skipless.BASELINES,
        items_skipless.ACTIVATIONS,
        items_skips.SKIPS,
        items_skips.C4,
        items_skips.C4_SKIPS,
        items_more.C4_LONGER,
        items_more.LONGER,
        items_skipless.DEPTH,
        items_skipless.QUERY_KEY,
        items_skipless.ORTHOGONAL,
        items_skipless.POSITIONS,
        items_skipless.POSITIONS_LONGER,
        items_skips.STABLE,
        items_skips.SEPARATE,
        items_more.DOWNSTREAM,
        items_more.TRAINING_KERNELS,
        items_more.OPTIMISERS,
        items_closing.CLOSING,
        items_closing.KEPT_ORTHOGONAL,
        items_closing.ROUNDING,
        items_closing.DEPTH_STEADY,
        items_mirrored.FACTORS,
        items_mirrored.MIRRORED,
        items_mirrored.LONGER,
        items_mirrored.DEPTH,
        items_mirrored.OTHERS,
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
