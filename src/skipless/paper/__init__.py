"""The paper: its numbers, recipes, tables and claims."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "recipes": ["recipe"],
    },
)
