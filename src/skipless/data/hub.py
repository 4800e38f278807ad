"""WikiText-103 and C4 from the Hugging Face hub, through the `datasets` package (the extra skipless[data])."""

import hashlib
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from skipless.data.files import Seen
from skipless.data.formats import wikitext_articles

# name -> (repository, configuration, streaming)
DATASETS = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", False),
    "c4": ("allenai/c4", "en", True),
}


@dataclass(frozen=True)
class HubPart:
    """One split of a dataset on the hub. WikiText's lines are put together to articles; C4 is streamed."""

    dataset: str
    split: str

    @property
    def name(self) -> str:
        """For messages: "c4 train"."""
        return f"{self.dataset} {self.split}"

    def documents(self, skip: int = 0, seen: Seen | None = None) -> Iterator[str]:
        """The split's documents after the first `skip`; the hub is reached here and not before."""
        with _reaching(self.dataset):
            rows = self._rows()
            if self.dataset == "wikitext-103":
                lines = (row["text"].encode() for row in rows)
                yield from (text.decode() for text in islice(wikitext_articles(lines), skip, None) if text)
            else:
                yield from (row["text"] for row in rows.skip(skip))

    def _rows(self) -> Any:
        repository, configuration, streaming = DATASETS[self.dataset]
        try:
            datasets = import_module("datasets")
        except ImportError as error:
            raise ValueError(f"{self.dataset} needs Hugging Face datasets: pip install 'skipless[data]'") from error
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its five retries; the error says all
        return datasets.load_dataset(repository, configuration, split=self.split, streaming=streaming)

    def size(self) -> None:
        """Not known beforehand."""

    def fingerprint(self) -> str:
        """By name: the hub's files are taken as published."""
        return hashlib.sha256(repr((DATASETS[self.dataset], self.split)).encode()).hexdigest()


def parts(name: str, download: bool) -> tuple[HubPart, HubPart]:
    """The training and validation split of a named dataset, if going to the network is allowed."""
    if not download:
        raise ValueError(
            f"{name} comes from the Hugging Face hub, and no network is used unless asked for: add --download to "
            f"`skipless prepare {name}` or `skipless eval` (download=True), or give a path to text"
        )
    return HubPart(name, "train"), HubPart(name, "validation")


@contextmanager
def _reaching(name: str) -> Generator[None]:
    """One line for the many ways in which the hub cannot be reached."""
    try:
        yield
    except (ValueError, GeneratorExit):
        raise
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        raise OSError(
            f"{name} could not be read from the Hugging Face hub ({type(error).__name__}: {first[:200]}): check the "
            "network, HF_HUB_OFFLINE and any proxy, then run the same command again; or give a path to a copy, as in "
            "skipless prepare 'wikitext/*.parquet'"
        ) from error
