import dataclasses

import pytest

from skipless.paper.recipes import recipe, with_data
from skipless.training.config import DataConfig


def test_validation_text_is_prepared_beforehand(tmp_path):
    """data.valid names a prepared folder, as in training; one that is none is said before the corpus is read."""
    text = tmp_path / "text.txt"
    text.write_text("a few words\n" * 500)
    experiment = dataclasses.replace(recipe("wikitext103/pre-ln"), data=DataConfig(corpus=str(text), vocab=257))
    folder = with_data(experiment, tmp_path).data.folder
    again = with_data(experiment.override(f"data.valid={folder}"), tmp_path).data
    assert (again.folder, again.valid) == (folder, folder)
    with pytest.raises(ValueError, match=r"text\.txt is not a prepared folder"):
        with_data(experiment.override(f"data.valid={text}"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
