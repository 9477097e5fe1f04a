from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.errors import ConfigInvalid
from serving.server.batching import Batcher
from serving.server.flags import Batching
from serving.server.padding import padded_alike
from serving.server.status import Refused


class Slow:
    """Doubles its input; remembers the batches, and lets a test hold it up."""

    def __init__(self):
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, x):
        self.go.wait(10)
        self.sizes.append(len(x))
        if (x < 0).any():
            raise Refused(3, "negative")
        return [x * 2]


def _ask_many(batcher, arrays):
    with ThreadPoolExecutor(len(arrays)) as pool:
        return [f.result() for f in [pool.submit(batcher, a) for a in arrays]]


def _queued(batcher, run, arrays):
    """Have all arrays queued behind a first one before the run goes on."""
    run.go.clear()
    with ThreadPoolExecutor(len(arrays) + 1) as pool:
        futures = [pool.submit(batcher, np.zeros((1, 2)))]
        deadline = time.monotonic() + 10
        while batcher._queue and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        futures += [pool.submit(batcher, a) for a in arrays]
        while len(batcher._queue) < len(arrays) and time.monotonic() < deadline:
            time.sleep(0.001)
        run.go.set()
        return [f.exception() or f.result()[0] for f in futures[1:]]


@pytest.fixture
def run():
    return Slow()


@pytest.fixture
def make(run):
    made = []

    def make(**limits):
        made.append(Batcher(run, Batching(**{"num_batch_threads": 1, **limits})))
        return made[-1]

    yield make
    run.go.set()
    for batcher in made:
        batcher.stop()


def test_what_waits_runs_together_and_everyone_gets_the_own_part(make, run):
    arrays = [np.full((n, 2), n) for n in (1, 2, 3)]
    results = _queued(make(), run, arrays)
    assert run.sizes == [1, 6]
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_array_equal(result, array * 2)


def test_a_batch_is_never_larger_than_its_limit(make, run):
    results = _queued(make(max_batch_size=4), run, [np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 2))])
    assert [len(r) for r in results] == [3, 2, 2]
    assert sorted(run.sizes) == [1, 3, 4]


def test_batches_are_padded_to_an_allowed_size(make, run):
    results = _queued(
        make(max_batch_size=8, allowed_batch_sizes=(4, 8)), run, [np.ones((3, 2)), np.ones((2, 2))]
    )
    assert [len(r) for r in results] == [3, 2]
    assert run.sizes == [4, 8]


def test_different_shapes_do_not_mix(make, run):
    results = _queued(make(), run, [np.ones((1, 2)), np.ones((1, 3)), np.ones((1, 3))])
    assert [r.shape for r in results] == [(1, 2), (1, 3), (1, 3)]


def test_one_bad_request_fails_alone(make, run):
    good, bad, other = _queued(make(), run, [np.ones((1, 2)), -np.ones((1, 2)), np.ones((2, 2))])
    assert isinstance(bad, Refused)
    assert good.shape == (1, 2)
    assert other.shape == (2, 2)


def test_a_timeout_lets_a_batch_fill(make, run):
    started = time.monotonic()
    results = _ask_many(make(max_batch_size=2, batch_timeout_s=5.0), [np.ones((1, 2))] * 2)
    assert len(results) == 2
    assert run.sizes == [2]
    assert time.monotonic() - started < 4, "a full batch must not wait for its timeout"


def test_limits_are_told(make, run):
    batcher = make(max_batch_size=2, max_enqueued_batches=1, enable_large_batch_splitting=False)
    with pytest.raises(Refused, match="Task size 3 is larger than maximum input batch size 2"):
        batcher(np.ones((3, 2)))
    with pytest.raises(Refused, match="equal 0th-dimension"):
        batcher(np.ones((1, 2)), np.ones((2, 2)))
    run.go.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(batcher, np.ones((1, 2)))
        time.sleep(0.1)
        second = pool.submit(batcher, np.ones((2, 2)))
        time.sleep(0.1)
        with pytest.raises(Refused, match=r"queue .* is full"):
            batcher(np.ones((2, 2)))
        run.go.set()
        assert first.result()
        assert second.result()
    batcher.stop()
    with pytest.raises(Refused, match="being unloaded"):
        batcher(np.ones((1, 2)))


def test_a_model_that_changes_the_batch_s_size_is_told():
    batcher = Batcher(
        lambda x: [x[:1]], Batching(num_batch_threads=1, max_batch_size=4, allowed_batch_sizes=(4,))
    )
    with pytest.raises(Refused, match="0th dimension does not equal"):
        batcher(np.ones((2, 2)))
    batcher.stop()


