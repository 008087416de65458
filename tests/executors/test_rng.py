from __future__ import annotations

from headway.executors.rng import uniform


def test_same_keys_same_number():
    assert uniform(7, 1, 30) == uniform(7, 1, 30)


def test_every_key_matters():
    numbers = {uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1)}
    assert len(numbers) == 4


def test_seeds_of_either_sign():
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert 0.0 <= uniform(-(2**63), 0, 0) < 1.0


def test_numbers_are_uniform_along_each_key():
    for along in range(3):
        keys = [[0, 0, 0] for _ in range(20_000)]
        for value, key in enumerate(keys):
            key[along] = value
        counts = [0] * 20
        for key in keys:
            counts[int(uniform(*key) * 20)] += 1
        chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
