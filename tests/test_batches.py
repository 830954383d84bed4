from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debias_diffusion.training.batches import GlobalBatches
from debias_diffusion.training.optimizer import learning_rate

# (records, batch)
sizes = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda drawn: (drawn[0] + drawn[1], drawn[0]))


@given(sizes, st.integers(1, 5), st.integers(0, 1000))
def test_every_record_comes_once_an_epoch_and_never_twice_in_a_batch(size, epochs, seed):
    records, batch = size
    batches = GlobalBatches(records, batch, epochs, seed)
    steps = list(batches.iterate())
    assert len(steps) == batches.total_steps == records * epochs // batch
    assert all(len(step) == batch for step in steps)
    assert all(len({index for _, index, _ in step}) == batch for step in steps)
    seen = Counter((epoch, index) for epoch, index, _ in chain.from_iterable(steps))
    assert set(seen.values()) == {1}
    assert len(seen) + batches.remainder == records * epochs
    whole = [epoch for epoch in range(epochs) if sum(e == epoch for e, _ in seen) == records]
    assert len(whole) >= epochs - 1
    order = [(epoch, place) for epoch, _, place in chain.from_iterable(steps)]
    assert order == sorted(order)


@given(st.integers(1, 20), st.integers(3, 6), st.integers(0, 1000))
def test_what_stands_in_is_another_record_of_the_epoch_and_of_another_batch(batch, steps, seed):
    batches = GlobalBatches(batch * steps, batch, 2, seed)
    for step in batches.iterate():
        together = {index for _, index, _ in step}
        for epoch, _, place in step:
            records = batches.permutation(epoch)
            assert sorted(records) == list(range(batch * steps))
            assert records[(place + len(records) // 2) % len(records)] not in together  # see RecordDataset


@given(sizes, st.integers(0, 1000), st.data())
def test_any_start_and_any_number_of_processes_see_the_same(size, seed, data):
    records, batch = size
    world = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    start = data.draw(st.integers(0, records * 3 // batch))
    batches = GlobalBatches(records, batch, 3, seed)
    shared = [list(batches.iterate(start, rank, world)) for rank in range(world)]
    together = [list(chain.from_iterable(parts)) for parts in zip(*shared, strict=True)]
    assert together == list(batches.iterate())[start:]


def test_learning_rate_warms_up_to_the_peak_and_ends_at_nothing():
    rates = [learning_rate(step, 1000, 2.0, 200) for step in range(1000)]
    assert rates[199] == max(rates) == 2.0 and learning_rate(0, 10, 2.0, 0) == 2.0
    assert (rates[0], rates[600], rates[999]) == pytest.approx((2.0 / 200, 1.0, 0), abs=1e-4)
    assert rates[:200] == sorted(rates[:200]) and rates[200:] == sorted(rates[200:], reverse=True)
