"""Figures, drawn with matplotlib in one style."""

from skipless import lazy

__getattr__, __dir__, __all__ = lazy.exports(
    __name__,
    {
        "inspection": ["inspection_figure"],
        "style": ["render"],
    },
)
