import pickle
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipless.data.loader import Permutation, Prefetch, TokenLoader
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes
from skipless.ops.layout import Layout


@pytest.fixture(scope="module")
def store(sources, tmp_path_factory) -> TokenStore:
    out = tmp_path_factory.mktemp("bytes")
    prepare(Preparation(str(sources), Bytes(), valid_fraction=0.1, shard_mb=0.1), out)
    return TokenStore(out)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_a_permutation_reaches_each_place_once(size, seed, epoch):
    order = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_a_permutation_is_fixed_for_ever_and_looks_random():
    assert Permutation(10, 3, 1)(np.arange(10)).tolist() == [4, 0, 8, 2, 1, 9, 3, 5, 7, 6]
    size = 10_007
    order = Permutation(size, 0)(np.arange(size))
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.03
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert np.mean(order == Permutation(size, 0, 1)(np.arange(size))) < 0.001
    huge = Permutation(2**45 + 1, 1)(np.arange(1000) * 2**35)
    assert len(set(huge.tolist())) == 1000
    assert 0 <= huge.min() <= huge.max() <= 2**45


@settings(max_examples=30)
@given(
    length=st.integers(1, 3000),
    share=st.integers(1, 5),
    world=st.integers(1, 4),
    seed=st.integers(0, 9),
    step=st.integers(0, 10**9),
)
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(store, length, share, world, seed, step):
    size = share * world
    alone = TokenLoader(store, length, size, seed).batch(step).tokens
    ranks = [TokenLoader(store, length, size, seed, rank, world).batch(step).tokens for rank in range(world)]
    assert alone.shape == (size, length + 1)
    assert alone.dtype == torch.int64
    assert torch.equal(torch.cat(ranks), alone)


@settings(max_examples=20)
@given(length=st.integers(5000, 50_000), batch=st.integers(1, 50), seed=st.integers(0, 9))
def test_each_window_is_seen_once_in_an_epoch(store, length, batch, seed):
    loader = TokenLoader(store, length, batch, seed)
    steps = -(-3 * loader.windows // batch)
    seen = np.concatenate([loader.window_ids(step) for step in range(steps)])
    for epoch in range(3):
        mine = seen[epoch * loader.windows : (epoch + 1) * loader.windows]
        assert np.array_equal(np.sort(mine), np.arange(loader.windows))


def test_batches_hold_the_shards_tokens(store):
    tokens = np.concatenate([np.fromfile(store.folder / shard.file, store.dtype) for shard in store.shards])
    assert len(store.shards) > 4
    assert np.array_equal(np.concatenate(list(store.pieces(1000))), tokens)
    loader = TokenLoader(store, 777, 32, seed=5)
    batch = loader.batch(11)
    for row, window in zip(batch.tokens.numpy(), loader.window_ids(11), strict=True):
        assert np.array_equal(row, tokens[window * 777 : window * 777 + 778])
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize("world", [1, 3])
def test_a_sweep_sees_every_window_once_in_order(store, world):
    loaders = [TokenLoader(store, 999, 12, rank=rank, world=world) for rank in range(world)]
    found = [list(loader.sweep()) for loader in loaders]
    assert len({len(batches) for batches in found}) == 1
    rows = torch.cat([torch.cat([batch.tokens for batch in step]) for step in zip(*found, strict=True)])
    assert len(rows) == loaders[0].windows == (len(store) - 1) // 999
    assert np.array_equal(rows[:, :-1].reshape(-1).numpy(), store.read(0, rows[:, :-1].numel()))


def test_document_ids_follow_the_end_token(store):
    batch = TokenLoader(store, 30_000, 4, seed=1, documents=True).batch(0)
    assert batch.documents is not None
    for row, ids in zip(batch.inputs.tolist(), batch.documents.tolist(), strict=True):
        document = 0
        for token, found in zip(row, ids, strict=True):
            assert found == document
            document += token == store.end
    assert batch.documents.max() > 0
    layout = Layout.packed(batch.documents)
    after = torch.nonzero(batch.inputs[:, :-1] == store.end)
    assert all(layout.query_locations[row, at + 1] == 0 for row, at in after.tolist())


def test_prefetched_batches_are_those_of_the_steps_and_the_thread_ends(store):
    loader = TokenLoader(store, 100, 8, seed=2)
    with loader.batches(start=40) as batches:
        for step in range(40, 60):
            assert torch.equal(next(batches).tokens, loader.batch(step).tokens)
    assert not any(thread.name == "skipless-loader" for thread in threading.enumerate())
    assert list(batches) == []


def test_an_error_in_the_thread_reaches_the_reader():
    def broken():
        yield from ()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        next(Prefetch(broken()))


def test_waiting_is_hidden_behind_work(store):
    loader = TokenLoader(store, 512, 16)
    with loader.batches() as batches:
        next(batches)
        waited = 0.0
        for _ in range(20):
            time.sleep(0.01)
            began = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - began
        assert waited < 0.05


def test_errors_name_the_nearest_value(store):
    with pytest.raises(ValueError, match="batch_size=10 does not divide over 4 ranks: use 8 or 12"):
        TokenLoader(store, 10, 10, world=4)
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        TokenLoader(store, 10, 0)
    with pytest.raises(ValueError, match=r"batch_size is 4\.5; it must be a whole number"):
        TokenLoader(store, 10, 4.5)
    with pytest.raises(ValueError, match=rf"use length ≤ {len(store) - 1}"):
        TokenLoader(store, len(store), 1)
    with pytest.raises(ValueError, match="rank=2 of world=2"):
        TokenLoader(store, 10, 2, rank=2, world=2)
    with pytest.raises(ValueError, match="step=-1"):
        TokenLoader(store, 10, 2).batch(-1)
    with pytest.raises(ValueError, match="ahead=0"):
        TokenLoader(store, 10, 2).batches(ahead=0)
    assert TokenLoader(store, len(store) - 1, 64).batch(3).tokens.shape == (64, len(store))


def test_stores_and_loaders_go_to_other_processes(store):
    """As a DataLoader sends them, which Python 3.14 starts afresh; they could not be pickled."""
    loader = TokenLoader(store, 50, 4, seed=3)
    copies = pickle.loads(pickle.dumps((store, loader)))
    assert np.array_equal(copies[0].read(5, 9), store.read(5, 9))
    assert torch.equal(copies[1].batch(7).tokens, loader.batch(7).tokens)