def test_parameters_file(tmp_path):
    file = tmp_path / "batching"
    file.write_text(
        "max_batch_size { value: 32 } batch_timeout_micros { value: 1500 } max_enqueued_batches { value: 7 }\n"
        "num_batch_threads { value: 3 } allowed_batch_sizes: 8 allowed_batch_sizes: 32\n"
        'thread_pool_name { value: "x" } pad_variable_length_inputs: false'
    )
    assert Batching.load(file) == Batching(32, 0.0015, 7, 3, (8, 32))
    assert Batching.load(_written(tmp_path, "")) == Batching()


def _written(folder, text):
    file = folder / "other"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size { value: 0 }",
        "max_batch_size: 3",
        "unknown { value: 1 }",
        "batch_timeout_micros { value: -1 }",
        "allowed_batch_sizes: 8",
        "max_batch_size { value: 8 } allowed_batch_sizes: 8 allowed_batch_sizes: 4",
    ],
)
def test_bad_parameters_are_refused(tmp_path, text):
    with pytest.raises(ConfigInvalid):
        Batching.load(_written(tmp_path, text))
    with pytest.raises(ConfigInvalid):
        Batching.load(tmp_path / "none")


def test_a_batching_server_answers_as_one_without(
    start_server, make_config, client_of, base_path, add_version, images, expected, until
):
    server = start_server(make_config(digits=(base_path, 1, {})), batching=Batching(max_batch_size=16))
    client = client_of(server, label=None)

    def ask(i):
        return client.predict({"image": images[i % 4 : i % 4 + 1]})["logits"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(200)))
    for i, answer in enumerate(answers):
        np.testing.assert_allclose(answer, expected[1]["logits"][i % 4 : i % 4 + 1], rtol=1e-4, atol=1e-5)
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(ask, range(400))
        add_version(base_path, 2)
        assert len(list(asked)) == 400, "a swap must not lose what is queued"
    until(lambda: client.status()[1].state == "END" if 1 in client.status() else False)


def test_a_request_larger_than_a_batch_is_split_and_put_together(make, run):
    batcher = make(max_batch_size=4)
    array = np.arange(20).reshape(10, 2)
    np.testing.assert_array_equal(batcher(array)[0], array * 2)
    assert sorted(run.sizes) == [2, 4, 4]


def test_executed_batches_can_be_smaller_than_requests(make, run):
    batcher = make(max_batch_size=8, max_execution_batch_size=3, allowed_batch_sizes=(3,))
    array = np.arange(14).reshape(7, 2)
    np.testing.assert_array_equal(batcher(array)[0], array * 2)
    assert run.sizes == [3, 3, 3], "the last one is filled up to an allowed size"


def test_one_bad_part_fails_its_whole_request(make, run):
    with pytest.raises(Refused, match="negative"):
        make(max_batch_size=2)(np.array([[1, 1], [1, 1], [-1, 1]]))


def test_splitting_can_be_switched_off(make):
    batcher = make(max_batch_size=4, enable_large_batch_splitting=False)
    with pytest.raises(Refused, match="Task size 5 is larger than maximum input batch size 4"):
        batcher(np.zeros((5, 2)))


def test_inputs_of_unequal_length_are_padded_with_their_first_element(make, run):
    """TF Serving's batching_options.h: [1, 3] and [2, 2] become [1, 3] and [2, 3]."""
    long, short = np.array([[1, 2, 3]]), np.array([[7, 8], [5, 6]])
    results = _queued(make(pad_variable_length_inputs=True), run, [long, short])
    assert run.sizes == [1, 3], "the two are one batch"
    np.testing.assert_array_equal(results[0], [[2, 4, 6]])
    np.testing.assert_array_equal(results[1], [[14, 16, 14], [10, 12, 14]])


def test_padding_knows_strings_and_empty_arrays():
    words = np.array([[b"a", b"b"]], object)
    none = np.empty((1, 0), object)
    assert [a.tolist() for a in padded_alike((words, none))] == [[[b"a", b"b"]], [[b"", b""]]]
    assert padded_alike((words, words)) == (words, words)


def test_all_fields_of_tf_serving_s_batching_file(tmp_path):
    (tmp_path / "file").write_text(
        "max_batch_size { value: 64 } batch_timeout_micros { value: 500 } max_enqueued_batches { value: 7 }\n"
        'num_batch_threads { value: 3 } thread_pool_name { value: "mine" } allowed_batch_sizes: 16\n'
        "allowed_batch_sizes: 32 pad_variable_length_inputs: true\n"
        "enable_large_batch_splitting { value: true } max_execution_batch_size { value: 32 }\n"
    )
    assert Batching.load(tmp_path / "file") == Batching(64, 0.0005, 7, 3, (16, 32), True, True, 32)
    for wrong in ("max_execution_batch_size { value: 65 }", "max_execution_batch_size { value: 0 }"):
        (tmp_path / "file").write_text(f"max_batch_size {{ value: 64 }} {wrong}")
        with pytest.raises(ConfigInvalid, match="max_execution_batch_size must be from 1"):
            Batching.load(tmp_path / "file")
