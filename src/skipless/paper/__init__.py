"""The paper: its numbers, recipes, tables and claims."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "experiments": ["Arm", "PaperTable", "Scale"],
        "recipes": ["recipe"],
        "records": ["Record"],
        "runs": ["Run"],
        "tables": ["TABLES"],
    },
)
