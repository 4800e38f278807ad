"""Experiments by name: every preset of the paper with App. H's schedule, and the demonstration's three arms."""

from skipless.recipes.by_name import names, recipe

__all__ = ["names", "recipe"]
